"""AnchorStream: the training batches, as a pure function of (seed, number of documents seen).

    stream = AnchorStream(store, StreamConfig(seed=0, global_batch=64), rank=r, world=w, samples_seen=n)
    for batch in stream: ...                      # endless; stream.state() -> {"samples_seen": ...}

Order: a Feistel permutation of the split's documents per epoch; step t takes `global_batch` consecutive ones, cut into
micro-batches of m documents; rank r gets the r-th contiguous run of micro-batches. So the sequence of micro-batches
is the same for any world size, and the count of documents seen is the only state. Documents at the end of an epoch
that do not fill a global batch are left out of that epoch (another few each time, since the permutation changes).

Anchors: position p is legal where loss_mask[p] and loss_mask[p+1]; up to A_d per document, without replacement, sorted,
drawn by a hash of (seed, epoch, document id, p). No collective is needed for anything here.

Legend: S context rows of a batch, L taps, D hidden size, A anchors (blocks), K block size, k teacher candidates.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pydantic
import torch
from pydantic import Field

from features.buffers import Buffers
from features.files import is_remote
from features.order import draw_anchors, permuted, spread_rows
from features.reader import FeatureStore
from infra.config import Config
from infra.errors import ConfigError, DataError

REMOTE_READS = 16  # at once: a small read of an object store takes 20 ms, of which all but 0.1 is waiting

Visited = Callable[[str], Any] | Mapping[str, Any]
"""document id -> positions that decoding visits (None or absent: none known)"""


class StreamConfig(Config):
    """How documents become training batches."""

    seed: int = Field(default=0, ge=0)
    block_size: int = Field(default=16, ge=2, le=64)
    """K: anchor + drafted positions"""
    anchors_per_document: int = Field(default=512, ge=1)
    """A_d: anchors drawn per document and epoch, at most"""
    documents_per_micro_batch: int = Field(default=1, ge=1)
    """m: documents packed into one batch"""
    global_batch: int = Field(default=16, ge=1)
    """documents per optimiser step over all ranks; a multiple of m times the number of ranks"""
    context_tokens: int | None = Field(default=None, ge=1)
    """S of a micro-batch with shape `fixed`; None is m * max_length. With less, the longest documents of a crowded
    micro-batch lose the anchors behind what fits"""
    shape: Literal["fixed", "trimmed"] = "fixed"
    """`fixed`: the same S and A always (compiled kernels); `trimmed`: S and A cut to what is used (CPU), rounded up to
    multiples of 64 and 8"""
    splits: tuple[str, ...] = ("train",)
    """splits of the store to draw documents from"""
    anchors: Literal["random", "fixed"] = "random"
    """`fixed`: every K-th legal position, the paper's comparison"""
    visited_share: float = Field(default=0.5, ge=0, le=1)
    """share of a document's anchors taken from its visited positions, where the trainer gives such"""
    lookahead: int = Field(default=0, ge=0)
    """tokens behind each block, and rows of context, that a batch has besides, so that a trainer can move its blocks
    on (`AnchorBatch.ahead_labels_AX`)"""
    prefetch: int = Field(default=2, ge=1)
    """batches read ahead; each holds S * L * D * 2 bytes (126 MB for 3,072 tokens at D = 4096 with 5 taps)"""
    workers: int = Field(default=2, ge=1)
    """reading threads"""

    @pydantic.model_validator(mode="after")
    def _divides(self) -> "StreamConfig":
        if self.global_batch % self.documents_per_micro_batch:
            raise ValueError(
                f"global_batch = {self.global_batch} is no multiple of documents_per_micro_batch = "
                f"{self.documents_per_micro_batch}; change one of them"
            )
        return self


