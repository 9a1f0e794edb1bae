"""KubeRay: a RayJob, which makes its own Ray cluster, runs the command on the head and removes the cluster.

Fields: the RayJob API of ray.io/v1 (KubeRay 1.5.1 or newer for `authOptions`). The operator makes the token and keeps
it in a Kubernetes Secret of its own; ours (`profile.secret`) is referred to by key.
"""

import importlib.metadata
import shlex
from typing import Any

import yaml

from infra.submit.job import Job, Submission
from infra.submit.profile import KubeRayProfile
from infra.submit.ray_jobs import in_folder, on_ray

HEAD_CPUS, HEAD_MEMORY = "4", "16Gi"
CODE = "/opt/flashdraft"  # where infra/images put the repository
IDLE_S = 300  # a worker without work for this long is given back
USER = 10001  # of infra/images


def render(job: Job, profile: KubeRayProfile) -> Submission:
    command = ("kubectl", "create", "--namespace", profile.namespace, "--filename", "-")
    return Submission(command, stdin=yaml.safe_dump(manifest(job, profile), sort_keys=False, width=1000))


def manifest(job: Job, profile: KubeRayProfile) -> dict[str, Any]:
    """The RayJob: a head without work of its own, and one group of workers."""
    # a failed try is repeated by the operator on a new cluster: the command alone is in the entry point
    entry = in_folder(f"exec {on_ray(job, profile).shell()}", profile.workdir, CODE)
    fixed = job.what != "features"  # a group of ranks has a fixed size
    nodes = 1 if job.what == "eval" else profile.nodes
    smallest = nodes if fixed else profile.min_nodes
    shm = f"{max(profile.memory_gib // 4, 1)}Gi"
    cluster: dict[str, Any] = {
        "rayVersion": importlib.metadata.version("ray"),
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": not fixed,
        "headGroupSpec": {
            "serviceType": "ClusterIP",
            "rayStartParams": {"num-cpus": "0", "num-gpus": "0"},
            "template": _pod(profile, "ray-head", {"cpu": HEAD_CPUS, "memory": HEAD_MEMORY}, "2Gi"),
        },
        "workerGroupSpecs": [
            {
                "groupName": "gpu" if profile.gpus_per_node else "cpu",
                "replicas": smallest,
                "minReplicas": smallest,
                "maxReplicas": nodes,
                "rayStartParams": {"num-cpus": str(profile.cpus_per_node), "num-gpus": str(profile.gpus_per_node)},
                "template": _pod(profile, "ray-worker", _worker_resources(profile), shm),
            }
        ],
    }  # fmt: skip
    if not fixed:
        cluster["autoscalerOptions"] = {
            "upscalingMode": "Default",
            "idleTimeoutSeconds": IDLE_S,
            "securityContext": _locked_down(),
            "resources": {k: {"cpu": "500m", "memory": "1Gi"} for k in ("requests", "limits")},
        }
    spec: dict[str, Any] = {
        "entrypoint": f"bash -c {shlex.quote(entry)}",
        "backoffLimit": profile.retries,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 600,
        "submissionMode": "K8sJobMode",
        "rayClusterSpec": cluster,
    }
    if job.what == "eval":  # one process: Ray puts it on a worker
        spec |= {"entrypointNumGpus": 1} if profile.gpus_per_node else {"entrypointNumCpus": 1}
    labels = {"app.kubernetes.io/name": "flashdraft", "app.kubernetes.io/component": job.what}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"generateName": f"{job.name}-", "labels": labels},
        "spec": spec,
    }


def control(verb: str, job_id: str, profile: KubeRayProfile) -> Submission:
    """status, logs (of the submitter, followed) or stop."""
    command = {
        "status": ["get", "rayjob", job_id, "--output", "wide"],
        "logs": ["logs", "--follow", "--selector", f"job-name={job_id}"],
        "stop": ["delete", "rayjob", job_id],
    }[verb]
    return Submission(("kubectl", "--namespace", profile.namespace, *command))


def _pod(profile: KubeRayProfile, container: str, resources: dict[str, str], shm: str) -> dict[str, Any]:
    env: list[dict[str, Any]] = [{"name": k, "value": v} for k, v in profile.variables().items()]
    for name in profile.secrets:
        env.append({"name": name, "valueFrom": {"secretKeyRef": {"name": profile.secret, "key": name}}})
    env.append({"name": "PYTHONPATH", "value": CODE})
    spec: dict[str, Any] = {
        "automountServiceAccountToken": container == "ray-head",  # the autoscaler beside the head needs it
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": container,
                "image": profile.image,
                "workingDir": CODE,
                "env": env,
                "resources": {"requests": dict(resources), "limits": dict(resources)},
                "securityContext": _locked_down(),
                "volumeMounts": [
                    {"name": "work", "mountPath": profile.workdir},
                    {"name": "shm", "mountPath": "/dev/shm"},
                ],
            }
        ],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": {"claimName": profile.volume_claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shm}},  # object store, and NCCL between ranks
        ],
    }
    if profile.service_account:
        spec["serviceAccountName"] = profile.service_account
    if profile.node_selector and container == "ray-worker":
        spec["nodeSelector"] = dict(profile.node_selector)
    return {"metadata": {"labels": {"app.kubernetes.io/name": "flashdraft"}}, "spec": spec}


def _worker_resources(profile: KubeRayProfile) -> dict[str, str]:
    gpu = {profile.gpu_resource: str(profile.gpus_per_node)} if profile.gpus_per_node else {}
    return {"cpu": str(profile.cpus_per_node), "memory": f"{profile.memory_gib}Gi"} | gpu


def _locked_down() -> dict[str, Any]:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
