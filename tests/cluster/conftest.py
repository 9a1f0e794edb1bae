"""`make cluster-test`: files named check_*.py, which the default run does not collect."""

import signal
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "pipeline"), str(HERE.parent / "trainer")]

signal.signal(signal.SIGTERM, signal.default_int_handler)  # hosts are taken down then too

from hosts import Hosts, missing  # noqa: E402
from ray_hosts import WORKERS, RayHosts  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def make_hosts(folder):
    reason = missing()
    if reason:
        pytest.skip(reason)
    return lambda names: Hosts(folder, names)


@pytest.fixture(scope="module")
def cluster(request, make_hosts, folder):
    """A Ray cluster; a module that wants other workers says so in `WORKERS`."""
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    workers = getattr(request.module, "WORKERS", WORKERS)
    with make_hosts(["head", *workers, "store", "laptop"]) as hosts:
        ray = RayHosts(hosts, folder, workers)
        ray.start()
        yield ray
