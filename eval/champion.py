"""Which drafter of a target to serve: MLflow's registry aliases `candidate` and `champion`.

One registered model per target, `drafter-<target>`; every tracked evaluation of a run folder adds a version that points
at the drafter's MLflow run and its folder, and makes it the candidate. The champion changes hands only when the
candidate's report wins the paired comparison: 95 % interval of the difference above 0, text unchanged.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

from eval.compare import compare, verdict, winner
from infra.errors import DataError


def register(client: Any, report: dict[str, Any], run_id: str, eval_run_id: str) -> str:
    """Add a version for the evaluated drafter and move the aliases that it earns. Returns one sentence.

    Args:
        client: an `MlflowClient`.
        run_id: the drafter's (parent) run.
        eval_run_id: the evaluation's run, which has report.json as artifact.
    """
    from mlflow.exceptions import MlflowException

    name = f"drafter-{report['target']['name']}"
    with contextlib.suppress(MlflowException):  # it exists
        client.create_registered_model(name, description=f"Drafters for {report['target']['name']}")
    digest = report["drafter"]["weights_sha256"]
    version = next(
        (v for v in client.search_model_versions(f"name = '{name}'") if v.tags.get("weights") == digest), None
    )
    if version is None:
        source = f"{client.get_run(run_id).info.artifact_uri}/drafter"
        version = client.create_model_version(name, source, run_id, tags={"weights": digest})
    client.set_model_version_tag(name, version.version, "eval_run", eval_run_id)
    client.set_registered_model_alias(name, "candidate", version.version)
    if not unchanged(report):
        return f"{name} version {version.version} is the candidate; it changed the text and cannot be champion."
    champion = _champion(client, name)
    if champion is None:
        client.set_registered_model_alias(name, "champion", version.version)
        return f"{name} version {version.version} is candidate and, as the first, champion."
    if champion.version == version.version:
        return f"{name} version {version.version} is the champion."
    try:
        held = Path(client.download_artifacts(champion.tags["eval_run"], "report.json"))
        result = compare(json.loads(held.read_text()), report)
    except (OSError, ValueError, DataError, MlflowException) as e:
        return (
            f"{name} version {version.version} is the candidate; it could not be compared with the champion, version "
            f"{champion.version} ({e})."
        )
    if winner(result) == "b":
        client.set_registered_model_alias(name, "champion", version.version)
        return (
            f"{name} version {version.version} is the new champion (A: version {champion.version}). {verdict(result)}"
        )
    return (
        f"{name} version {version.version} is the candidate; version {champion.version} (A) stays champion. "
        f"{verdict(result)}"
    )


def unchanged(report: dict[str, Any]) -> bool:
    """Every suite's text was compared and is the same."""
    return all(s["lossless"]["checked"] == s["lossless"]["identical"] for s in report["suites"].values())


def _champion(client: Any, name: str) -> Any:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version_by_alias(name, "champion")
    except MlflowException:
        return None
