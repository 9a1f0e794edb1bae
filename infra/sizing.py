"""What a drafter costs: GPUs, terabytes, hours and money per 100 million tokens, by arithmetic that is written here.

`python -m infra sizing` prints the tables of docs/clusters/sizing.md, and a test keeps the two equal. None of these
figures is a measurement: each follows from the shapes below, a card's data sheet and the two efficiencies.
"""

from dataclasses import dataclass

TOKENS = 100e6
DOCUMENT = 1000  # tokens
EPOCHS = 6
ANCHORS, BLOCK, TAPS, LAYERS = 512, 16, 5, 5  # per document; of the recipe sft
VOCAB = 151_936

FLOPS = 989e12  # H200, bf16, dense, data sheet
BANDWIDTH = 4.8e12  # H200, bytes/s, data sheet
MATMUL_SHARE = 0.40  # of FLOPS that a pass reaches
MEMORY_SHARE = 0.45  # of BANDWIDTH that decoding reaches
BATCH = 256  # answers that a serving engine decodes at once on one GPU
GPUS = 8  # of a node
PRICE = 3.5  # of one GPU and hour, any currency


@dataclass(frozen=True)
class Shape:
    """A target: parameters that a token passes, all of them, and the sizes of its layers (its config.json)."""

    name: str
    active: float
    total: float
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int

    @property
    def drafter_layer(self) -> int:
        """Parameters of one layer of the drafter (dense, also for a target of experts)."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def drafter(self) -> int:
        """Trainable parameters: layers, and the projection of the concatenated taps."""
        return LAYERS * self.drafter_layer + TAPS * self.hidden**2

    def store_bytes(self, dtype: str) -> float:
        """Per token: bf16, or fp8 with a float32 scale for each tap."""
        return TAPS * (2 * self.hidden if dtype == "bf16" else self.hidden + 4)

    def answers_per_s(self) -> float:
        """Tokens/s of one GPU: a step reads all weights once and every answer's cache (bf16)."""
        cache = BATCH * DOCUMENT * 2 * self.layers * self.kv_heads * self.head_dim * 2
        return BATCH / ((2 * self.total + cache) / (BANDWIDTH * MEMORY_SHARE))

    def prefill_per_s(self) -> float:
        """Tokens/s of one GPU: two operations per parameter and token."""
        return FLOPS * MATMUL_SHARE / (2 * self.active)

    def training_flops(self) -> float:
        """Of one document and epoch, forward and backward."""
        blocks = ANCHORS * BLOCK
        layers = 6 * LAYERS * self.drafter_layer * blocks
        head = 4 * self.hidden * VOCAB * ANCHORS * (BLOCK - 1)  # frozen: no gradient of the weights
        context = 6 * TAPS * self.hidden**2 * DOCUMENT
        keys_values = 6 * LAYERS * 2 * self.hidden * self.kv_heads * self.head_dim * DOCUMENT
        attention = 12 * LAYERS * blocks * (DOCUMENT / 2) * self.heads * self.head_dim
        return layers + head + context + keys_values + attention


TARGETS = (
    Shape("Qwen3-4B", 4.0e9, 4.0e9, 2560, 9728, 32, 8, 128, 36),
    Shape("Qwen3-8B", 8.2e9, 8.2e9, 4096, 12_288, 32, 8, 128, 36),
    Shape("Qwen3-Coder-30B-A3B", 3.3e9, 30.5e9, 2048, 6144, 32, 4, 128, 48),
)


def steps(shape: Shape) -> dict[str, float]:
    """GPU hours of each step for `TOKENS`."""
    documents = TOKENS / DOCUMENT
    return {
        "answers": TOKENS / shape.answers_per_s() / 3600,
        "prefill": TOKENS / shape.prefill_per_s() / 3600,
        "training": EPOCHS * documents * shape.training_flops() / (FLOPS * MATMUL_SHARE) / 3600,
    }


def reading(shape: Shape, dtype: str) -> float:
    """GB/s that one node's training reads from the store."""
    per_s = GPUS * FLOPS * MATMUL_SHARE / shape.training_flops()
    return per_s * DOCUMENT * shape.store_bytes(dtype) / 1e9


def sizing() -> str:
    """The tables, as Markdown."""
    return "\n\n".join([_hours(), _store(), _memory()])


def _hours() -> str:
    rows = [["target", "answers", "prefill", f"training, {EPOCHS} epochs", "GPU hours", "hours on 1 / 4 nodes", "cost"]]
    for shape in TARGETS:
        hours = steps(shape)
        total = sum(hours.values())
        nodes = " / ".join(f"{total / GPUS / n:.1f}" for n in (1, 4))
        rows.append(
            [shape.name, *(f"{h:.1f} h" for h in hours.values()), f"{total:.0f}", nodes, f"{total * PRICE:.0f}"]
        )
    return _table(rows)


def _store() -> str:
    rows = [["target", "bytes per token, bf16 / fp8", "TB, bf16 / fp8", "GB/s read by 1 node, bf16 / fp8"]]
    for shape in TARGETS:
        each = [shape.store_bytes(d) for d in ("bf16", "fp8")]
        cells = [" / ".join(f"{b:,.0f}" for b in each), " / ".join(f"{b * TOKENS / 1e12:.2f}" for b in each)]
        rows.append([shape.name, *cells, " / ".join(f"{reading(shape, d):.1f}" for d in ("bf16", "fp8"))])
    return _table(rows)


def _memory() -> str:
    rows = [
        [
            "target",
            "weights, GB",
            "GPUs per target",
            "drafter, M parameters",
            "its state, GB",
            "per rank of 8, ZeRO-1, GB",
        ]
    ]
    for shape in TARGETS:
        weights = 2 * shape.total / 1e9
        frozen = 2 * 2 * shape.hidden * VOCAB / 1e9  # embedding and head, bf16
        state, shared = 16 * shape.drafter / 1e9, (4 + 12 / GPUS) * shape.drafter / 1e9
        cells = [
            f"{weights:.0f}",
            "1",
            f"{shape.drafter / 1e6:,.0f}",
            f"{state + frozen:.0f}",
            f"{shared + frozen:.0f}",
        ]
        rows.append([shape.name, *cells])
    return _table(rows)


def _table(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(r)} |" for r in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
