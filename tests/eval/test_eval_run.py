"""The whole evaluation on the tiny target: report, files, MLflow, command line, comparison, and its errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from eval.__main__ import run
from eval.compare import compare, load, text
from eval.config import EvalConfig
from eval.run import evaluate
from eval.session import Renderer, checkpoint_folder
from infra.config import validate
from infra.errors import CheckpointError, ConfigError, DataError, StoreError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def here(tiny_run, tmp_path, monkeypatch):
    """A working folder with its own copy of runs/, so that tests do not meet."""
    (tmp_path / "runs").mkdir()
    for folder in ("drafter", "drafter-init"):
        target = tmp_path / "runs" / "demo" / folder
        target.parent.mkdir(exist_ok=True)
        target.symlink_to(tiny_run / "runs" / "demo" / folder)
    (tmp_path / "runs" / "demo" / "config.toml").write_text('model = "tiny"\n')
    (tmp_path / "store").symlink_to(tiny_run / "store")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    return tmp_path


def config(**fields):
    return EvalConfig(**{"model": "tiny", "suites": ("heldout",), "max_new_tokens": 40, "track": False, **fields})


def test_report_of_trained_and_untrained(here):
    report = evaluate(config(before="runs/demo/drafter-init", limit=4))
    on_disk = json.loads((here / "runs" / "demo" / "report.json").read_text())
    assert json.loads(json.dumps(report)) == on_disk
    for part in (report, report["before"]):
        s = part["suites"]["heldout"]
        assert s["lossless"]["checked"] == s["lossless"]["identical"] == s["tokens"] + s["answers"] > 50
        assert s["replay_tau_pooled"] == s["tau_pooled"] and s["replay_equal_answers"] == s["answers"] == 4
        assert sum(s["accept_histogram"]) == s["cycles"] and len(s["accept_histogram"]) == 8
        assert sum((i + 1) * n for i, n in enumerate(s["accept_histogram"])) == s["tokens"]
        assert s["tau_by_verify_length"]["8"] == s["tau_pooled"] >= s["tau_by_verify_length"]["2"]
        assert s["speedup"] > 0 and s["draft_ms"] > 0 and s["verify_ms"] > 0
        # the identity leaves out what is neither drafting nor verifying: a few microseconds of bookkeeping
        assert s["predicted_ms_per_token"] == pytest.approx(s["ms_per_token"], rel=0.05)
        assert len(s["prompts"]) == 4 and set(s["by_category"]) <= {"stories", "letters"}
    trained, untrained = report["suites"]["heldout"], report["before"]["suites"]["heldout"]
    assert trained["tau_pooled"] > untrained["tau_pooled"] and untrained["tau_pooled"] < 1.3
    assert trained["tau_ci95"][0] <= trained["tau_pooled"] <= trained["tau_ci95"][1]
    assert report["drafter"]["weights_sha256"] != report["before"]["drafter"]["weights_sha256"]
    cycles = pq.read_table(here / "runs" / "demo" / "cycles.parquet")
    assert cycles.num_rows == trained["cycles"] + untrained["cycles"]
    html = (here / "runs" / "demo" / "report.html").read_text()
    assert "before training" in html and "class='answer'" in html and "http" not in html and "<script" not in html
    names = {p.name for p in (here / "runs" / "demo" / "figures").iterdir()}
    assert names == {"tau.png", "acceptance-heldout.png", "cycles-heldout.png"}


def test_store_replay_equals_live_on_whole_documents(here):
    """The stored answers are live decoding's own (same length, fp32): all three τ are one number."""
    s = evaluate(config(max_new_tokens=60, limit=4))["suites"]["heldout"]
    assert s["store_replay_tau_pooled"] == s["replay_tau_pooled"] == s["tau_pooled"]


def test_two_turns_batched_and_merged(here):
    """A second evaluation adds its suite; the second turn follows the target's own first answer."""
    Path("mine.jsonl").write_text("".join(f'{{"turns": ["Hello {i}", "And then?"]}}\n' for i in range(3)))
    first = evaluate(config(limit=1, max_new_tokens=10))
    second = evaluate(config(suites=("mine.jsonl",), batch_size=2, drafter="runs/demo", max_new_tokens=10))
    assert set(second["suites"]) == {"heldout", "mine"}
    assert second["suites"]["heldout"] == first["suites"]["heldout"]
    mine = second["suites"]["mine"]
    assert mine["answers"] == 6 and len(mine["prompts"]) == 3 and mine["settings"]["batch_size"] == 2
    assert mine["lossless"]["checked"] == mine["lossless"]["identical"] == mine["tokens"] + 6
    assert 1 < mine["concurrency"] <= 2
    alone = evaluate(config(suites=("mine.jsonl",), out="runs/alone", max_new_tokens=10))["suites"]["mine"]
    assert [(p["tokens"], p["cycles"]) for p in alone["prompts"]] == [
        (p["tokens"], p["cycles"]) for p in mine["prompts"]
    ]


@pytest.mark.parametrize("verification", ["exact", "rejection"])
def test_sampled(here, verification):
    s = evaluate(config(temperature=1.0, verification=verification, limit=2, verify_length=4))["suites"]["heldout"]
    assert s["tokens"] > 0 and s["accept_histogram"][4:] == [0] * 4
    if verification == "exact":
        assert s["lossless"]["checked"] == s["lossless"]["identical"] > 0
        assert s["replay_equal_answers"] == s["answers"]
    else:
        assert s["lossless"]["checked"] == 0 and "replay_tau_pooled" not in s


