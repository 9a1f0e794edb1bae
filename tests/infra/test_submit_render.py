"""What would be sent to each platform: it parses, validates, quotes, and holds no secret."""

import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from rayjob_schema import RAYJOB

from infra.errors import ConfigError
from infra.submit import kuberay, slurm
from infra.submit.cli import parse, plan, submit
from infra.submit.job import make_job
from infra.submit.profile import load_profile

ROOT = Path(__file__).parent.parent.parent
ADDRESS = "s3://flashdraft/store/qwen3-8b/0123456789ab"
JOBS = {
    "features": ["MODEL=qwen3-8b", "CORPUS=demo", "prefill.storage_dtype=fp8_e4m3"],
    "train": ["MODEL=qwen3-8b", "RECIPE=sft", f"data.store={ADDRESS}"],
    "eval": ["MODEL=qwen3-8b", "DRAFTER=runs/a b", "SUITES=/srv/suites", "LIMIT=8", f"store={ADDRESS}"],
}
ALL = [(what, on) for what in JOBS for on in ("ray", "kuberay", "slurm", "local")]


def planned(what, on, *more):
    return plan(parse([what, "--on", on, *JOBS[what], *more]))


def program(name):
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if not found:
        pytest.skip(f"{name} is not installed (pip install -e '.[dev]')")
    return found


