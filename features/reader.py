"""Reading a store: documents as a table, and any prefix of any document's features in one call.

    store = FeatureStore.open("data/store/qwen3-8b/0123456789ab")
    f = store.read(store.documents["document"][0].as_py(), stop=128)     # f.hidden_SLD: (128, L, D)

Every read goes through the shard's own Zarr index and touches only the chunks it needs. In a local shard `read` maps
them (features/mapping.py): its tensor is the page cache itself, present when `read` returns; a file that was cut short
or cannot be read gives an error there. The mapping goes with the tensor, so a reader does not grow with what it has
visited. `read_hidden` copies, with positioned reads, into memory of the caller (a batch, page-locked memory).

Legend: S tokens, L taps, D hidden size, k teacher candidates.
"""

import json
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from features import commits as cm
from features.buffers import Buffers
from features.files import LocalFiles, ObjectFiles, open_files
from features.layout import array_layouts
from features.plan import num_shards
from features.precision import LOAD_DTYPE, decode_fp8
from features.shard_object import ShardObject, Verify
from features.spec import FeatureSpec, no_store, parse_spec
from features.tables import read_plan, rejects_table
from features.threads import Helpers
from infra.errors import StoreError

RESERVE_BYTES = 256 * 2**20  # what dropped features leave for the next; 3,072 tokens at D = 4096 take 126 MB
MAX_HANDLES = 128  # open shard objects per reader; the usual limit of a process is 1,024 files


@dataclass
class Features:
    """Rows [start, stop) of one document; `topk_*` are None in a store without a compact teacher."""

    document: str
    start: int
    hidden_SLD: torch.Tensor  # bf16, or fp32 from an fp32 store
    token_ids_S: np.ndarray  # int32
    loss_mask_S: np.ndarray  # uint8
    target_logprob_S: np.ndarray  # float32
    topk_ids_Sk: np.ndarray | None  # int32
    topk_logprobs_Sk: np.ndarray | None  # float16


