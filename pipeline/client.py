"""Ray Client (`ray://host:10001`): from outside of a cluster, the driver itself runs as a task of it.

Ray Data's executor needs a core worker, which a client process does not have and a task does. What the user sees is the
same: progress, errors and the result come back; documents and features stay on the cluster.

Ray's server for clients imports this module too, and dies of importing torch (oneMKL does not find its libraries
there): what needs it is imported where it is used.
"""

import os
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra import errors
from infra.errors import ConfigError, FlashdraftError, ResourceError

if TYPE_CHECKING:
    from pipeline.config import FeaturesConfig
    from pipeline.run import FeaturesResult

CONNECTIONS = 3
LOG_DELAY_S = 1.0
"""until the task's last lines, of which Ray's log monitor knows some tenths of a second later, have most likely come"""


def build_on_cluster(cfg: "FeaturesConfig") -> "FeaturesResult":
    """`build_features` on the cluster, in the folder of the same path there.

    The driver's task goes to the host that the client speaks to (the head), so that a second call finds the first one's
    answers and documents under `data_root`. When that host dies, Ray begins the task again.

    Raises:
        FlashdraftError: as `build_features`; ResourceError: the cluster does not answer, or the task died for good.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from infra.submit.ray_jobs import EXCLUDES, REPOSITORY
    from pipeline.run import FeaturesResult

    # In a checkout the cluster runs this checkout's code; an installed package has to be installed there too.
    checkout = (REPOSITORY / "pyproject.toml").is_file()
    runtime = {"working_dir": str(REPOSITORY), "excludes": EXCLUDES} if checkout else {}
    _connect(cfg.ray.address, runtime)
    try:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        options = {"num_cpus": 0, "max_retries": cfg.ray.max_failures, "scheduling_strategy": here}
        task = ray.remote(**options)(drive).remote(cfg.model_dump_json(), os.getcwd())
        found = ray.get(task)
        time.sleep(LOG_DELAY_S)
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError, ConnectionError) as e:
        reason = " ".join(str(e).split())[:800]
        raise ResourceError(
            f"the features task on {cfg.ray.address} was lost ({reason}); run the same command again: finished work "
            "is kept on the cluster"
        ) from e
    finally:
        ray.shutdown()
    if "sentence" in found:
        raise getattr(errors, found["error"], FlashdraftError)(found["sentence"])
    return FeaturesResult(**found)


def _connect(address: str, runtime_env: dict[str, Any]) -> None:
    """Ray's server forks a process for each client; a fork beside gRPC's threads fails now and then, which the client
    hears after 30 s. GRPC_ENABLE_FORK_SUPPORT=0 where the head starts prevents it."""
    from pipeline.pool import join_ray

    for left in reversed(range(CONNECTIONS)):
        try:
            return join_ray(address, log_to_driver=True, runtime_env=runtime_env)
        except ResourceError as e:
            if not left or "Initialization failure" not in str(e):
                raise


def drive(config: str, folder: str) -> dict[str, Any]:
    """The task: `build_features` in `folder`; its result, or the error that the user can act on."""
    from pipeline.config import FeaturesConfig
    from pipeline.run import build_features

    cfg = FeaturesConfig.model_validate_json(config)
    # already within Ray: what the address was is known to the client alone
    cfg = cfg.model_copy(update={"ray": cfg.ray.model_copy(update={"address": "auto"})})
    try:
        if os.path.isdir(folder):
            os.chdir(folder)
        elif not Path(cfg.data_root).is_absolute():
            raise ConfigError(
                f"data_root = {cfg.data_root!r} is relative to {folder}, which is no folder of the cluster's host "
                f"{socket.gethostname()}; give an absolute folder there (data_root=/srv/flashdraft/data)"
            )
        return asdict(build_features(cfg))
    except FlashdraftError as e:
        return {"error": type(e).__name__, "sentence": str(e)}
