import json

import matplotlib
import pytest

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from infra.tracking import track, tracking_uri


def _runs(tmp_path):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri())
    experiment = client.get_experiment_by_name("flashdraft")
    return client, {r.info.run_name: r for r in client.search_runs([experiment.experiment_id])}


@pytest.mark.slow
def test_stages_are_children_of_the_drafters_run(in_tmp):
    folder = in_tmp / "runs" / "d"
    with track("d", "sft", folder=folder, config_toml="a = 1\n", tags={"target": "tiny"}) as t:
        for step in range(30):
            t.metrics({"loss": 30.0 - step}, step)
        t.metrics({"tau": 2.5}, on_parent=True)
        t.figure("x.png", plt.figure())
        t.dataset("tiny", "f" * 64, "store/tiny/x", {"documents": 3})
        for step, tau in ((100, 1.5), (200, 2.5), (300, 2.0)):
            t.model(f"d.1-step-{step}", {"heldout_replay_tau": tau}, step, weights=f"checkpoints/step-{step}")
    with track("d", "sft", folder=folder, resume=True) as t:
        t.metrics({"loss": 0.0}, 30)
    with track("d", "eval", folder=folder):
        pass
    client, runs = _runs(in_tmp)
    assert set(runs) == {"d", "d/sft", "d/eval"}
    parent, sft = runs["d"], runs["d/sft"]
    best_first = [{"field_name": "metrics.heldout_replay_tau", "ascending": False}]
    models = client.search_logged_models([parent.info.experiment_id], order_by=best_first)
    assert [m.name for m in models] == ["d_1-step-200", "d_1-step-300", "d_1-step-100"]
    assert models[0].tags["weights"] == "checkpoints/step-200" and models[0].source_run_id == sft.info.run_id
    assert sft.data.tags["mlflow.parentRunId"] == runs["d/eval"].data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert parent.data.metrics["tau"] == 2.5
    history = client.get_metric_history(sft.info.run_id, "loss")
    assert sorted(m.step for m in history) == list(range(31))
    assert {a.path for a in client.list_artifacts(sft.info.run_id)} == {"config.toml", "figures"}
    assert sft.inputs.dataset_inputs[0].dataset.digest == "f" * 36
    assert all(r.info.status == "FINISHED" for r in runs.values())
    assert json.loads((folder / "mlflow.json").read_text())["runs"]["sft"] == sft.info.run_id


@pytest.mark.slow
def test_a_failing_stage_is_marked_and_a_lost_server_does_not_stop_it(in_tmp, caplog):
    with pytest.raises(ZeroDivisionError), track("e", "sft", folder=in_tmp / "e") as t:
        t.metrics({"x": 1.0})
        raise ZeroDivisionError
    _, runs = _runs(in_tmp)
    assert runs["e/sft"].info.status == "FAILED"
    with track("e", "eval", folder=in_tmp / "e") as t:
        t.client.log_batch = _refuse
        t.metrics({"x": 1.0})
        t.metrics({"x": 2.0})
    assert sum("does not take entries" in r.message for r in caplog.records) == 1


def _refuse(*args, **kwargs):
    raise ConnectionError("refused")


def test_disabled_tracker_takes_everything():
    with track("d", "sft", enabled=False) as t:
        t.metrics({"a": 1.0}, 3)
        t.params({"a": 1})
        t.figure("x", None)


def test_an_experiment_that_another_run_makes_meanwhile_is_joined(in_tmp, monkeypatch):
    from mlflow import MlflowClient

    from infra.tracking import _experiment

    client = MlflowClient(tracking_uri())
    made, real, asked = client.create_experiment("flashdraft"), client.get_experiment_by_name, []

    def too_early(name):
        asked.append(name)
        return None if len(asked) == 1 else real(name)

    monkeypatch.setattr(client, "get_experiment_by_name", too_early)
    assert _experiment(client) == made
