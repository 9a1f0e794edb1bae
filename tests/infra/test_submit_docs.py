"""Every command of docs/clusters is tried; the sizing tables are the code's; images and compose file are sound."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from infra.sizing import TARGETS, sizing, steps
from infra.submit.cli import submit
from infra.submit.profile import KINDS

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted((ROOT / "docs" / "clusters").glob("*.md"))
IMAGES = ROOT / "infra" / "images"
COMMANDS = [
    (page.name, line[2:])
    for page in PAGES
    for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.S)
    for line in block.splitlines()
    if line.startswith("$ ")
]


def test_every_platform_has_a_page_with_commands():
    pages = {page for page, _ in COMMANDS}
    assert {"README.md", "ray.md", "kuberay.md", "slurm.md", "compose.md"} == pages and len(COMMANDS) >= 20
    for platform in KINDS:
        assert any(f"--on {platform}" in c for _, c in COMMANDS)


@pytest.mark.parametrize("page, command", COMMANDS)
def test_commands_of_the_docs_work(page, command, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    if command.startswith("make "):
        env = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}  # ours may be make too
        shown = subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, env=env, capture_output=True, text=True)
        assert shown.returncode == 0, shown.stderr
        command = shown.stdout.strip().splitlines()[-1].replace(".venv/bin/python", "python")
    words = shlex.split(command)
    assert words[:4] == ["python", "-m", "infra", "submit"] and "--dry-run" in words, f"{page}: {command}"
    assert submit(words[4:]) == 0
    sent = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=sent, text=True, capture_output=True).returncode == 0


def shell_commands():
    """(page, command) of every ```bash block, comments taken off, and of inline code that begins with a program."""
    for page in PAGES:
        text = page.read_text()
        for block in re.findall(r"```bash\n(.*?)```", text, re.S):
            for line in block.splitlines():
                yield page.name, re.sub(r"\s+#.*", "", line)
        for span in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.S)):
            words = span.split()
            if words[0] in PROGRAMS and len(words) > 1 and span not in MENTIONED:
                yield page.name, " ".join(words)


MENTIONED = {f"python -m {module}" for module in ("pipeline", "trainer", "eval", "infra submit")}  # names, not calls
PROGRAMS = {"python", "make", "ray", "sbatch", "srun", "kubectl", "ssh", "deepspeed", "docker", "aws"}
# run by the next test in an empty folder: /shared and the home folder are below it
RUN = {
    "mkdir -p /shared/flashdraft/logs",
    "install -D -m 600 /dev/null ~/.config/flashdraft/secrets.env",
    "ray get-auth-token --generate",
    "chmod 600 ~/.ray/auth_token",
    "export RAY_AUTH_MODE=token",
    "mkdir -m 700 infra/images/secrets",
    "for f in db_password s3_user s3_password; "
    """do python3 -c 'import secrets; print(secrets.token_hex(16), end="")' > infra/images/secrets/$f; done""",
    "python -m infra sizing",
    "python -m infra submit train --on slurm MODEL=qwen3-8b --dry-run | sed '1s/--parsable/--test-only/' | bash",
}
# run by `make cluster-test` with these words (other addresses and folders)
CLUSTER = {
    "ray start --head --port=6379": ("ray_hosts.py", "ray start --head --port=6379"),
    "ray start --address=HEAD:6379": ("ray_hosts.py", "ray start --address=head:6379"),
    "python -m trainer --model qwen3-8b --nodes 2 --nproc 8 --rendezvous worker-1:29500": (
        "check_training.py",
        "--nodes 2 --rendezvous",
    ),
    "python -m trainer --nodes N": ("check_training.py", "--nodes 2 --rendezvous"),
    "python -m trainer --launcher ray": ("check_ray_even.py", "train"),  # what the submitted job runs
    "deepspeed --hostfile infra/images/hostfile --no_local_rank --module trainer.sft my-recipe.toml": (
        "check_training.py",
        "deepspeed --hostfile --no_local_rank --module trainer.sft",
    ),
    "ray symmetric-run": ("check_slurm.py", "features slurm"),  # in the script of a features job
}
# `make --dry-run` of these: the targets exist and take the words
MAKE = {"make cluster-test", 'make cluster-test ARGS="-k slurm"', 'make features ARGS="dry=true"', "make install"}
# tried by nothing here, and why
NEEDS = {
    "cd /shared/flashdraft/code && make install": "downloads the packages; every test runs after `make install`",
    "docker build -f infra/images/Dockerfile.gpu -t registry.example.com/flashdraft:0.1.0-gpu . && docker push "
    "registry.example.com/flashdraft:0.1.0-gpu": "Docker and a registry; hadolint reads the file",
    "kubectl create namespace flashdraft": "a Kubernetes cluster",
    "kubectl -n flashdraft create secret generic flashdraft --from-env-file=secrets.env": "a Kubernetes cluster",
    "kubectl -n flashdraft apply -f volume-claim.yaml": "a Kubernetes cluster",
    "kubectl port-forward": "a Kubernetes cluster",
    "kubectl get crd rayjobs.ray.io -o yaml > crd.yaml; RAYJOB_CRD=crd.yaml pytest tests/infra": "a Kubernetes cluster",
    "docker compose -f infra/images/compose.yaml up --detach": "Docker; the file is read by the test below",
    "aws --endpoint-url http://127.0.0.1:9000 s3 mb s3://flashdraft": "the S3 server of the compose file",
    "ssh -N -L 8265:127.0.0.1:8265 HEAD": "a second machine with sshd",
    "ssh -N -L 5000:127.0.0.1:5000 -L 9000:127.0.0.1:9000 SERVER": "a second machine with sshd",
}


def test_every_shell_command_of_the_docs_is_run_or_needs_something():
    found = {command for _, command in shell_commands()}
    known = [*RUN, *CLUSTER, *MAKE, *NEEDS]
    assert len(known) == len(set(known))
    assert found == set(known), f"new: {found - set(known)}; gone: {set(known) - found}"


@pytest.mark.spawn
def test_shell_commands_of_the_docs_run(tmp_path):
    """In the order of the pages, in one shell per page, as a person types them."""
    folder = tmp_path / "infra" / "images"
    folder.mkdir(parents=True)
    sbatch = tmp_path / "bin" / "sbatch"  # says what it was given; `make cluster-test` has the real one
    sbatch.parent.mkdir()
    sbatch.write_text('#!/bin/sh\necho "$@" > "$HOME/sbatch.words"; exec cat > "$HOME/sbatch.script"\n')
    sbatch.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    env["PATH"] = f"{sbatch.parent}:{Path(sys.executable).parent}:{env['PATH']}"
    said = ""
    for page in PAGES:
        script = "\n".join(c for p, c in shell_commands() if p == page.name and c in RUN)
        script = script.replace("/shared/", f"{tmp_path}/shared/")
        command = ["bash", "-e", "-o", "pipefail", "-c", script]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{page.name}: {done.stderr}"
        said += done.stdout
    modes = {p: (tmp_path / p).stat().st_mode & 0o777 for p in (".ray/auth_token", ".config/flashdraft/secrets.env")}
    assert set(modes.values()) == {0o600} and (tmp_path / ".ray/auth_token").read_text().strip() in said
    assert (tmp_path / "shared/flashdraft/logs").is_dir() and folder.joinpath("secrets").stat().st_mode & 0o777 == 0o700
    assert all(len((folder / "secrets" / f).read_text()) == 32 for f in ("db_password", "s3_user", "s3_password"))
    assert sizing() in said
    assert (tmp_path / "sbatch.words").read_text() == "--test-only\n"
    assert (tmp_path / "sbatch.script").read_text().startswith("#!/bin/bash\n#SBATCH ")


@pytest.mark.parametrize("command", CLUSTER)
def test_commands_that_the_cluster_checks_run_are_in_them(command):
    """The words stand in the check as literals (of lists of arguments)."""
    file, words = CLUSTER[command]
    tree = ast.parse((ROOT / "tests" / "cluster" / file).read_text())
    literals = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    assert not {*words.split()} - {word for text in literals for word in text.split()}


def test_the_trainers_of_the_docs_are_understood():
    from trainer.__main__ import parse

    for command in (c for c in CLUSTER if c.startswith("python -m trainer")):
        parse(shlex.split(command.replace(" N", " 2"))[3:])


@pytest.mark.parametrize("command", sorted(MAKE))
def test_make_targets_of_the_docs_exist(command):
    env = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    done = subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for words in re.findall(r'ARGS="(.*)"', command):
        assert words in done.stdout


def test_links_and_files_of_the_docs_exist():
    for page in [*PAGES, ROOT / "docs" / "threats.md"]:
        text = page.read_text()
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
        for path in re.findall(r"`((?:infra|tests|features|trainer|eval|pipeline)/[\w./-]+)`", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_sizing_page_is_the_codes():
    text = (ROOT / "docs" / "clusters" / "sizing.md").read_text()
    assert sizing() in text[text.index("<!-- sizing -->") : text.index("<!-- /sizing -->")]


def test_sizing_by_hand():
    """Qwen3-8B: 40,960 bytes per token in bf16; 1.05 G parameters; prefill 2 * 8.2e9 FLOP per token."""
    shape = next(s for s in TARGETS if s.name == "Qwen3-8B")
    assert shape.store_bytes("bf16") == 40_960 and shape.store_bytes("fp8") == 20_500
    assert shape.drafter == 5 * (2 * 4096 * 128 * 40 + 3 * 4096 * 12_288) + 5 * 4096**2
    assert steps(shape)["prefill"] == pytest.approx(1e8 * 2 * 8.2e9 / (0.4 * 989e12) / 3600)


def test_dockerfiles_are_clean_and_run_as_nobody_special():
    beside = Path(sys.executable).parent / "hadolint"
    hadolint = str(beside) if beside.is_file() else shutil.which("hadolint")
    for name in ("Dockerfile.cpu", "Dockerfile.gpu"):
        text = (IMAGES / name).read_text()
        assert re.search(r"^FROM \S+:\d[\w.-]+$", text, re.M) and "\nUSER 10001\n" in text
        assert "infra doctor" in text and "constraints.txt" in text
        if hadolint:
            done = subprocess.run([hadolint, str(IMAGES / name)], capture_output=True, text=True)
            assert done.returncode == 0, done.stdout
    pins = [x for x in (IMAGES / "constraints.txt").read_text().splitlines() if not x.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", p) for p in pins) and "torch==" in "\n".join(pins)
    assert not any(p.startswith("kernels==") for p in pins)
    if not hadolint:
        pytest.skip("hadolint is not installed (pip install -e '.[dev]'): only the rules above were checked")


def test_compose_binds_to_loopback_and_holds_no_secret():
    compose = yaml.safe_load((IMAGES / "compose.yaml").read_text())
    assert set(compose["services"]) == {"db", "mlflow", "s3"}
    for name, service in compose["services"].items():
        assert re.search(r":[\w.-]*\d[\w.-]*$", service["image"]) and not service["image"].endswith("latest")
        assert all(str(p).startswith("127.0.0.1:") for p in service.get("ports", [])), name
        for key, value in service.get("environment", {}).items():
            assert "PASSWORD" not in key or value.startswith("/run/secrets/"), key
    assert "ports" not in compose["services"]["db"] and compose["networks"]["inside"]["internal"]
    assert all(set(s) == {"file"} for s in compose["secrets"].values())
    assert "secrets/" in (ROOT / ".dockerignore").read_text()


def test_hostfile_is_one_that_deepspeed_reads():
    """DeepSpeed's grammar: a name and its slots on each line, no name twice."""
    lines = [x for x in (IMAGES / "hostfile").read_text().splitlines() if x and not x.startswith("#")]
    names = [re.fullmatch(r"(\S+) slots=([1-9]\d*)", line)[1] for line in lines]
    assert len(names) == len(set(names)) >= 2
