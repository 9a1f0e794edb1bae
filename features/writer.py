"""Writing a store: one shard at a time, whole, checked, and committed last. No Ray here; Ray actors use the same class.

    writer = create_store(root, spec, plan)             # makes the store or continues an equal one
    for shard in writer.missing_shards():
        writer.write_shard(shard, documents_of(shard))  # any iterable of DocumentFeatures, any order
    summary = writer.finish()

Legend: S tokens of a document, L taps, D hidden size.
"""

import datetime
import functools
import json
import threading
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from features import commits as cm
from features.document import DocumentFeatures, Rejected, check_document
from features.files import is_remote, open_files
from features.layout import ArrayLayout, array_layouts
from features.plan import corpus_digest, num_shards
from features.precision import encode
from features.shard_object import ShardObjectWriter
from features.spec import FeatureSpec, no_store, parse_spec, store_path
from features.tables import read_plan, to_parquet, write_manifest
from features.threads import Helpers
from infra.errors import DataError, SpecMismatch, StoreError
from infra.provenance import provenance

JOB_BYTES = 4 * 2**20
"""looked at, summed and written at once by one thread. The kernel lets one thread at a time write a file; while one
writes, the other looks at and sums its next piece, which takes as long. At 2 MB handing over costs 3 to 8 % more, at
12 MB the cache does"""
MAX_PUT_BYTES = 5 * 2**30  # an object store copies at most 5 GiB in one request


def create_store(
    root_uri: str, spec: FeatureSpec, plan: pa.Table, *, max_reject_share: float = 0.05, fsync: bool = False
) -> "StoreWriter":
    """Make `<root>/<target>/<fingerprint12>` with its spec, plan and array metadata, or continue an equal store there.

    Args:
        root_uri: a folder or `s3:// gs:// az://` address.
        plan: `make_plan(documents, spec.shard_tokens)`.
        max_reject_share: share of rejected documents above which writing stops.
        fsync: force local data to disk before each commit. Kills never need it, and a checksum reveals what a power
            cut tore.
    Raises:
        SpecMismatch: the folder holds another spec or plan, or the plan is not of the spec's corpus.
        StoreError: a shard too large for one object.
    """
    uri = store_path(root_uri, spec.target, spec)
    files = open_files(uri, fsync=fsync)
    if (digest := corpus_digest(plan)) != spec.corpus_digest:
        raise SpecMismatch(
            f"the plan is of corpus {digest[:12]} and the spec says corpus_digest = {spec.corpus_digest[:12]!r}; "
            "make both from the same documents"
        )
    layouts = array_layouts(spec)
    largest = max(layout.num_chunks * layout.chunk_stride for layout in layouts.values())
    if is_remote(uri) and largest > MAX_PUT_BYTES:
        raise StoreError(
            f"a shard object of {largest / 2**30:.1f} GiB exceeds the 5 GiB of one object copy; "
            f"lower shard_tokens = {spec.shard_tokens} or use storage_dtype = 'fp8_e4m3'"
        )
    if not files.create("spec.json", spec.canonical().encode()):
        parse_spec(files.read("spec.json"), uri).require_equal(spec, f"store {uri}")
    if not files.create("plan.parquet", to_parquet(plan)) and not read_plan(files).equals(plan):
        raise SpecMismatch(
            f"store {uri} has another plan.parquet than this corpus; delete the store or restore its plan"
        )
    for path, data in array_metadata(spec, num_shards(plan)).items():
        files.write(path, data)
    record = provenance(fingerprint=spec.fingerprint, spec=spec.model_dump(mode="json"))
    files.create("PROVENANCE.json", (json.dumps(record, indent=2, sort_keys=True, default=str) + "\n").encode())
    return StoreWriter(uri, max_reject_share=max_reject_share, fsync=fsync)


def array_metadata(spec: FeatureSpec, shards: int) -> dict[str, bytes]:
    """Path -> content of every zarr.json of the store."""
    attributes = {"fingerprint": spec.fingerprint, "target": spec.target, "tap_layer_ids": list(spec.tap_layer_ids)}
    group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    arrays = {f"{a.name}/zarr.json": a.metadata(shards, attributes) for a in array_layouts(spec).values()}
    return {"zarr.json": json.dumps(group, indent=2).encode()} | arrays