class FeatureStore:
    """A store opened for reading. Threads may share it, and so may workers, forked or spawned."""

    def __init__(self, uri: str, verify: Verify):
        self.uri, self.verify = uri, verify
        self._connect()
        self.spec = parse_spec(_spec_text(self.files), uri)
        self.layouts = array_layouts(self.spec)
        plan = read_plan(self.files)
        self.num_shards = num_shards(plan)
        self._commits = cm.read_commits(self.files)
        self.missing_shards = [s for s in range(self.num_shards) if s not in self._commits]
        self.rejects: pa.Table = rejects_table(self._commits)
        keep = pc.is_in(plan["shard"], pa.array(list(self._commits), pa.int32()))
        keep = pc.and_(keep, pc.invert(pc.is_in(plan["document"], self.rejects["document"].combine_chunks())))
        self.documents: pa.Table = plan.filter(keep).combine_chunks()
        self._shard = self.documents["shard"].to_numpy()
        self._start = self.documents["start"].to_numpy()
        self._length = self.documents["length"].to_numpy()
        self._by_id: tuple[np.ndarray, np.ndarray] | None = None

    @classmethod
    def open(cls, uri: str, spec: FeatureSpec | None = None, verify: Verify = "first_touch") -> "FeatureStore":
        """Open the store in folder `uri`.

        Args:
            spec: what the caller needs; None accepts any.
            verify: check the crc32c of every chunk read always, only the first time this reader touches it, or never.
        Raises:
            StoreError: no store there, or a damaged one.
            SpecMismatch: the store's spec differs from `spec`; the sentence names field, old and new value.
        """
        store = cls(uri, verify)
        if spec is not None:
            store.spec.require_equal(spec, f"store {uri}")
        return store

    @property
    def complete(self) -> bool:
        """Every planned shard is committed."""
        return not self.missing_shards

    @property
    def bytes(self) -> int:
        """Size of all committed objects."""
        return sum(c.bytes for c in self._commits.values())

    def __len__(self) -> int:
        return len(self._shard)

    def row(self, document: str | int) -> int:
        """Row of `documents` of a document id; a row stays itself.

        Raises:
            StoreError: no such document, or it was rejected or is not committed yet.
        """
        if os.getpid() != self._pid:
            self._connect()  # in a forked worker: files, locks and memory of its own
        if isinstance(document, int | np.integer):
            if not 0 <= document < len(self):
                raise StoreError(
                    f"row {document} is outside the {len(self)} documents of {self.uri}; give a smaller one"
                )
            return int(document)
        if self._by_id is None:
            ids = np.array(self.documents["document"].to_pylist(), dtype="S")
            order = np.argsort(ids)
            self._by_id = ids[order], order
        ids, order = self._by_id
        at = int(np.searchsorted(ids, document.encode()))
        if at == len(ids) or ids[at] != document.encode():
            raise StoreError(
                f"document {document!r} is not in {self.uri}; it was rejected, is not prefilled yet, or is of "
                f"another corpus"
            )
        return int(order[at])

    def length(self, document: str | int) -> int:
        """Tokens of a document."""
        return int(self._length[self.row(document)])

    def read(
        self, document: str | int, start: int = 0, stop: int | None = None, taps: tuple[int, ...] | None = None
    ) -> Features:
        """Rows [start, stop) of a document.

        Args:
            document: id, or row of `documents`.
            stop: exclusive; None reads to the end.
            taps: layer ids out of `spec.tap_layer_ids`, in the order wanted; None is all.
        Raises:
            StoreError: unknown document, range or tap; damaged or lost objects.
        """
        row = self.row(document)
        first, count = self._range(row, start, stop)
        S, L, D = count, self.spec.num_taps, self.spec.hidden_size
        hidden = self._map_hidden(row, first, count)
        if hidden is None:
            hidden = self.buffers.empty((S, L, D), LOAD_DTYPE[self.spec.storage_dtype])
            self.read_hidden(row, hidden, start)
        if taps is not None and taps != self.spec.tap_layer_ids:
            hidden = hidden[:, self.tap_indices(taps)].contiguous()
        shard = int(self._shard[row])
        small = {n: self._rows(n, shard, first, count) for n in self.layouts if n not in ("hidden", "scale")}
        return Features(
            document=self.documents["document"][row].as_py(),
            start=start,
            hidden_SLD=hidden,
            token_ids_S=small["token_ids"],
            loss_mask_S=small["loss_mask"],
            target_logprob_S=small["target_logprob"],
            topk_ids_Sk=small.get("topk_ids"),
            topk_logprobs_Sk=small.get("topk_logprobs"),
        )

    def read_hidden(self, document: str | int, out_SLD: torch.Tensor, start: int = 0) -> None:
        """Read rows [start, start + S) of a document's hidden states into a contiguous tensor of the load dtype."""
        row = self.row(document)
        first, count = self._range(row, start, start + len(out_SLD))
        shard = int(self._shard[row])
        if self.spec.storage_dtype == "fp8_e4m3":
            decode_fp8(self._rows("hidden", shard, first, count), self._rows("scale", shard, first, count), out_SLD)
        else:
            assert out_SLD.is_contiguous() and out_SLD.dtype == LOAD_DTYPE[self.spec.storage_dtype]
            self._read_into("hidden", shard, first, count, out_SLD.view(torch.uint8).numpy().reshape(-1))

    def read_array(self, name: str, document: str | int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows [start, stop) of one of the narrow arrays (`token_ids`, `loss_mask`, ...), as stored."""
        row = self.row(document)
        first, count = self._range(row, start, stop)
        return self._rows(name, int(self._shard[row]), first, count)

    def forget_checks(self) -> None:
        """Check every chunk once more when it is read next (with `verify="first_touch"`)."""
        self._checked.clear()

    def tap_indices(self, taps: tuple[int, ...]) -> list[int]:
        """Positions on the L axis of the given layer ids."""
        have = self.spec.tap_layer_ids
        if unknown := [t for t in taps if t not in have]:
            raise StoreError(
                f"tap {unknown[0]} is not stored in {self.uri}; it has the layers {', '.join(map(str, have))}"
            )
        return [have.index(t) for t in taps]

    def _range(self, row: int, start: int, stop: int | None) -> tuple[int, int]:
        length = int(self._length[row])
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise StoreError(
                f"rows {start} to {stop} are outside the {length} tokens of document row {row}; stay within them"
            )
        return int(self._start[row]) + start, stop - start

    def _map_hidden(self, row: int, first: int, count: int) -> torch.Tensor | None:
        """Rows of a shard's hidden states as mapped memory; None where that cannot be done."""
        if self.spec.storage_dtype == "fp8_e4m3" or "hidden" in self._foreign_arrays():
            return None
        mapped = self._handle("hidden", int(self._shard[row])).map_rows(first, count, self.verify)
        if mapped is None:
            return None
        hidden = torch.from_numpy(mapped).view(LOAD_DTYPE[self.spec.storage_dtype])
        return hidden.view(count, self.spec.num_taps, self.spec.hidden_size)

    def _rows(self, name: str, shard: int, first: int, count: int) -> np.ndarray:
        layout = self.layouts[name]
        out = np.empty((count, *layout.trailing), layout.dtype)
        self._read_into(name, shard, first, count, out.reshape(-1).view(np.uint8))
        return out

    def _read_into(self, name: str, shard: int, first: int, count: int, out: np.ndarray) -> None:
        """Bytes of rows [first, first + count) of a shard into `out` (uint8, flat)."""
        if (array := self._foreign_arrays().get(name)) is not None:
            layout = self.layouts[name]
            at = shard * layout.shard_tokens + first
            out[:] = np.ascontiguousarray(array[at : at + count]).reshape(-1).view(np.uint8)
            return
        self._handle(name, shard).read_rows(first, count, out, self.verify)

    def _handle(self, name: str, shard: int) -> "ShardObject":
        key = (name, shard)
        with self._lock:
            if (handle := self._handles.get(key)) is not None:
                self._handles.move_to_end(key)
                return handle
        commit = self._commits[shard]
        # Two threads may open one object at once; the second replaces the first.
        handle = ShardObject(self.files, self.layouts[name], commit, self._checked, self._helpers)
        with self._lock:
            self._handles[key] = handle
            while len(self._handles) > MAX_HANDLES:
                self._handles.popitem(
                    last=False
                )  # its file closes with the last reference: a reading thread may hold one
        return handle

    def _connect(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._handles: OrderedDict[tuple[str, int], ShardObject] = OrderedDict()
        self.buffers = Buffers(RESERVE_BYTES)
        self._helpers = Helpers("store-reader")
        self._checked: dict[tuple[str, int], int] = {}  # bit i: chunk i was found intact by this reader
        self.files = open_files(self.uri)
        self._foreign: dict[str, Any] | None = None

    def _foreign_arrays(self) -> dict[str, Any]:
        """Arrays that somebody stored again with other codecs (compressed, say): zarr-python reads these."""
        if self._foreign is not None:
            return self._foreign
        foreign = {}
        for name, layout in self.layouts.items():
            try:
                codecs = json.loads(self.files.read(f"{name}/zarr.json"))["codecs"]
            except (FileNotFoundError, ValueError, KeyError):
                continue  # `verify` says so and `--repair` writes it again; our own reading does not need it
            if codecs != layout.codecs():
                import zarr

                local = isinstance(self.files, LocalFiles)
                store = (
                    zarr.storage.LocalStore(self.files.root) if local else zarr.storage.ObjectStore(self.files.store)
                )
                foreign[name] = zarr.open_array(store, path=name, mode="r")
        self._foreign = foreign
        return foreign

    def __getstate__(self) -> dict[str, Any]:
        mine = ("files", "buffers", "_helpers", "_lock", "_handles", "_checked", "_pid", "_foreign")
        return {k: v for k, v in self.__dict__.items() if k not in mine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._connect()


def _spec_text(files: LocalFiles | ObjectFiles) -> bytes:
    try:
        return files.read("spec.json")
    except FileNotFoundError:
        raise no_store(files.uri) from None
