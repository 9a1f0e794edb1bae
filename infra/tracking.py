"""MLflow: one parent run per drafter, one child per stage (features, sft, rl, eval), all in one experiment.

    with track("demo", "sft", params=..., folder=run.folder) as t:
        t.metrics({"loss": 3.2}, step=10)
        t.figure("curves.png", fig)

The run ids are kept in `<folder>/mlflow.json`, so a resumed stage goes on in the same run. Metrics are sent in batches
from a thread: 50 single calls over HTTP take 9 s, a batch takes as long as one.
"""

import contextlib
import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from infra.provenance import write_json

DEFAULT_URI = "sqlite:///mlflow.db"
EXPERIMENT = "flashdraft"
VIEW = "drafters"
"""the shared view of the runs table: τ of every suite as columns, the best drafter first"""
VIEW_TAG = f"mlflow.sharedViewState.{VIEW}"


def tracking_uri() -> str:
    """`$MLFLOW_TRACKING_URI`, else the SQLite file of the current folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI


class Tracker:
    """One MLflow run. Every method returns at once; `close` waits until all is written.

    A tracking server that fails must not end a training of days: errors are reported once as a warning and the
    figures stay in the run folder's own files.
    """

    def __init__(self, client: Any, run_id: str, parent_id: str | None, flush_s: float = 2.0):
        self.client, self.run_id, self.parent_id, self.flush_s = client, run_id, parent_id, flush_s
        self._queue: queue.Queue[Any] = queue.Queue()
        self._warned = False
        self._machine: Any = None
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def metrics(self, values: Mapping[str, float], step: int = 0, *, on_parent: bool = False) -> None:
        """Numbers at a step; `on_parent` puts them on the drafter's run, where the UI compares drafters."""
        run_id = self.parent_id if on_parent and self.parent_id else self.run_id
        now = int(time.time() * 1000)
        self._queue.put([(run_id, key, float(value), now, step) for key, value in values.items()])

    def params(self, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            self._later(self.client.log_param, self.run_id, key, str(value)[:6000])

    def tags(self, values: Mapping[str, Any], *, on_parent: bool = False) -> None:
        for key, value in values.items():
            self._later(
                self.client.set_tag, self.parent_id if on_parent and self.parent_id else self.run_id, key, str(value)
            )

    def artifact(self, path: str | Path, folder: str | None = None) -> None:
        self._later(self.client.log_artifact, self.run_id, str(path), folder)

    def text(self, name: str, content: str) -> None:
        self._later(self.client.log_text, self.run_id, content, name)

    def table(self, name: str, columns: Mapping[str, list[Any]]) -> None:
        self._later(self.client.log_table, self.run_id, dict(columns), name)

    def figure(self, name: str, figure: Any) -> None:
        """A matplotlib figure as `figures/<name>`."""
        self._later(self.client.log_figure, self.run_id, figure, f"figures/{name}")

    def dataset(
        self, name: str, digest: str, source: str, profile: Mapping[str, Any], context: str = "training"
    ) -> None:
        """The store as data set input: the lineage from drafter to features goes by its fingerprint."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        entry = Dataset(
            name=name,
            digest=digest[:36],
            source_type="flashdraft-store",
            source=json.dumps({"uri": source}),
            profile=json.dumps(dict(profile)),
        )
        inputs = [DatasetInput(entry, [InputTag("mlflow.data.context", context)])]
        self._later(self.client.log_inputs, self.run_id, inputs)

    def model(self, name: str, metrics: Mapping[str, float], step: int, **tags: Any) -> None:
        """A checkpoint as a logged model: the UI's Models tab and `search_logged_models` rank by its metrics.

        Its weights stay where they are; `tags` say where.
        """
        self._later(self._model, re.sub(r"[^\w-]", "_", name), dict(metrics), step, tags)

    def _model(self, name: str, metrics: dict[str, float], step: int, tags: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        experiment = self.client.get_run(self.run_id).info.experiment_id
        texts = {k: str(v) for k, v in tags.items()}
        found = self.client.create_logged_model(experiment, name, self.run_id, texts, {"step": str(step)}, "drafter")
        now = int(time.time() * 1000)
        entries = [Metric(k, float(v), now, step, model_id=found.model_id) for k, v in metrics.items()]
        self.client.log_batch(self.run_id, entries)
        self.client.finalize_logged_model(found.model_id, "READY")

    def columns(self, metrics: list[str], order_by: str) -> None:
        """Add columns to the runs table that `make ui` opens, best `order_by` first.

        The table's state is a tag of the experiment, where the pages keep the views that users share.
        """
        self._later(self._columns, metrics, order_by)

    def _columns(self, metrics: list[str], order_by: str) -> None:
        experiment = self.client.get_experiment(self.client.get_run(self.run_id).info.experiment_id)
        held = json.loads(experiment.tags.get(VIEW_TAG) or "{}").get("selectedColumns", [])
        view = {
            "searchFilter": "tags.stage = 'drafter'",
            "orderByKey": f"metrics.`{order_by}`",
            "orderByAsc": False,
            "selectedColumns": list(dict.fromkeys([*held, *(f"metrics.`{m}`" for m in metrics)])),
        }
        self.client.set_experiment_tag(experiment.experiment_id, VIEW_TAG, json.dumps(view))

    def watch_machine(self) -> None:
        """CPU, memory, disk, network and GPUs every ten seconds, as `system/...` of this run."""
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        with self._guard():
            self._machine = SystemMetricsMonitor(self.run_id, resume_logging=True, tracking_uri=tracking_uri())
            self._machine.start()

    def close(self, status: str = "FINISHED") -> None:
        if self._machine is not None:
            with self._guard():
                self._machine.finish()
        self._queue.put(None)
        self._thread.join(timeout=120)
        with self._guard():
            self.client.set_terminated(self.run_id, status)
            if self.parent_id:
                self.client.set_terminated(self.parent_id, status)

    def _later(self, call: Any, *args: Any) -> None:
        self._queue.put((call, args))

    def _work(self) -> None:
        from mlflow.entities import Metric

        done = False
        while not done:
            items = [self._queue.get()]
            time.sleep(0 if items[0] is None else min(self.flush_s, 0.05))
            with contextlib.suppress(queue.Empty):
                while True:
                    items.append(self._queue.get_nowait())
            done = None in items
            batches: dict[str, list[Metric]] = {}
            for item in items:
                if isinstance(item, list):
                    for run_id, key, value, now, step in item:
                        batches.setdefault(run_id, []).append(Metric(key, value, now, step))
                elif item is not None:
                    with self._guard():
                        item[0](*item[1])
            for run_id, metrics in batches.items():
                for i in range(0, len(metrics), 1000):  # MLflow's limit of one batch
                    with self._guard():
                        self.client.log_batch(run_id, metrics[i : i + 1000])

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as e:
            if not self._warned:
                logging.getLogger("flashdraft").warning("MLflow at %s does not take entries: %s", tracking_uri(), e)
                self._warned = True


_PUBLIC = frozenset(name for name in vars(Tracker) if not name.startswith("_"))


class NoTracker(Tracker):
    """Takes everything and does nothing: ranks other than 0, and runs with tracking off."""

    def __init__(self) -> None:
        self.run_id, self.parent_id, self.client = "", None, None

    def __getattribute__(self, name: str) -> Any:
        if name in _PUBLIC:
            return lambda *args, **kwargs: None
        return super().__getattribute__(name)


@contextlib.contextmanager
def track(
    run_name: str,
    stage: str,
    *,
    folder: str | Path | None = None,
    config_toml: str = "",
    tags: Mapping[str, Any] | None = None,
    resume: bool = False,
    enabled: bool = True,
) -> Iterator[Tracker]:
    """The run of one stage of the drafter `run_name`, below the drafter's parent run.

    Args:
        folder: where `mlflow.json` with the run ids is; None gives a run without parent (features for nobody yet).
        resume: go on in the stage's earlier run, if there is one.
        enabled: False gives a tracker that does nothing.
    """
    if not enabled:
        yield NoTracker()
        return
    tracker = _open(run_name, stage, Path(folder) if folder else None, dict(tags or {}), resume)
    if config_toml:
        tracker.text("config.toml", config_toml)
    try:
        yield tracker
    except BaseException:
        tracker.close("FAILED")
        raise
    tracker.close()


def _open(run_name: str, stage: str, folder: Path | None, tags: dict[str, Any], resume: bool) -> Tracker:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "true")
    from mlflow import MlflowClient

    for name in ("mlflow", "mlflow.store.db.utils", "alembic"):  # set after the import, which sets its own levels
        logging.getLogger(name).setLevel(logging.WARNING)
    client = MlflowClient(tracking_uri())
    experiment = _experiment(client)
    known: dict[str, str] = {}
    if folder is not None and (folder / "mlflow.json").is_file():
        record = json.loads((folder / "mlflow.json").read_text())
        if record.get("uri") == tracking_uri():  # ids of another server mean nothing here
            known = {k: v for k, v in record["runs"].items() if _exists(client, v)}
    if folder is None:
        return Tracker(
            client, client.create_run(experiment, tags={"stage": stage, **tags}, run_name=run_name).info.run_id, None
        )
    if "parent" not in known:
        drafter = {"drafter": run_name, "stage": "drafter"}
        known["parent"] = client.create_run(experiment, tags=drafter, run_name=run_name).info.run_id
    if resume and stage in known:
        client.update_run(known[stage], status="RUNNING")
    else:
        child = {"mlflow.parentRunId": known["parent"], "stage": stage, "drafter": run_name}
        known[stage] = client.create_run(experiment, tags=child | tags, run_name=f"{run_name}/{stage}").info.run_id
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "mlflow.json", {"uri": tracking_uri(), "experiment": experiment, "runs": known})
    return Tracker(client, known[stage], known["parent"])


def _experiment(client: Any) -> str:
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
    if (found := client.get_experiment_by_name(name)) is not None:
        return found.experiment_id
    from mlflow.exceptions import MlflowException

    try:
        return client.create_experiment(name)
    except MlflowException:  # another run began at the same moment and has made it
        if (found := client.get_experiment_by_name(name)) is None:
            raise
        return found.experiment_id


def view_path(client: Any) -> str | None:
    """Where the runs table with `VIEW` is on the server's pages; None before the first evaluation."""
    found = client.get_experiment_by_name(os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT)
    if found is None or VIEW_TAG not in found.tags:
        return None
    return f"#/experiments/{found.experiment_id}/runs?viewStateShareKey={VIEW}"


def _exists(client: Any, run_id: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(run_id).info.lifecycle_stage == "active"
    except MlflowException:
        return False
