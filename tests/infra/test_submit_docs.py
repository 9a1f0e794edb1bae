"""Every command of docs/clusters is tried; the sizing tables are the code's; images and compose file are sound."""

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
