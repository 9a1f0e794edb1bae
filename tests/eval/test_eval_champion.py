"""Aliases move only to a drafter that wins and leaves the text alone."""

import json

import pytest
from mlflow import MlflowClient

from eval.champion import register


def report_of(tau, weights, changed=0):
    prompts = [{"id": str(i), "tokens": int(tau * 100) + i % 7, "cycles": 100} for i in range(20)]
    suite = {"prompts": prompts, "speedup": 1.0, "settings": {}, "lossless": {"checked": 9, "identical": 9 - changed}}
    return {"target": {"name": "tiny"}, "drafter": {"weights_sha256": weights}, "suites": {"a": suite}}


@pytest.mark.slow
def test_aliases(tmp_path):
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.create_experiment("e", artifact_location=str(tmp_path / "artifacts"))

    def evaluated(report):
        run = client.create_run(experiment).info.run_id
        client.log_text(run, json.dumps(report), "report.json")
        return register(client, report, run, run)

    def holders():
        return [int(client.get_model_version_by_alias("drafter-tiny", a).version) for a in ("candidate", "champion")]

    assert "as the first, champion" in evaluated(report_of(2.0, "w1")) and holders() == [1, 1]
    assert "stays champion" in evaluated(report_of(1.8, "w2")) and holders() == [2, 1]
    assert "stays champion. No clear winner" in evaluated(report_of(2.0, "w3")) and holders() == [3, 1]
    assert "changed the text" in evaluated(report_of(3.0, "w4", changed=1)) and holders() == [4, 1]
    assert "is the new champion" in evaluated(report_of(2.5, "w5")) and holders() == [5, 5]
    assert "is the champion" in evaluated(report_of(2.5, "w5")) and holders() == [5, 5]
    assert "stays champion" in evaluated(report_of(2.0, "w1")) and holders() == [1, 5]