class StoreWriter:
    """Writes shards of an existing store. Cheap to pickle: another process reads spec and plan from the store."""

    def __init__(self, uri: str, *, max_reject_share: float = 0.05, fsync: bool = False):
        self.uri, self.max_reject_share, self.fsync = uri, max_reject_share, fsync
        self._open()

    def _open(self) -> None:
        self.files = open_files(self.uri, fsync=self.fsync)
        try:
            self.spec = parse_spec(self.files.read("spec.json"), self.uri)
        except FileNotFoundError:
            raise no_store(self.uri) from None
        self.layouts = array_layouts(self.spec)
        self.plan = read_plan(self.files)
        self.num_shards = num_shards(self.plan)
        self._shard_of_row = self.plan["shard"].to_numpy()
        self._seen = self._rejected = 0
        # One shard's rows of all but the hidden states, which go from the document's memory to the file.
        self._buffers = {n: np.zeros((a.shard_tokens, *a.trailing), a.dtype) for n, a in self._narrow()}
        self._helpers = Helpers("shard-writer")

    def __getstate__(self) -> dict[str, Any]:
        return {"uri": self.uri, "max_reject_share": self.max_reject_share, "fsync": self.fsync}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def missing_shards(self) -> list[int]:
        """Shards without a commit, ascending."""
        have = set(cm.read_commits(self.files))
        return [s for s in range(self.num_shards) if s not in have]

    def shard_plan(self, shard: int) -> pa.Table:
        """The plan's rows of one shard, in the order of their starts."""
        a, b = np.searchsorted(self._shard_of_row, [shard, shard + 1])
        return self.plan.slice(int(a), int(b - a))

    def write_shard(self, shard: int, documents: Iterable[DocumentFeatures]) -> dict[str, Any]:
        """Check, write and commit one shard; a shard that is committed already is left as it is.

        Args:
            documents: exactly the planned documents of this shard, in any order; each is asked for while the one before
                is still being written, and let go with the one after.
        Returns:
            the receipt (~200 B): shard, attempt, won, documents, tokens, rejected, bytes.
        Raises:
            StoreError: a document that the plan does not have in this shard, one given twice or not at all,
                or no such shard.
            DataError: more rejects than `max_reject_share` allows.
            ResourceError: no room on the disk.
        """
        if not 0 <= shard < self.num_shards:
            raise StoreError(
                f"shard {shard} is not in the plan of {self.uri}; it has shards 0 to {self.num_shards - 1}"
            )
        if (commit := cm.read_commit(self.files, shard)) is not None:
            return self._receipt(commit, won=False)
        rows = self.shard_plan(shard).to_pylist()
        attempt = uuid.uuid4().hex[:12]
        objects: dict[str, ShardObjectWriter] = {}
        try:
            for name, layout in self.layouts.items():
                path = cm.attempt_path(shard, attempt, name)
                objects[name] = ShardObjectWriter(self.files, path, layout, row_end(rows[-1]))
            rejected = self._fill(shard, rows, documents, objects["hidden"])
            for name, layout in self._narrow():
                held = layout.rows_to_hold(row_end(rows[-1]))
                self._buffers[name][row_end(rows[-1]) : held] = 0
                objects[name].write(0, self._buffers[name][:held])
            records = {n: o.close() for n, o in objects.items()}
        except Exception:  # raised again: only the half-written objects go first
            for o in objects.values():
                o.abandon()
            raise
        gone = {r[0] for r in rejected}
        commit = cm.Commit(
            shard=shard,
            attempt=attempt,
            objects=records,
            rejected=rejected,
            documents=[(r["document"], r["start"], r["length"]) for r in rows if r["document"] not in gone],
            versions={"torch": torch.__version__, "numpy": np.__version__},
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
        won = self.files.create(cm.commit_path(shard), commit.to_json())
        if not won:
            winner = cm.read_commit(self.files, shard)
            assert winner is not None
            won = winner.attempt == attempt  # a retried put that had arrived the first time
            if not won:
                for name in self.layouts:
                    self.files.remove(cm.attempt_path(shard, attempt, name))
            commit = winner
        cm.promote(self.files, self.layouts, commit)
        return self._receipt(commit, won=won)

    def finish(self) -> dict[str, Any]:
        """Complete what killed writers left, write manifest.json and rejects.parquet, and sum up.

        May be called on an incomplete store (`missing` then counts its shards), and again later.

        Returns:
            fingerprint, uri, complete, shards, missing, documents, tokens, rejected, reasons, bytes.
        Raises:
            DataError: more rejects than `max_reject_share` allows (after both files are written).
        """
        commits = cm.read_commits(self.files)
        cm.sweep_attempts(self.files, self.layouts, commits)
        summary = write_manifest(self.files, self.spec, self.plan, commits)
        self._check_rejects(summary["rejected"], summary["rejected"] + summary["documents"], least=1)
        return summary | {"uri": self.uri}

    def _fill(
        self,
        shard: int,
        rows: list[dict[str, Any]],
        documents: Iterable[DocumentFeatures],
        hidden: ShardObjectWriter,
    ) -> list[tuple[str, str, str]]:
        """Hidden states into their object, the rest into the buffers; what was rejected, as zeros.

        A document's jobs may still be at work when the next one is asked for.
        """
        left = {r["document"]: r for r in rows}
        rejected: list[tuple[str, str, str]] = []
        not_finite: list[dict[str, Any]] = []

        def buffers(row: dict[str, Any]) -> dict[str, np.ndarray]:
            return {n: b[row["start"] : row_end(row)] for n, b in self._buffers.items()}

        def reject(row: dict[str, Any], reason: str, detail: str) -> list[Callable[[], None]]:
            rejected.append((row["document"], reason, detail))
            for b in buffers(row).values():
                b[:] = 0
            zeros_SLD = torch.zeros(1, 1, 1).expand(row["length"], self.spec.num_taps, self.spec.hidden_size)
            return self._jobs(hidden, row, zeros_SLD, buffers(row).get("scale"), not_finite)

        def reject_not_finite() -> list[Callable[[], None]]:
            why = "not_finite", "a hidden state is NaN or infinite, or overflows the storage dtype"
            return [job for _ in range(len(not_finite)) for job in reject(not_finite.pop(), *why)]

        with self._helpers.backlog() as backlog:
            for d in documents:
                row = left.pop(d.document, None)
                if row is None:
                    raise StoreError(
                        f"document {d.document!r} is not planned for shard {shard} or came twice; hand over its plan"
                    )
                try:
                    check_document(d, row, self.spec)
                except Rejected as e:
                    jobs = reject(row, *e.args)
                else:
                    at = buffers(row)
                    at["token_ids"][:] = d.token_ids_S
                    at["loss_mask"][:] = d.loss_mask_S
                    at["target_logprob"][:] = d.target_logprob_S
                    if self.spec.top_k:
                        at["topk_ids"][:] = d.topk_ids_Sk
                        at["topk_logprobs"][:] = d.topk_logprobs_Sk
                    jobs = self._jobs(hidden, row, d.hidden_SLD, at.get("scale"), not_finite)
                backlog.add([*reject_not_finite(), *jobs])
                backlog.help(leave=2 * self._helpers.count)  # enough to do until the next document is here
                self._seen += 1
        self._helpers.run(reject_not_finite())
        if left:
            raise StoreError(
                f"shard {shard} got {len(rows) - len(left)} of its {len(rows)} planned documents and not "
                f"{next(iter(left))!r}; hand over each one, with `error` set where it could not be computed"
            )
        self._rejected += len(rejected)
        self._check_rejects(self._rejected, self._seen, least=3)
        return sorted(rejected)

    def _jobs(
        self,
        hidden: ShardObjectWriter,
        row: dict[str, Any],
        hidden_SLD: torch.Tensor,
        scale_SL: np.ndarray | None,
        not_finite: list[dict[str, Any]],
    ) -> list[Callable[[], None]]:
        """What is to be done, in any order and at once, to write a document's hidden states, and its scales into
        `scale_SL`.

        The last job to end adds the row to `not_finite` if a value is not finite; the rows then have to be written once
        more.
        """
        c, n, start, storage = hidden.layout.chunk_tokens, row["length"], row["start"], self.spec.storage_dtype
        if hidden_SLD.device.type != "cpu":
            hidden_SLD = hidden_SLD.cpu()  # in one transfer
        # Whole chunks go out at once, job by job: encoded, looked at, summed and written while in the cache.
        # Example, c = 16, start = 10, n = 40: rows 0-5 belong to a chunk shared with the document before, rows 6-37
        # are two whole chunks, rows 38-39 begin a chunk that the next document goes on with.
        first = min(-start % c, n)
        last = max(first, n - (start + n) % c)
        step = max(1, JOB_BYTES // hidden.layout.chunk_bytes) * c
        pieces = [(a, min(a + step, last)) for a in range(first, last, step)]
        pieces += [(a, b) for a, b in ((0, first), (last, n)) if a < b]
        finite: list[bool] = []
        edges: list[tuple[int, np.ndarray]] = []
        lock = threading.Lock()

        def job(a: int, b: int) -> None:
            bits, scale, fine = encode(hidden_SLD[a:b], storage)
            if scale is not None and scale_SL is not None:
                scale_SL[a:b] = scale
            if first <= a < last:
                hidden.write((start + a) // c, bits)
            else:
                edges.append((start + a, bits))
            with lock:
                finite.append(fine)
                if len(finite) < len(pieces):
                    return
            if not all(finite):
                not_finite.append(row)
                return
            for edge in edges:  # a shared chunk takes each row once
                hidden.put(*edge)

        return [functools.partial(job, *piece) for piece in pieces]

    def _narrow(self) -> list[tuple[str, ArrayLayout]]:
        return [(n, a) for n, a in self.layouts.items() if n != "hidden"]

    def _check_rejects(self, rejected: int, seen: int, least: int) -> None:
        # One reject among a writer's first few documents is no trend, hence `least`.
        if rejected >= least and rejected > self.max_reject_share * seen:
            raise DataError(
                f"{rejected} of {seen} documents were rejected, more than max_reject_share = {self.max_reject_share:g} "
                f"allows; see the rejects of {self.uri} (`python -m features inspect`), mend the cause or raise "
                f"the share"
            )

    def _receipt(self, commit: cm.Commit, won: bool) -> dict[str, Any]:
        gone = {r[0] for r in commit.rejected}
        stored = [r["length"] for r in self.shard_plan(commit.shard).to_pylist() if r["document"] not in gone]
        return {
            "shard": commit.shard,
            "attempt": commit.attempt,
            "won": won,
            "documents": len(stored),
            "tokens": sum(stored),
            "rejected": len(gone),
            "bytes": commit.bytes,
        }


def row_end(row: dict[str, Any]) -> int:
    return row["start"] + row["length"]
