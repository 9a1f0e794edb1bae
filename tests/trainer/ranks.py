"""Spawns a gloo world of real DeepSpeed ranks; nothing can outlive the time-out."""

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


def spawn(world: int, work: Callable[..., Any], *args: Any, timeout_s: float = 240) -> list[Any]:
    """`work(world_object, *args)` on every rank; returns the ranks' results in order.

    Raises:
        AssertionError: a rank raised (its trace is the message) or did not end in time.
    """
    context = mp.get_context("spawn")
    queue = context.Queue()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = [context.Process(target=_rank, args=(r, world, port, queue, work, args)) for r in range(world)]
    for p in ranks:
        p.start()
    results: dict[int, Any] = {}
    try:
        for _ in ranks:
            rank, result, error = queue.get(timeout=timeout_s)
            assert error is None, f"rank {rank}: {error}"
            results[rank] = result
    finally:
        for p in ranks:
            p.join(timeout=10)
            if p.is_alive():
                p.kill()
    return [results[r] for r in range(world)]


def _rank(rank: int, world: int, port: int, queue: Any, work: Callable[..., Any], args: tuple) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    try:
        from trainer.engine import init_world

        queue.put((rank, work(init_world(timeout_s=60), *args), None))
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