@dataclass
class AnchorBatch:
    """One micro-batch on one rank. Padding: hidden states, positions, labels 0; documents -1; masks False."""

    hidden_SLD: torch.Tensor  # bf16 or fp32
    positions_S: torch.Tensor  # int64, restart per document
    document_S: torch.Tensor  # int64, index in the batch
    token_ids_S: torch.Tensor  # int64
    context_start_A: torch.Tensor  # int64: block a sees context rows [start, end)
    context_end_A: torch.Tensor  # int64, exclusive: the row of its anchor
    anchor_position_A: torch.Tensor  # int64, position in the document (RoPE)
    anchor_document_A: torch.Tensor  # int64, index in the batch
    anchor_valid_A: torch.Tensor  # bool
    labels_AK: torch.Tensor  # int64: token at p + k; [a, 0] is the anchor; 0 beyond the document
    supervised_AK: torch.Tensor  # bool: k >= 1, inside the document, loss mask at p + k
    target_logprob_AK: torch.Tensor  # float32: the target's log p of the label
    topk_ids_AKk: torch.Tensor | None  # int64: the target's candidates for the token at p + k
    topk_logprobs_AKk: torch.Tensor | None  # float32
    # With a lookahead, else None; X = K + lookahead:
    ahead_labels_AX: torch.Tensor | None  # int64: as labels_AK, further
    ahead_loss_mask_AX: torch.Tensor | None  # bool: loss mask at p + x, the anchor's own included
    ahead_logprob_AX: torch.Tensor | None  # float32: as target_logprob_AK
    context_limit_A: torch.Tensor | None  # int64, exclusive: the last row of its document in the batch
    documents: list[str]
    step: int  # optimiser step since the first document
    micro: int  # micro-batch of this rank within the step
    step_supervised_K: torch.Tensor  # int64: supervised slots per k in the whole global batch of this step
    step_blocks: int  # blocks with a supervised slot in the whole global batch

    def to(self, device: torch.device | str, non_blocking: bool = True) -> "AnchorBatch":
        """The same batch on a device; asynchronous from pinned memory."""
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin(self) -> "AnchorBatch":
        """The same batch in page-locked memory."""
        return self._map(lambda t: t.pin_memory())

    def _map(self, f: Callable[[torch.Tensor], torch.Tensor]) -> "AnchorBatch":
        changed = {
            x.name: f(v) for x in dataclasses.fields(self) if isinstance(v := getattr(self, x.name), torch.Tensor)
        }
        return dataclasses.replace(self, **changed)


@dataclass
class _StepPlan:
    rows: np.ndarray  # documents of the global batch, rows of store.documents
    anchors: list[np.ndarray]  # positions per document
    lengths: list[int]  # tokens per document
    supervised_K: np.ndarray
    blocks: int


