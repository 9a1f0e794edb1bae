"""The runs table of MLflow's pages, in a real browser: what a user reads after `make ui`."""

import html
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from infra.tracking import track

ROOT = Path(__file__).parents[2]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def text_of_cells(page: str) -> list[str]:
    cells = re.findall(r'role="gridcell"[^>]*>(.*?)(?=role="gridcell"|role="row"|$)', page, flags=re.S)
    return [html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>?", " ", cell))).strip() for cell in cells]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs a Chromium (Debian: apt install chromium)")
def test_the_runs_table_shows_drafters_by_tau(in_tmp):
    for name, tau in (("worse", 1.25), ("better", 3.5), ("middle", 2.125)):
        with track(name, "eval", folder=in_tmp / "runs" / name) as t:
            t.metrics({"tau_pooled/mean": tau, "tau_pooled/gsm8k": tau}, on_parent=True)
            t.columns(["tau_pooled/mean", "tau_pooled/gsm8k"], "tau_pooled/mean")
    port = free_port()
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from infra.ui import ui; ui({port})",
    ]
    log = (in_tmp / "ui.log").open("w+")
    server = subprocess.Popen(command, cwd=in_tmp, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        for _ in range(120):
            assert server.poll() is None, (in_tmp / "ui.log").read_text()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except OSError:
                time.sleep(0.5)
        address = re.search(r"drafters by τ: +(\S+)", (in_tmp / "ui.log").read_text()).group(1)
        page = subprocess.run(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1600,900", "--dump-dom"]
            + ["--virtual-time-budget=20000", f"--user-data-dir={in_tmp / 'browser'}", address],
            capture_output=True, text=True, timeout=120,
        ).stdout  # fmt: skip
    finally:
        subprocess.run(["pkill", "-TERM", "-s", str(server.pid)], check=False)
        server.wait(timeout=30)
    words = [cell.split()[-1] for cell in text_of_cells(page) if cell]
    assert [w for w in words if w in {"worse", "middle", "better"}] == ["better", "middle", "worse"]
    assert [float(w) for w in words if re.fullmatch(r"\d\.\d+", w)] == [3.5, 3.5, 2.125, 2.125, 1.25, 1.25]
    assert not any("/eval" in w for w in words)  # one row for each drafter, none for its stages
