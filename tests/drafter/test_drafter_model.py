"""The drafter: training forward = cached decoding, ablation switches, blocks that do not see what they must not."""

import pytest
import torch

SWITCHES = {
    "published": {},
    "one layer": {"num_hidden_layers": 1},
    "one tap": {"target_layer_ids": (4,)},
    "sliding": {
        "num_hidden_layers": 3,
        "layer_types": ("sliding_attention", "sliding_attention", "full_attention"),
        "sliding_window": 9,
    },
    "causal": {"causal": True},
    "input_fusion": {"conditioning": "input_fusion"},
    "none": {"conditioning": "none"},
    "autoregressive": {"drafting": "autoregressive"},
    "autoregressive input_fusion": {"drafting": "autoregressive", "conditioning": "input_fusion"},
    "biases": {"attention_bias": True},
}


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_packed_forward_equals_cached_decode(tools, switch, dtype):
    drafter = tools.drafter(dtype=dtype, **SWITCHES[switch])
    row = tools.row(drafter.config, dtype=dtype)
    with torch.no_grad():
        packed_AKD = tools.run(drafter, row)
    inputs_AKD = drafter.block_inputs(row.labels_AK, row.embedding_VD)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    cache, document = None, None
    for a in range(packed_AKD.shape[0]):
        if not row.anchor_valid_A[a]:
            continue
        if document != row.anchor_document_A[a]:  # anchors are sorted, so the cache of a document only grows
            document, cache = row.anchor_document_A[a], drafter.new_cache()
        first, start = int(row.context_start_A[a]), int(row.anchor_position_A[a])
        new = slice(first + cache.length, first + start)
        decoded = drafter.decode(
            inputs_AKD[a : a + 1],
            row.hidden_SLD[new],
            cache,
            start,
            new_embeds_SD=row.embedding_VD[row.token_ids_S[new]],
        )[0]
        assert cache.length == start
        # slot 0 predicts nothing; in an autoregressive drafter it holds the state behind the block
        torch.testing.assert_close(decoded[1:], packed_AKD[a, 1:], rtol=0, atol=tolerance)