def bash_accepts(text):
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def shellcheck(text):
    done = subprocess.run([program("shellcheck"), "--shell=bash", "-"], input=text, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("what, on", ALL)
def test_the_dry_run_is_a_script_that_says_exactly_what_is_sent(what, on, capsys):
    assert submit([what, "--on", on, "--dry-run", *JOBS[what]]) == 0
    text = capsys.readouterr().out
    bash_accepts(text)
    sent = planned(what, on)
    assert text == sent.text()
    first = shlex.split(text.split(" <<")[0])
    assert tuple(first[len(sent.env) :]) == sent.command
    if sent.stdin:
        assert f"\n{sent.stdin}EOF\n" in text


def inner(what, on):
    """The command line that finally runs, whatever carries it."""
    sent = planned(what, on)
    if on == "local":
        return list(sent.command[1:])
    if on == "ray":
        words = shlex.split(sent.command[-1], comments=False)
    elif on == "kuberay":
        words = shlex.split(shlex.split(yaml.safe_load(sent.stdin)["spec"]["entrypoint"])[2])
    else:
        words = shlex.split(sent.stdin.replace("\\\n", " "), comments=True)
    return words[words.index("-m") :]


@pytest.mark.parametrize("what, on", ALL)
def test_every_platform_calls_the_same_command_lines(what, on):
    words = inner(what, on)
    module = {"features": "pipeline", "train": "trainer", "eval": "eval"}[what]
    assert words[:4] == ["-m", module, "--model", "qwen3-8b"]
    for word in JOBS[what][1:]:
        assert word.partition("=")[2] in words or word in words or f"{word};" in words
    if on == "kuberay":  # ends with the command: the whole of it must be one that its own parser takes
        if what == "train":
            from trainer.__main__ import parse as trainer_parse

            args = trainer_parse(words[2:])
            assert (args.launcher, args.nodes, args.nproc, args.overrides) == ("ray", 8, "8", [f"data.store={ADDRESS}"])
        if what == "features":
            from pipeline.config import resolve

            overrides = [w for w in words[4:] if "=" in w]
            cfg = resolve("qwen3-8b", "demo", overrides)
            assert (cfg.store_root, cfg.ray.gpus_per_actor) == ("s3://flashdraft/store", 1)


def rayjob(what):
    return yaml.safe_load(planned(what, "kuberay").stdin)


def refused(job):
    return not jsonschema.Draft202012Validator(RAYJOB).is_valid(job)


@pytest.mark.parametrize("what", JOBS)
def test_rayjobs_validate_against_kuberay(what):
    job = rayjob(what)
    jsonschema.Draft202012Validator(RAYJOB).validate(job)
    cluster = job["spec"]["rayClusterSpec"]
    head, workers = cluster["headGroupSpec"], cluster["workerGroupSpecs"][0]
    assert head["rayStartParams"]["num-cpus"] == "0"  # no work on the head
    assert cluster["authOptions"] == {"mode": "token"}
    assert tuple(int(x) for x in cluster["rayVersion"].split(".")) >= (2, 52, 0)  # the first with tokens
    scaling = (workers["minReplicas"], workers["maxReplicas"], cluster["enableInTreeAutoscaling"])
    assert scaling == {"features": (0, 8, True), "train": (8, 8, False), "eval": (1, 1, False)}[what]


def fields(node, path=()):
    """Paths of every field of a RayJob that is KubeRay's own: not inside of pods, nor in maps with free keys."""
    if isinstance(node, list):
        for i, item in enumerate(node):
            yield from fields(item, (*path, i))
    elif isinstance(node, dict):
        for key, value in node.items():
            yield (*path, key)
            if key not in ("template", "metadata", "rayStartParams", "securityContext", "resources"):
                yield from fields(value, (*path, key))


@pytest.mark.parametrize("what", JOBS)
def test_the_schema_refuses_every_misspelt_field_and_every_wrong_type(what):
    paths = list(fields(rayjob(what)))
    assert len(paths) >= 25
    for *parents, key in paths:
        for change in ("name", "type"):
            job = rayjob(what)
            node = functools.reduce(lambda n, k: n[k], parents, job)
            value = node.pop(key)
            node |= {f"{key}s": value} if change == "name" else {key: [[]]}
            assert refused(job), f"{change} of {'.'.join(map(str, (*parents, key)))}"
    for group, needed in (("headGroupSpec", "template"), ("workerGroupSpecs", "groupName")):
        job = rayjob(what)
        node = job["spec"]["rayClusterSpec"][group]
        del (node[0] if isinstance(node, list) else node)[needed]
        assert refused(job)
    job = rayjob(what)
    job["spec"]["shutdownAfterJobFinishes"] = False  # the operator refuses it beside ttlSecondsAfterFinished
    assert refused(job)


def pods(job):
    """The pods that the operator makes of a RayJob, the autoscaler's container among them."""
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        template = json.loads(json.dumps(group["template"]))
        if group is cluster["headGroupSpec"] and "autoscalerOptions" in cluster:
            options = cluster["autoscalerOptions"]
            own = {k: options[k] for k in ("securityContext", "resources", "env", "volumeMounts") if k in options}
            template["spec"]["containers"].append({"name": "autoscaler", "image": "x", **own})
        metadata = {"name": "x"} | template["metadata"]
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


@pytest.mark.parametrize("what", JOBS)
def test_pods_validate_against_kubernetes(what):
    """Strictly, against the schema that Kubernetes publishes."""
    kubernetes = pytest.importorskip("kubernetes_validate", reason="pip install -e '.[dev]'")
    version = kubernetes.latest_version()
    made = list(pods(rayjob(what)))
    assert len(made) == 2 and len(made[0]["spec"]["containers"]) == (2 if what == "features" else 1)
    for pod in made:
        kubernetes.validate(pod, version, strict=True)
        for path, value in (
            (("containers", 0, "imagePullPolice"), "Always"),
            (("containers", 0, "securityContext", "allowPrivilegeEscalation"), "no"),
            (("containers", 0, "volumeMounts", 0, "mountPath"), None),
            (("containers", -1, "resources", "request"), {}),
            (("volumes", 0, "persistentVolumeClaim", "claim"), "x"),
            (("securityContext", "runAsUser"), "10001"),
            (("runtimeClass",), "nvidia"),
        ):
            broken = json.loads(json.dumps(pod))
            functools.reduce(lambda n, k: n[k], path[:-1], broken["spec"])[path[-1]] = value
            with pytest.raises(kubernetes.ValidationError):
                kubernetes.validate(broken, version, strict=True)


@pytest.mark.parametrize("what", JOBS)
def test_rayjobs_validate_against_the_crd_of_a_cluster(what):
    """`kubectl get crd rayjobs.ray.io -o yaml > crd.yaml; RAYJOB_CRD=crd.yaml pytest tests/infra`"""
    path = os.environ.get("RAYJOB_CRD")
    if not path:
        pytest.skip("RAYJOB_CRD names no file with the cluster's own definition")
    versions = yaml.safe_load(Path(path).read_text())["spec"]["versions"]
    schema = next(v["schema"]["openAPIV3Schema"] for v in versions if v["name"] == "v1")
    jsonschema.Draft202012Validator(closing(schema)).validate(yaml.safe_load(planned(what, "kuberay").stdin))


def closing(schema):
    """Kubernetes prunes unknown fields silently; here they are an error."""
    if isinstance(schema, list):
        return [closing(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    out = {k: closing(v) for k, v in schema.items()}
    if "properties" in schema and isinstance(schema["properties"], dict) and "apiVersion" not in schema["properties"]:
        out.setdefault("additionalProperties", False)
    return out


@pytest.mark.parametrize(
    "what, more",
    [("features", []), ("train", []), ("eval", []), ("train", ["--sweep", "loss.weighting=decay,dpace"])]
    + [("features", ["--set", 'secrets=["HF_TOKEN"]'])],
)
def test_slurm_scripts_pass_shellcheck(what, more):
    shellcheck(planned(what, "slurm", *more).stdin)


def test_the_script_for_ray_passes_shellcheck():
    shellcheck("#!/bin/bash\n" + planned("train", "ray").command[-1] + "\n")


def test_a_sweep_is_an_array_with_a_name_for_each_setting():
    script = planned("train", "slurm", "--sweep", "loss.weighting=decay,dpace", "--sweep", "train.seed=1,2").stdin
    assert "#SBATCH --array=0-3%4" in script and "#SBATCH --nodes=1" in script
    cases = script[script.index("cases=(") + 7 : script.index("\n)")].split("\n")[1:]
    settings = [shlex.split(c)[0].split() for c in cases]
    assert ["loss.weighting=dpace", "train.seed=1", "name=qwen3-8b-dpace-1"] in settings
    assert len({s[2] for s in settings}) == 4
    for on, what in (("ray", "train"), ("slurm", "features")):
        with pytest.raises(ConfigError, match="--sweep"):
            planned(what, on, "--sweep", "a=1,2")


def test_a_long_name_leaves_room_for_what_kubernetes_adds():
    """The operator takes names of 47 characters: `validateRayJobMetadata`."""
    words = ["MODEL=qwen3-8b", f"data.store={ADDRESS}", f"name={'a-very-long-name-' * 5}"]
    made = kuberay.manifest(make_job("train", words, load_profile("kuberay", "", [])), load_profile("kuberay", "", []))
    assert 30 < len(made["metadata"]["generateName"]) + 5 <= 47


@pytest.mark.parametrize("on", ["ray", "kuberay", "slurm", "local"])
def test_values_never_become_shell_syntax(on, tmp_path):
    """Whatever a value holds, it arrives as one argument: the rendered command is run with `echo` for python."""
    hostile = f"name=x'; touch {tmp_path}/owned; $(touch {tmp_path}/owned) `touch {tmp_path}/owned` #"
    profile = load_profile(on, "", [f'workdir="{tmp_path}"'] if on != "local" else [])
    job = make_job("train", ["MODEL=qwen3-8b", f"data.store={ADDRESS}", hostile], profile)
    assert job.name.replace("-", "").isalnum()
    done = subprocess.run(["bash", "-c", job.shell("echo")], capture_output=True, text=True)
    assert hostile.split(" #")[0] in done.stdout and not (tmp_path / "owned").exists()
    if on == "slurm":
        bash_accepts(slurm.script(job, profile, []))
        assert job.shell(slurm._python(profile)).split(" ", 1)[1] in slurm.script(job, profile, [])
    if on == "kuberay":
        entry = kuberay.manifest(job, profile)["spec"]["entrypoint"]
        assert hostile in shlex.split(shlex.split(entry)[2])


def test_secrets_are_names_everywhere(monkeypatch, capsys):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3t-value")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "s3cr3t-value")
    for what, on in ALL:
        submit([what, "--on", on, "--dry-run", *JOBS[what]])
    assert "s3cr3t-value" not in capsys.readouterr().out
    pod = yaml.safe_load(planned("train", "kuberay").stdin)["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    env = {e["name"]: e for e in pod["spec"]["containers"][0]["env"]}
    assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "flashdraft", "key": "HF_TOKEN"}
    script = planned("train", "slurm", "--set", 'secrets=["HF_TOKEN"]').stdin
    assert "#SBATCH --export=NONE" in script and "${HF_TOKEN:?" in script


def test_containers_are_locked_down():
    cluster = yaml.safe_load(planned("features", "kuberay").stdin)["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        spec = group["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
        context = spec["containers"][0]["securityContext"]
        assert context == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert not cluster["workerGroupSpecs"][0]["template"]["spec"]["automountServiceAccountToken"]


@pytest.mark.parametrize("on", ["ray", "kuberay", "slurm"])
@pytest.mark.parametrize("verb", ["status", "logs", "stop"])
def test_status_logs_and_stop(on, verb):
    sent = plan(parse([verb, "--on", on, "job_12-3"]))
    assert "job_12-3" in " ".join(sent.command) and not sent.stdin
    with pytest.raises(ConfigError):
        plan(parse([verb, "--on", on, "job; reboot"]))


def test_local_runs_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "infra", "submit", "train", "--on", "local", "MODEL=no-such-model"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and "no-such-model" in done.stderr and "Traceback" not in done.stderr