class AnchorStream:
    """Iterates over this rank's micro-batches, for ever, reading ahead in threads.

    `data_wait_s` is the time that the consumer has waited in total, `last_wait_s` for the last batch.
    """

    def __init__(
        self,
        store: FeatureStore,
        cfg: StreamConfig,
        rank: int = 0,
        world: int = 1,
        samples_seen: int = 0,
        *,
        visited: Visited | None = None,
        pin: bool | None = None,
    ):
        """
        Args:
            samples_seen: `state()["samples_seen"]` of the run to continue, on any number of ranks.
            visited: positions per document that decoding visits; mixed in with `cfg.visited_share`.
            pin: page-lock batches; None does where CUDA is.
        Raises:
            ConfigError: batch sizes that do not divide.
            DataError: fewer documents than a global batch.
        """
        m, G = cfg.documents_per_micro_batch, cfg.global_batch
        if G % (m * world):
            raise ConfigError(
                f"global_batch = {G} is no multiple of documents_per_micro_batch * ranks = {m} * {world}; "
                f"set it to {max(1, round(G / (m * world))) * m * world}"
            )
        if samples_seen % G:
            raise ConfigError(
                f"samples_seen = {samples_seen} is no multiple of global_batch = {G}; resume with the "
                f"global_batch of the run"
            )
        splits = store.documents["split"].to_numpy(zero_copy_only=False)
        self.rows = np.flatnonzero(np.isin(splits, cfg.splits))
        self.steps_per_epoch = len(self.rows) // G
        if not self.steps_per_epoch:
            raise DataError(
                f"{store.uri} has {len(self.rows)} documents in the splits {', '.join(cfg.splits)}, "
                f"fewer than global_batch = {G}; lower global_batch or prefill more"
            )
        self.store, self.cfg, self.rank, self.world, self.visited = store, cfg, rank, world, visited
        self.pin = torch.cuda.is_available() if pin is None else pin
        self.accumulation = G // (m * world)
        self.samples_seen = samples_seen
        self.data_wait_s = self.last_wait_s = 0.0
        hidden_bytes = store.spec.num_taps * store.spec.hidden_size * 4
        self.buffers = Buffers(cfg.prefetch * m * store.spec.max_length * hidden_bytes)
        self.context_tokens = cfg.context_tokens or m * store.spec.max_length

    def state(self) -> dict[str, int]:
        """What a resumed stream needs. A step counts as seen once its last micro-batch has been handed out."""
        return {"samples_seen": self.samples_seen}

    @property
    def epoch(self) -> int:
        return self.samples_seen // self.cfg.global_batch // self.steps_per_epoch

    def __iter__(self) -> Iterator[AnchorBatch]:
        step, micro = self.samples_seen // self.cfg.global_batch, 0
        pending: deque[Future[AnchorBatch]] = deque()
        plan: Future[_StepPlan] | None = None
        pool = ThreadPoolExecutor(self.cfg.workers, thread_name_prefix="anchor-stream")
        try:
            while True:
                while len(pending) < self.cfg.prefetch:
                    if micro == 0:
                        plan = pool.submit(self._plan_step, step)
                    # The pool is first in, first out: a step's plan has begun before any batch that waits for it.
                    pending.append(pool.submit(self._build, plan, step, micro))
                    micro += 1
                    if micro == self.accumulation:
                        step, micro = step + 1, 0
                began = time.perf_counter()
                batch = pending.popleft().result()
                self.last_wait_s = time.perf_counter() - began
                self.data_wait_s += self.last_wait_s
                if batch.micro == self.accumulation - 1:
                    self.samples_seen = (batch.step + 1) * self.cfg.global_batch
                yield batch
        finally:
            for future in pending:
                future.cancel()
            pool.shutdown(wait=True, cancel_futures=True)

    def step_rows(self, step: int) -> np.ndarray:
        """Rows of `store.documents` that optimiser step `step` reads, over all ranks."""
        G = self.cfg.global_batch
        epoch, t = divmod(step, self.steps_per_epoch)
        return self.rows[permuted(np.arange(t * G, (t + 1) * G), len(self.rows), self.cfg.seed, epoch)]

    def _plan_step(self, step: int) -> _StepPlan:
        m, G, K = self.cfg.documents_per_micro_batch, self.cfg.global_batch, self.cfg.block_size
        epoch, rows = step // self.steps_per_epoch, self.step_rows(step)
        ids = self.store.documents["document"].take(rows).to_pylist()
        with ThreadPoolExecutor(REMOTE_READS if is_remote(self.store.uri) else 1) as pool:
            masks = list(pool.map(lambda r: self.store.read_array("loss_mask", int(r)).astype(bool), rows))
        legal = [np.flatnonzero(mask[:-1] & mask[1:]) for mask in masks]
        for a in range(0, G, m):  # a micro-batch is the same on any number of ranks, and so is what fits into it
            need = np.array([p[-1] if len(p) else 0 for p in legal[a : a + m]])
            if need.sum() > self.context_tokens:
                limits = spread_rows(need, self.context_tokens)
                legal[a : a + m] = [p[p <= limit] for p, limit in zip(legal[a : a + m], limits, strict=True)]
        anchors = [self._anchors(p, epoch, document) for p, document in zip(legal, ids, strict=True)]
        supervised_K, blocks = np.zeros(K, np.int64), 0
        for p, mask in zip(anchors, masks, strict=True):
            window_AK = _windows(mask, p, K)
            window_AK[:, 0] = False
            supervised_K += window_AK.sum(0)
            blocks += int(window_AK.any(1).sum())
        return _StepPlan(rows, anchors, [len(mask) for mask in masks], supervised_K, blocks)

    def _anchors(self, legal: np.ndarray, epoch: int, document: str) -> np.ndarray:
        cfg = self.cfg
        if cfg.anchors == "fixed":
            return legal[:: cfg.block_size][: cfg.anchors_per_document]
        visited = None
        if self.visited is not None:
            visited = self.visited(document) if callable(self.visited) else self.visited.get(document)
        return draw_anchors(legal, cfg.anchors_per_document, cfg.seed, epoch, document, visited, cfg.visited_share)

    def _build(self, plan: "Future[_StepPlan]", step: int, micro: int) -> AnchorBatch:
        cfg, p, store, K = self.cfg, plan.result(), self.store, self.cfg.block_size
        m = cfg.documents_per_micro_batch
        first = (self.rank * self.accumulation + micro) * m
        rows, anchors = p.rows[first : first + m], p.anchors[first : first + m]
        # Rows of context that some block sees: [0, last anchor) of each document.
        need = [int(a[-1]) if len(a) else 0 for a in anchors]
        if cfg.lookahead:
            ends = zip(need, p.lengths[first : first + m], strict=True)
            further = [min(n + cfg.lookahead, length - 1) if n else 0 for n, length in ends]
            if sum(further) <= self.context_tokens:  # else the blocks stay where they are
                need = further
        X = K + cfg.lookahead
        used, count = sum(need), sum(len(a) for a in anchors)
        if cfg.shape == "trimmed":
            S, A = max(64, -(-used // 64) * 64), max(8, -(-count // 8) * 8)
        else:
            S, A = self.context_tokens, m * cfg.anchors_per_document
        spec, i64 = store.spec, torch.int64
        dtype = torch.float32 if spec.storage_dtype == "fp32" else torch.bfloat16
        b = AnchorBatch(
            hidden_SLD=self._empty((S, spec.num_taps, spec.hidden_size), dtype),
            positions_S=torch.zeros(S, dtype=i64),
            document_S=torch.full((S,), -1, dtype=i64),
            token_ids_S=torch.zeros(S, dtype=i64),
            context_start_A=torch.zeros(A, dtype=i64),
            context_end_A=torch.zeros(A, dtype=i64),
            anchor_position_A=torch.zeros(A, dtype=i64),
            anchor_document_A=torch.full((A,), -1, dtype=i64),
            anchor_valid_A=torch.zeros(A, dtype=torch.bool),
            labels_AK=torch.zeros((A, K), dtype=i64),
            supervised_AK=torch.zeros((A, K), dtype=torch.bool),
            target_logprob_AK=torch.zeros((A, K), dtype=torch.float32),
            topk_ids_AKk=torch.zeros((A, K, spec.top_k), dtype=i64) if spec.top_k else None,
            topk_logprobs_AKk=torch.zeros((A, K, spec.top_k), dtype=torch.float32) if spec.top_k else None,
            ahead_labels_AX=torch.zeros((A, X), dtype=i64) if cfg.lookahead else None,
            ahead_loss_mask_AX=torch.zeros((A, X), dtype=torch.bool) if cfg.lookahead else None,
            ahead_logprob_AX=torch.zeros((A, X), dtype=torch.float32) if cfg.lookahead else None,
            context_limit_A=torch.zeros(A, dtype=i64) if cfg.lookahead else None,
            documents=store.documents["document"].take(rows).to_pylist(),
            step=step,
            micro=micro,
            step_supervised_K=torch.from_numpy(p.supervised_K.copy()),
            step_blocks=p.blocks,
        )
        s = a = 0
        for d, (row, positions, n) in enumerate(zip(rows, anchors, need, strict=True)):
            self._place(b, d, int(row), positions, s, n, a)
            s, a = s + n, a + len(positions)
        b.hidden_SLD[s:] = 0
        return b.pin() if self.pin else b

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.pin:
            return torch.empty(shape, dtype=dtype, pin_memory=True)  # torch keeps a reserve of its own for these
        return self.buffers.empty(shape, dtype)

    def _place(self, b: AnchorBatch, d: int, row: int, positions: np.ndarray, s: int, n: int, a: int) -> None:
        """Document `row` as the d-th of the batch: context rows [s, s + n), blocks from a on."""
        store, K = self.store, self.cfg.block_size
        tokens, mask = store.read_array("token_ids", row), store.read_array("loss_mask", row).astype(bool)
        store.read_hidden(row, b.hidden_SLD[s : s + n])
        at, blocks, where = slice(s, s + n), slice(a, a + len(positions)), torch.from_numpy(positions)
        b.positions_S[at] = torch.arange(n)
        b.document_S[at] = d
        b.token_ids_S[at] = torch.from_numpy(tokens[:n])
        # Anchor p = 5 of a document whose context begins at row s = 100 sees rows [100, 105): positions 0 to 4.
        b.context_start_A[blocks] = s
        b.context_end_A[blocks] = s + where
        b.anchor_position_A[blocks] = where
        b.anchor_document_A[blocks] = d
        b.anchor_valid_A[blocks] = True
        b.labels_AK[blocks] = torch.from_numpy(_windows(tokens, positions, K))
        supervised = _windows(mask, positions, K)
        supervised[:, 0] = False
        b.supervised_AK[blocks] = torch.from_numpy(supervised)
        logprob = store.read_array("target_logprob", row)
        b.target_logprob_AK[blocks] = torch.from_numpy(_windows(logprob, positions, K))
        if b.ahead_labels_AX is not None:
            X = b.ahead_labels_AX.shape[1]
            b.ahead_labels_AX[blocks] = torch.from_numpy(_windows(tokens, positions, X))
            b.ahead_loss_mask_AX[blocks] = torch.from_numpy(_windows(mask, positions, X))
            b.ahead_logprob_AX[blocks] = torch.from_numpy(_windows(logprob, positions, X))
            b.context_limit_A[blocks] = s + n
        if b.topk_ids_AKk is not None and b.topk_logprobs_AKk is not None:
            b.topk_ids_AKk[blocks] = torch.from_numpy(_windows(store.read_array("topk_ids", row), positions, K))
            b.topk_logprobs_AKk[blocks] = torch.from_numpy(
                _windows(store.read_array("topk_logprobs", row), positions, K)
            ).float()


def _windows(values: np.ndarray, positions: np.ndarray, K: int) -> np.ndarray:
    """(A, K, ...): values[p + k], 0 beyond the end."""
    padded = np.concatenate([values, np.zeros((K, *values.shape[1:]), values.dtype)])
    return padded[positions[:, None] + np.arange(K)]