@pytest.mark.parametrize("switch", SWITCHES)
def test_rows_at_different_positions_decode_as_alone(tools, switch):
    """One pass over all blocks as a batch of sequences, rows in any order, with a context that comes in two parts."""
    drafter = tools.drafter(dtype=torch.float64, **SWITCHES[switch])
    row = tools.row(drafter.config, dtype=torch.float64)
    with torch.no_grad():
        packed_AKD = tools.run(drafter, row)
    blocks = torch.nonzero(row.anchor_valid_A).flatten()
    slots = [(3 * i + 1) % len(blocks) if len(blocks) % 3 else i for i in range(len(blocks))]
    assert len(set(slots)) == len(slots) > 2 and len(set(row.anchor_position_A[blocks].tolist())) > 2
    cache = drafter.new_cache(rows=2, capacity=4)  # too small: it grows
    ranges = [(int(row.context_start_A[a]), int(row.context_end_A[a])) for a in blocks]
    halves = [(start, (start + end) // 2, end) for start, end in ranges]
    for part in (0, 1):
        spans = [slice(h[part], h[part + 1]) for h in halves]
        embeds = [row.embedding_VD[row.token_ids_S[span]] for span in spans]
        drafter.append_context(cache, slots, [row.hidden_SLD[span] for span in spans], embeds)
    inputs_BKD = drafter.block_inputs(row.labels_AK, row.embedding_VD)[blocks]
    for _ in range(2):  # a pass leaves the context as it was
        decoded_BKD = drafter.decode_block(inputs_BKD, cache, slots)
        torch.testing.assert_close(decoded_BKD[:, 1:], packed_AKD[blocks, 1:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("switch", SWITCHES)
def test_switch_changes_output_and_all_parameters_train(tools, switch):
    drafter = tools.drafter(**SWITCHES[switch])
    row = tools.row(drafter.config)
    out = tools.run(drafter, row)[:, 1:]
    out.square().sum().backward()
    for name, p in drafter.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, name
    if SWITCHES[switch].get("conditioning") == "none":  # target features have no influence
        row.hidden_SLD = torch.randn_like(row.hidden_SLD)
        torch.testing.assert_close(tools.run(drafter, row)[:, 1:], out)
    elif switch == "causal":
        assert not torch.allclose(tools.run(tools.drafter(), row)[:, 1:], out)


def test_a_block_sees_only_context_before_its_anchor(tools):
    """Anchors 5 and 6, K = 4 (SpecForge#470): block 0 depends on rows 0..4 only, block 1 on rows 0..5."""
    drafter = tools.drafter(block_size=4)
    row = tools.row(drafter.config, lengths=(12,), padding=0)
    row.context_start_A = torch.zeros(2, dtype=torch.int64)
    row.context_end_A = row.anchor_position_A = torch.tensor([5, 6])
    row.anchor_valid_A = torch.ones(2, dtype=torch.bool)
    row.labels_AK = torch.arange(8).view(2, 4)
    row.hidden_SLD.requires_grad_()
    out = tools.run(drafter, row)
    for a, rows in ((0, 5), (1, 6)):
        (grad,) = torch.autograd.grad(out[a].sum(), row.hidden_SLD, retain_graph=True)
        seen = grad.abs().sum((1, 2)) > 0
        assert seen.tolist() == [True] * rows + [False] * (12 - rows)
    before = out.detach()
    row.labels_AK[1, 0] = 50
    after = tools.run(drafter, row).detach()
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


def test_a_document_does_not_see_its_neighbours_in_the_row(tools):
    drafter = tools.drafter()
    row = tools.row(drafter.config)
    before = tools.run(drafter, row)
    row.hidden_SLD[row.document_S != 2] += 1
    after = tools.run(drafter, row)
    mine = row.anchor_document_A == 2
    torch.testing.assert_close(after[mine], before[mine], rtol=0, atol=1e-6)
    assert not torch.allclose(after[~mine][2], before[~mine][2])


def test_invalid_block_sends_no_gradient_to_the_context(tools):
    drafter = tools.drafter()
    row = tools.row(drafter.config)
    row.hidden_SLD.requires_grad_()
    out = tools.run(drafter, row)
    (grad,) = torch.autograd.grad(out[~row.anchor_valid_A].sum(), row.hidden_SLD)
    assert torch.isfinite(out).all()
    assert grad.abs().max() == 0


def test_draft_is_the_argmax_of_decode_and_shorter_blocks_are_allowed(tools):
    drafter = tools.drafter()
    row = tools.row(drafter.config)
    anchor = row.token_ids_S[5:6]
    hidden = drafter.decode(drafter.block_inputs(anchor, row.embedding_VD), row.hidden_SLD[:5], drafter.new_cache(), 5)
    tokens = drafter.draft(anchor, row.hidden_SLD[:5], drafter.new_cache(), 5, row.embedding_VD, row.head_VD)
    assert torch.equal(tokens, (hidden[:, 1:] @ row.head_VD.T).argmax(-1))
    short = drafter.draft(anchor, row.hidden_SLD[:5], drafter.new_cache(), 5, row.embedding_VD, row.head_VD, length=3)
    assert short.shape == (1, 2)


def test_autoregressive_draft_feeds_its_own_tokens(tools):
    """Teacher forcing on the drafted tokens must predict those very tokens."""
    drafter = tools.drafter(drafting="autoregressive")
    row = tools.row(drafter.config)
    anchor = row.token_ids_S[5:6]
    tokens = drafter.draft(anchor, row.hidden_SLD[:5], drafter.new_cache(), 5, row.embedding_VD, row.head_VD)
    block = torch.cat([anchor[:, None], tokens], dim=1)
    hidden = drafter.decode(drafter.block_inputs(block, row.embedding_VD), row.hidden_SLD[:5], drafter.new_cache(), 5)
    assert torch.equal((hidden[:, 1:] @ row.head_VD.T).argmax(-1), tokens)


def test_decode_refuses_a_gap_in_the_context(tools):
    drafter = tools.drafter()
    row = tools.row(drafter.config)
    inputs = drafter.block_inputs(row.token_ids_S[:1], row.embedding_VD)
    with pytest.raises(ValueError, match=r"positions 0\.\.6"):
        drafter.decode(inputs, row.hidden_SLD[:5], drafter.new_cache(), 7)


def test_cache_crop_forgets(tools):
    drafter = tools.drafter()
    row = tools.row(drafter.config)
    inputs = drafter.block_inputs(row.token_ids_S[:1], row.embedding_VD)
    cache = drafter.new_cache()
    first = drafter.decode(inputs, row.hidden_SLD[:5], cache, 5)
    drafter.decode(inputs, row.hidden_SLD[5:9], cache, 9)
    cache.crop(5)
    torch.testing.assert_close(drafter.decode(inputs, row.hidden_SLD[:0], cache, 5), first)


def test_casting_keeps_the_rope_frequencies_exact(tools):
    """In bf16 they would have two digits; far positions must still agree with a drafter that was never cast."""
    exact = tools.drafter()
    cast = tools.drafter(dtype=torch.bfloat16).to(torch.float32)
    assert torch.equal(cast.rotary.inv_freq, exact.rotary.inv_freq)
    assert tools.drafter(dtype=torch.bfloat16).rotary.inv_freq.dtype == torch.float32
    assert "rotary.inv_freq" not in exact.state_dict()