def test_conversation_rendering(tiny):
    from eval.prompts import Prompt

    renderer = Renderer(tiny, thinking=True)
    prompt = Prompt("a", turns=("One", "Two"), messages=({"role": "system", "content": "Brief."},))
    first = renderer.prompt_ids(prompt, 0, [])
    answer = tiny.tokenizer("<think>\nhm\n</think>\n\nfine", add_special_tokens=False)["input_ids"]
    second = tiny.tokenizer.decode(renderer.prompt_ids(prompt, 1, [answer]))
    assert "One" in tiny.tokenizer.decode(first) and "Brief." in second
    assert "fine" in second and "hm" not in second and "Two" in second
    assert renderer.prompt_ids(Prompt("b", token_ids=(1, 2)), 0, []) == [1, 2]


@pytest.mark.slow
def test_command_line_and_mlflow(here, capsys):
    args = ["--model", "tiny", "--suites", "heldout", "--limit", "3", "max_new_tokens=20"]
    assert run([*args, "--before", "runs/demo/drafter-init"]) == 0
    printed = capsys.readouterr().out
    assert "heldout" in printed and "✓" in printed and "runs/demo/report.json" in printed
    assert run([*args, "--drafter", "runs/demo/drafter-init", "--out", "runs/other", "track=false"]) == 0
    capsys.readouterr()
    assert run(["compare", "runs/other", "runs/demo"]) == 0
    assert "P(B better)" in capsys.readouterr().out
    first = ["--drafter", "runs/demo/drafter-init", "--out", "runs/other"]
    assert run([*args, *first]) == 0 and "version 2 is the candidate; version 1 (A) stays" in capsys.readouterr().out

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{here}/mlflow.db")
    assert client.get_model_version_by_alias("drafter-tiny", "champion").version in (1, "1")
    assert client.get_model_version_by_alias("drafter-tiny", "candidate").version in (2, "2")
    ids = json.loads((here / "runs" / "demo" / "mlflow.json").read_text())["runs"]
    parent, child = client.get_run(ids["parent"]), client.get_run(ids["eval"])
    report = load("runs/demo")
    assert parent.data.metrics["tau_pooled/heldout"] == pytest.approx(report["suites"]["heldout"]["tau_pooled"])
    assert "before/tau_pooled/heldout" in child.data.metrics and "acceptance_at_01/heldout" in child.data.metrics
    assert {a.path for a in client.list_artifacts(ids["eval"])} >= {"figures", "report.json", "samples.json"}


def test_an_error_is_one_sentence(here):
    command = [sys.executable, "-m", "eval", "--model", "tiny", "limits=3"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=here, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 2 and "did you mean 'limit'" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"drafter": "nowhere"}, CheckpointError, "'nowhere' is neither a run folder"),
        ({"model": "smollm2-135m"}, CheckpointError, "no run below runs/ has a drafter for 'smollm2-135m'"),
        ({"store": "nowhere"}, StoreError, "nowhere"),
        ({"verify_length": 9}, ConfigError, "verify_length = 9 exceeds the block size 8"),
        ({"suites": ("gsm8k",), "data": "."}, DataError, "gsm8k is not in folder"),
        ({"suites": ("heldout", "heldout")}, ConfigError, "twice"),
    ],
)
def test_errors_name_the_thing(here, fields, error, message):
    with pytest.raises(error, match=message):
        evaluate(config(**fields))


def test_bad_config_is_named():
    for fields, message in [
        ({"suites": []}, "suites is empty"),
        ({"verification": "rejection"}, "set temperature above 0"),
        ({"limits": 3}, "unknown key 'limits': did you mean 'limit'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            validate(EvalConfig, fields, "the evaluation")


def test_drafter_of_another_target_is_refused(here, make_drafter):
    config_file = Path("other/config.json")
    config_file.parent.mkdir()
    source = checkpoint_folder("runs/demo")
    (config_file.parent / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    data = json.loads((source / "config.json").read_text())
    data["dflash_config"]["target_layer_ids"], data["num_target_layers"] = [1, 2, 9], 12
    config_file.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="does not fit tiny"):
        evaluate(config(drafter="other"))


def report_of(tokens, cycles, name="x"):
    prompts = [{"id": str(i), "tokens": t, "cycles": c} for i, (t, c) in enumerate(zip(tokens, cycles, strict=True))]
    return {"target": {"name": "tiny"}, "suites": {name: {"prompts": prompts, "speedup": 1.0, "settings": {}}}}


def test_compare_is_paired():
    """Prompts differ wildly, drafters by a constant factor: paired, the winner is certain."""
    cycles = [10, 100, 1000, 20, 50, 400] * 5
    a = report_of([2 * c for c in cycles], cycles)
    b = report_of([int(2.2 * c) for c in cycles], cycles)
    result = compare(a, b)
    assert result["all"]["difference"] == pytest.approx(0.2) and result["all"]["probability_b_better"] == 1
    assert "B is better by 0.200 τ (+10.0%)" in text(result, "a", "b")
    assert "A is better by 0.200 τ (+10.0%)" in text(compare(b, a), "b", "a").replace("+9.1%", "+10.0%")
    same = compare(a, a)
    assert same["all"]["ci95"] == [0, 0] and same["all"]["probability_b_better"] == 0.5
    assert "No clear winner" in text(same, "a", "a")


def test_compare_refuses_the_incomparable(tmp_path):
    a = report_of([20], [10])
    with pytest.raises(DataError, match="no suite with prompts in common"):
        compare(a, report_of([20], [10], name="y"))
    with pytest.raises(DataError, match="different targets"):
        compare(a, {**a, "target": {"name": "other"}})
    with pytest.raises(ConfigError, match="does not exist; evaluate that drafter first"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="A= and B="):
        load("")
