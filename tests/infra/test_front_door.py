"""The command lines: help, doctor, and one sentence for each user's error."""

import os
import re
import socket
import subprocess
import sys

import pytest

from infra.cli import main
from infra.doctor import checks, foreign_kernels
from infra.errors import ConfigError, ResourceError
from infra.progress import Progress, duration


def command(root, cwd, *args):
    env = os.environ | {"PYTHONPATH": str(root), "MLFLOW_TRACKING_URI": f"sqlite:///{cwd}/mlflow.db"}
    return subprocess.run([sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def sentence(done, *words):
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("flashdraft: ") and "Traceback" not in done.stderr
    for word in words:
        assert word in last, last


def test_make_help_lists_every_target(root):
    text = (root / "Makefile").read_text()
    documented = set(re.findall(r"^([a-z-]+):.*## ", text, re.M))
    assert {"demo", "features", "train", "eval", "compare", "ui", "test", "bench", "doctor", "help"} <= documented
    for target in documented - {"help", "clean", "install"}:
        recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", text, re.M).group(1)
        assert len(recipe.splitlines()) <= 3
    done = subprocess.run(["make", "help"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0 and all(f"make {t} " in done.stdout for t in documented)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-m", "trainer", "--model", "qwen3-9b"], ["unknown MODEL 'qwen3-9b'", "did you mean 'qwen3-8b'?"]),
        (["-m", "trainer", "--stage", "dpo"], ["unknown STAGE 'dpo'", "sft, rl, rl-onpolicy"]),
        (["-m", "trainer", "--stage", "rl"], ["stage 'rl'", "give INIT=runs/<sft run>"]),
        (["-m", "trainer", "--model", "tiny", "train.stepz=5"], ["unknown key 'train.stepz'", "did you mean 'steps'?"]),
        (["-m", "trainer", "--model", "tiny", "--recipe", "stf"], ["unknown recipe 'stf'", "sft"]),
        (["-m", "trainer", "--model", "tiny", "--nproc", "0"], ["--nproc '0'"]),
        (["-m", "infra", "bench", ""], ["PART is empty", "features"]),
    ],
)
def test_bad_input_is_one_sentence(root, tmp_path, args, words):
    sentence(command(root, tmp_path, *args), *words)


def test_occupied_port(root, tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        sentence(command(root, tmp_path, "-m", "infra", "ui", "--port", str(port)), str(port), "make ui PORT=")


def test_main_exit_codes(capsys):
    def fail(error):
        def run():
            raise error

        with pytest.raises(SystemExit) as e:
            main(run)
        return e.value.code, capsys.readouterr().err

    assert fail(ConfigError("a is b; do c")) == (2, "flashdraft: a is b; do c\n")
    assert fail(ResourceError("x"))[0] == 2
    code, text = fail(OSError(28, "No space left on device", "/x/y"))
    assert code == 2 and "disk is full (/x/y)" in text
    assert fail(KeyboardInterrupt())[0] == 130
    with pytest.raises(ValueError):
        main(lambda: int("x"))


def test_doctor_finds_the_foreign_package():
    assert foreign_kernels(["torch", "numpy"]) is None
    assert "pip uninstall kernels" in foreign_kernels(["torch", "Kernels"])
    assert not [c for c in checks() if c[0] == "bad"]


def test_progress_says_eta(capsys):
    with Progress(100, "work", "docs", interval_s=0) as p:
        p.update(25, loss=1.5)
    text = capsys.readouterr().err
    assert "work  25% 25/100 docs" in text and "ETA" in text and "loss 1.5" in text
    assert [duration(s) for s in (5, 75, 7322, float("nan"))] == ["5s", "1m15s", "2h02m", "?"]
