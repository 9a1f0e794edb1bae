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

from infra.errors import FlashdraftError, ResourceError
from pipeline.config import RayConfig


def start_ray(cfg: RayConfig) -> None:
    """Join the configured cluster or start a local one; nothing where this process has one already.

    Raises:
        ResourceError: the cluster does not answer.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # else its C++ side prints hints for Ray's own developers
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    import ray

    for name in ("ray.data", "ray.data._internal"):  # Ray Data resets the level of the first when it runs
        logging.getLogger(name).setLevel(logging.ERROR)
    if not ray.is_initialized():
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        try:
            if cfg.address == "local":
                # what the object store holds is rows and receipts: token ids, 5 bytes a token, never hidden states
                ray.init(
                    "local", num_cpus=cfg.num_cpus, include_dashboard=False, object_store_memory=256 * 2**20, **quiet
                )
            else:
                ray.init(cfg.address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as e:
            reason = str(e).strip().splitlines()[0]
            raise ResourceError(
                f"Ray at {cfg.address!r} does not answer ({reason}); start it, or set ray.address (RAY_ADDRESS) "
                "to a running cluster"
            ) from e
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False


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


def run_pool(rows: list[pa.Table], work: type, arguments: dict[str, Any], cfg: RayConfig) -> Iterator[pa.Table]:
    """Results of `work(**arguments)(row)` for each row, as they come.

    Args:
        rows: tables of one row each; a row is a task.
        work: a class of an installed module, `__call__(pa.Table) -> pa.Table`.
        arguments: of its constructor; `threads` is added.

    Raises:
        FlashdraftError: what the work raised, or ResourceError where actors die again and again.
    """
    import ray

    start_ray(cfg)
    # The limit on a task's repetitions has no named parameter yet, and the actor itself may restart without end.
    warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
    actors, cpus, threads = actors_and_cpus(cfg)
    data = ray.data.from_arrow(rows).map_batches(
        work,
        fn_constructor_kwargs=arguments | {"threads": threads},
        batch_size=1,
        batch_format="pyarrow",
        zero_copy_batch=True,
        compute=ray.data.ActorPoolStrategy(size=min(actors, len(rows)), max_tasks_in_flight_per_actor=2),
        num_cpus=cpus,
        num_gpus=cfg.gpus_per_actor or None,
        max_task_retries=cfg.max_failures,
    )
    yield from data.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)


def run_until_done(
    missing: Callable[[], list[pa.Table]], work: type, arguments: dict[str, Any], cfg: RayConfig
) -> Iterator[pa.Table]:
    """`run_pool` over what `missing()` gives, again after a death that Ray could not mend while there is progress.

    Raises:
        FlashdraftError: what the work raised.
        ResourceError: `max_failures` runs in a row ended without a result.
    """
    import ray

    failures = 0
    while rows := missing():
        try:
            for result in run_pool(rows, work, arguments, cfg):
                failures = 0
                yield result
        except ray.exceptions.RayError as e:
            chain = _chain(e)
            for cause in chain:
                if isinstance(cause, FlashdraftError):
                    raise cause from None
            deaths = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError, ray.exceptions.NodeDiedError)
            if not any(isinstance(cause, deaths) for cause in chain):
                raise
            failures += 1
            if failures >= 2:
                reason = " ".join(str(e).split())[:800]
                raise ResourceError(
                    f"the actors of {work.__name__} died again and again without a result ({reason}); "
                    "lower prefill.batch_tokens or regenerate.batch_size, or give the machine more memory"
                ) from e


def _chain(e: BaseException | None) -> list[BaseException]:
    """The error and what it wraps: Ray puts a task's own error into `cause`, or into `__cause__`."""
    chain: list[BaseException] = []
    while isinstance(e, BaseException) and e not in chain:
        chain.append(e)
        e = getattr(e, "cause", None) or e.__cause__
    return chain


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
