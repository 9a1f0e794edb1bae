"""A tiny real target, and proposers that no trained drafter resembles."""

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F

from eval.decode import DecodeSettings, plain_decode
from features.document import DocumentFeatures
from features.plan import DOCUMENT_SCHEMA, corpus_digest, document_id, make_plan
from features.spec import FeatureSpec
from features.writer import create_store
from trainer.drafter.checkpoint import save_drafter
from trainer.drafter.config import DrafterConfig
from trainer.drafter.init import init_random
from trainer.drafter.model import Drafter


class Scripted:
    """Proposes what `rule(text position)` says, with all its probability: an adversary without weights."""

    def __init__(self, rule, vocab_size: int, block_size: int = 8):
        self.rule, self.vocab_size, self.block_size = rule, vocab_size, block_size

    def open(self, slots, capacity):
        self.fed = [0] * slots

    def extend(self, slot, start, hidden_SLD, token_ids_S):
        assert start == 0 or start == self.fed[slot], "features must arrive without gap or overlap"
        assert len(hidden_SLD) == len(token_ids_S)
        self.fed[slot] = start + len(hidden_SLD)

    def propose(self, slots, anchors_B, starts):
        assert [self.fed[s] for s in slots] == starts, "a block sees exactly the positions before its anchor"
        places = zip(slots, starts, strict=True)
        tokens = [[self.rule(slot, start + k) for k in range(1, self.block_size)] for slot, start in places]
        return 50.0 * torch.nn.functional.one_hot(torch.tensor(tokens), self.vocab_size).float()


@pytest.fixture
def scripted(tiny):
    return lambda rule, block_size=8: Scripted(rule, tiny.vocab_size, block_size)


PROMPTS = [list(f"{i}. Once upon {i * 37} times".encode()) for i in range(12)]


@pytest.fixture(scope="session")
def make_drafter(tiny):
    def make(seed=0, **fields):
        fields = {"block_size": 8, "num_hidden_layers": 2, **fields}
        drafter = Drafter(
            DrafterConfig(
                vocab_size=tiny.vocab_size,
                hidden_size=tiny.hidden_size,
                intermediate_size=128,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                rope_theta=1e4,
                max_position_embeddings=1024,
                mask_token_id=tiny.config.mask_token_id,
                target_layer_ids=tiny.config.tap_layer_ids,
                num_target_layers=tiny.num_layers,
                **fields,
            )
        )
        init_random(drafter, seed)
        return drafter.eval()

    return make


def _train(drafter, target, texts, steps):
    """Plain cross-entropy on every block of the texts: enough to be right now and then."""
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    head = target.frozen_head()
    K = drafter.config.block_size
    for step in range(steps):
        text = texts[step % len(texts)]
        ids = torch.tensor(text.text_ids)
        anchors = torch.arange(len(text.prompt_ids), len(ids) - K)
        labels = ids[anchors[:, None] + torch.arange(K)]
        hidden = target.forward(ids[None], logits="none").hidden_BSLD[0].clone()
        embeds = F.embedding(ids, head.embedding_VD) if drafter.config.needs_context_embeds else None
        out = drafter(
            hidden, torch.arange(len(ids)), drafter.block_inputs(labels, head.embedding_VD),
            torch.zeros_like(anchors), anchors, anchors, context_embeds_SD=embeds,
        )  # fmt: skip
        loss = F.cross_entropy((out[:, 1:] @ head.head_VD.T.clone()).flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter


@pytest.fixture(scope="session")
def train(tiny):
    return lambda drafter, texts, steps: _train(drafter, tiny, texts, steps)


@pytest.fixture(scope="session")
def long_texts(tiny):
    traces = plain_decode(tiny, PROMPTS, DecodeSettings(max_new_tokens=60, batch_size=12))
    return [t for t in traces if len(t.answer_ids) > 20]


@pytest.fixture(scope="session")
def drafter(tiny, make_drafter, long_texts):
    """Knows three of the texts nearly by heart: accepted lengths of every kind, whole blocks among them."""
    return _train(make_drafter(), tiny, long_texts[:3], 150)


@pytest.fixture(scope="session")
def tiny_run(tiny, drafter, make_drafter, long_texts, tmp_path_factory):
    """A run folder as a trainer leaves it, and a store with held-out documents in fp32."""
    root = tmp_path_factory.mktemp("eval-run")
    save_drafter(drafter, root / "runs" / "demo" / "drafter")
    save_drafter(make_drafter(seed=9), root / "runs" / "demo" / "drafter-init")
    (root / "runs" / "demo" / "config.toml").write_text('model = "tiny"\n')
    rows = []
    for trace in long_texts:
        mask = [0] * len(trace.prompt_ids) + [1] * len(trace.answer_ids)
        rows.append(
            {
                "document": document_id(trace.text_ids, mask),
                "token_ids": trace.text_ids,
                "loss_mask": mask,
                "source": "stories" if len(rows) % 2 else "letters",
                "split": "heldout",
                "prompt_length": len(trace.prompt_ids),
            }
        )
    documents = pa.Table.from_pylist(rows, schema=DOCUMENT_SCHEMA)
    spec = FeatureSpec(
        target="tiny", **tiny.source_identity(), tap_layer_ids=tiny.config.tap_layer_ids, hidden_size=tiny.hidden_size,
        storage_dtype="fp32", max_length=256, corpus_digest=corpus_digest(documents), shard_tokens=512,
    )  # fmt: skip
    writer = create_store(str(root / "store"), spec, make_plan(documents, spec.shard_tokens))
    by_id = {row["document"]: row for row in rows}
    for shard in writer.missing_shards():
        features = []
        for document in writer.shard_plan(shard)["document"].to_pylist():
            ids = torch.tensor(by_id[document]["token_ids"])
            features.append(
                DocumentFeatures(
                    document=document,
                    token_ids_S=ids.int().numpy(),
                    loss_mask_S=np.array(by_id[document]["loss_mask"], np.uint8),
                    hidden_SLD=tiny.forward(ids[None], logits="none").hidden_BSLD[0],
                    target_logprob_S=np.zeros(len(ids), np.float32),
                )
            )
        writer.write_shard(shard, features)
    writer.finish()
    return root
