"""Ray: starting it, and running a class over rows in a pool of actors with Ray Data.

A row is one unit of work whose result is kept by whoever receives it before the next kill, so the loop here only has to
ask again for what is missing: Ray repeats a task whose actor died, and a run that ends early is started anew.
"""

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from infra import errors
from infra.errors import FlashdraftError, ResourceError
from pipeline.config import RayConfig


def start_ray(cfg: RayConfig) -> None:
    """Join the configured cluster or start a local one; nothing where this process has one already.

    Raises:
        ResourceError: the cluster does not answer.
    """
    import ray

    if cfg.address == "local":
        # what the object store holds is rows and receipts: token ids, 5 bytes a token, never hidden states
        join_ray("local", num_cpus=cfg.num_cpus, include_dashboard=False, object_store_memory=256 * 2**20)
    else:
        join_ray(cfg.address)
    for name in ("ray.data._internal", "ray.data.exceptions"):  # what they report is raised as well
        logging.getLogger(name).setLevel(logging.CRITICAL)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False


def join_ray(address: str, *, log_to_driver: bool = False, **options: Any) -> None:
    """`ray.init` without its chatter; nothing where this process has Ray already.

    Raises:
        ResourceError: the cluster does not answer.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # else its C++ side prints hints for Ray's own developers
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    import ray

    if ray.is_initialized():
        return
    try:
        ray.init(address, logging_level=logging.ERROR, log_to_driver=log_to_driver, **options)
    except (ConnectionError, ValueError, RuntimeError) as e:
        reason = str(e).strip().splitlines()[0]
        raise ResourceError(
            f"Ray at {address!r} does not answer ({reason}); start it, or set ray.address (RAY_ADDRESS) to a running "
            "cluster"
        ) from e


def actors_and_cpus(cfg: RayConfig) -> tuple[int, float, int]:
    """(actors, CPUs Ray reserves for each, torch threads of each).

    Without GPUs the default is one actor per CPU, at most four: two actors of one thread write 1.6 times as many tokens
    as one actor of two, since only the matrix products of a small target use a second thread, and threads that wait
    for each other suffer when the machine has other work.
    """
    import ray

    total = ray.cluster_resources()
    cpus = total.get("CPU", 1.0)
    if cfg.actors is not None:
        actors = cfg.actors
    elif cfg.gpus_per_actor > 0:
        actors = max(int(total.get("GPU", 0) / cfg.gpus_per_actor), 1)
    else:
        actors = max(min(int(cpus), 4), 1)
    share = cfg.cpus_per_actor if cfg.cpus_per_actor is not None else max(cpus / actors // 0.01 * 0.01, 0.01)
    return actors, share, max(int(share), 1)


class Work:
    """Base of what the actors run: a subclass takes its arguments in the constructor and one row in `run`.

    An error that the user can act on travels as a result: Ray would drop its type and bury its sentence.
    """

    def __init__(self, threads: int, cwd: str):
        """Threads as configured (torch would take all cores); paths are relative to the driver's folder."""
        import torch

        torch.set_num_threads(threads)
        if os.path.isdir(cwd):
            os.chdir(cwd)

    def run(self, row: pa.Table) -> pa.Table:
        raise NotImplementedError

    def __call__(self, batch: pa.Table) -> pa.Table:
        try:
            return self.run(pa.ipc.open_stream(batch["row"][0].as_buffer()).read_all())
        except FlashdraftError as e:
            return pa.table({"error": [type(e).__name__], "sentence": [str(e)]})


def run_pool(rows: list[pa.Table], work: type[Work], arguments: dict[str, Any], cfg: RayConfig) -> Iterator[pa.Table]:
    """Results of `work(**arguments)(row)` for each row, as they come.

    Args:
        rows: tables of one row each; a row is a task.
        work: of an installed module, so that other processes find it.
        arguments: of its constructor; `threads` and `cwd` are added.

    Raises:
        FlashdraftError: what the work raised, or ResourceError where actors die again and again.
    """
    import ray

    start_ray(cfg)
    # the limits have no named parameters yet
    warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
    actors, cpus, threads = actors_and_cpus(cfg)
    # bytes and not tables: Ray Data would start a process only to ask each table for its size
    items = [{"row": _packed(row)} for row in rows]
    data = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        work,
        fn_constructor_kwargs=arguments | {"threads": threads, "cwd": os.getcwd()},
        batch_size=1,
        batch_format="pyarrow",
        zero_copy_batch=True,
        compute=ray.data.ActorPoolStrategy(size=min(actors, len(rows)), max_tasks_in_flight_per_actor=2),
        num_cpus=cpus,
        num_gpus=cfg.gpus_per_actor or None,
        # without a limit an actor that is restarting when the run ends keeps its CPUs, and the next run waits for ever
        max_restarts=cfg.max_failures,
        max_task_retries=cfg.max_failures,
    )
    for result in data.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        if "sentence" in result.column_names:
            raise getattr(errors, result["error"][0].as_py(), FlashdraftError)(result["sentence"][0].as_py())
        yield result


def run_until_done(
    missing: Callable[[], list[pa.Table]], work: type[Work], arguments: dict[str, Any], cfg: RayConfig
) -> Iterator[pa.Table]:
    """`run_pool` over what `missing()` gives, again after a death that Ray could not mend while there is progress.

    Raises:
        FlashdraftError: what the work raised.
        ResourceError: a task died `max_failures` times over and no other one gave a result meanwhile.
    """
    import ray

    while rows := missing():
        error, progress = None, False
        try:
            for result in run_pool(rows, work, arguments, cfg):
                progress = True
                yield result
        except ray.exceptions.RayError as e:
            error = e
        if error is not None:
            # outside the handler: its traceback holds the dead pool, whose actors would keep their CPUs
            _raise_unless_mendable(error.with_traceback(None), work, progress)


def _raise_unless_mendable(error: Exception, work: type[Work], progress: bool) -> None:
    import ray

    deaths = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError, ray.exceptions.NodeDiedError)
    if not isinstance(error, deaths):
        raise error
    if not progress:
        reason = " ".join(str(error).split())[:800]
        raise ResourceError(
            f"the actors of {work.__name__} died again and again without a result ({reason}); "
            "lower prefill.batch_tokens or regenerate.batch_size, or give the machine more memory"
        ) from None


def _packed(row: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, row.schema) as stream:
        stream.write_table(row)
    return sink.getvalue().to_pybytes()


@contextlib.contextmanager
def ray_for_this_run() -> Iterator[None]:
    """Whatever Ray was started inside of the block ends with it; one that the caller had goes on."""
    import ray

    had = ray.is_initialized()
    try:
        yield
    finally:
        if not had and ray.is_initialized():
            ray.shutdown()
