"""The Triton kernels in the interpreter, on CPU tensors, against their torch definitions.

On a GPU the same comparisons run compiled (`kernels/bench_gpu.py`).
"""

import pytest

pytestmark = [pytest.mark.spawn]

LOSS = """
import torch
from kernels.decay_ce import Teacher, weighted_cross_entropy
from kernels.decay_ce_triton import row_gradient_, row_statistics
from kernels.weighting import decay, dpace

g = torch.Generator().manual_seed(0)
def rand(*shape):
    return torch.randn(*shape, generator=g)

import kernels.decay_ce_triton as module
module.TILE = 64  # several tiles, the last one ragged
for V in (33, 64, 203):
    x = rand(7, V) * 5
    x[2] = 1.0                       # all equal: the lowest index
    x[3, : V - 1] = -float("inf")    # a single finite logit, in the last tile
    x[4, ::2] = -float("inf")
    lse, top, argmax = row_statistics(x)
    torch.testing.assert_close(lse, x.logsumexp(1))
    assert torch.equal(top, x.amax(1)) and torch.equal(argmax, x.argmax(1))
    labels = torch.randint(0, V, (7,), generator=g)
    w = rand(7).abs()
    got = x.clone()
    row_gradient_(got, labels, lse, w, w)
    expected = w[:, None] * (x.softmax(1) - torch.nn.functional.one_hot(labels, V))
    torch.testing.assert_close(got, expected)
    narrow = x.bfloat16()
    lse16, *_ = row_statistics(narrow)
    torch.testing.assert_close(lse16, narrow.float().logsumexp(1))
    row_gradient_(narrow, labels, lse16, w, w)
    # the interpreter truncates when it stores bf16: one unit in the last place
    torch.testing.assert_close(narrow.float(), expected, rtol=2**-6, atol=0.03)

A, K, D, V = 5, 6, 16, 203
hidden, head = rand(A, K, D).requires_grad_(), rand(V, D)
labels = torch.randint(0, V, (A, K), generator=g)
mask = torch.rand(A, K, generator=g) < 0.7
mask[:, 0] = False
for share in (None, 0.6, 1.0):
    teacher = None
    if share is not None:
        p, ids = rand(A, K, V).log_softmax(-1).topk(5)
        teacher = Teacher(ids, p, share)
    for weighting in (decay(4.0), dpace(0.5)):
        results = []
        for triton in (False, True):
            out = weighted_cross_entropy(
                hidden, head, labels, mask, weighting, teacher=teacher, chunk_rows=12, triton=triton
            )
            (grad,) = torch.autograd.grad(out.numerator, hidden)
            results.append((*[t.detach() for t in out], grad))
        for a, b in zip(*results):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
print("ok")
"""

ATTENTION = """
import itertools, torch
from trainer.drafter.attention import ContextRanges, anchored_attention
import kernels.anchored_attention as module
for launch in (module.FORWARD, module.BACKWARD_BLOCK, module.BACKWARD_ROWS):
    launch["N"] = 16  # several tiles in short contexts

g = torch.Generator().manual_seed(0)
def check(S, K, H, G, E, starts, ends, valid, causal, window):
    A = len(starts)
    shapes = ((A, K, H, E), (S, G, E), (S, G, E), (A, K, G, E), (A, K, G, E))
    tensors = [torch.randn(s, generator=g).requires_grad_() for s in shapes]
    ranges = ContextRanges(torch.tensor(starts), torch.tensor(ends), torch.tensor(valid))
    weight = torch.randn(A, K, H, E, generator=g)
    results = []
    for execution in ("dense", "triton"):
        out = anchored_attention(*tensors, ranges, causal=causal, window=window, execution=execution)
        results.append((out, *torch.autograd.grad((out * weight).sum(), tensors)))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-6)

starts, ends = [0, 0, 0, 0, 40, 40, 62], [0, 1, 39, 20, 55, 41, 70]
valid = [True, True, True, False, True, True, True]
for causal, window in itertools.product((False, True), (None, 5, 30)):
    check(75, 6, 4, 2, 8, starts, ends, valid, causal, window)
check(75, 16, 4, 1, 24, starts, ends, valid, False, None)   # 64 query rows, head dim no power of two
check(75, 3, 2, 2, 16, starts[::-1], ends[::-1], valid, False, None)  # blocks in any order
check(33, 4, 2, 1, 16, [0], [33], [True], False, None)
check(33, 4, 2, 1, 16, [0, 0], [0, 0], [True, False], False, None)   # no context at all
print("ok")
"""


@pytest.mark.parametrize("source", [LOSS, ATTENTION], ids=["decay_ce", "anchored_attention"])
def test_equals_torch(run_python, source):
    assert run_python(source, interpret=True).strip() == "ok"
