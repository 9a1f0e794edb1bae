"""`runs/<name>/`: the resolved configuration, the steps' record, checkpoints and the drafter.

config.toml  provenance.json  deepspeed.json  metrics.jsonl  checkpoints/  drafter-init/  drafter/  mlflow.json
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from infra.config import read_toml, save_toml, to_toml
from infra.errors import ConfigError
from infra.provenance import provenance, write_json
from trainer.config import HARMLESS, SftConfig, changed_settings

RUNS = Path("runs")


class RunFolder:
    """One run on disk. Only rank 0 writes.

    Raises:
        ConfigError: the folder holds a run with other settings than `cfg`, and `allow_changed` does not name them.
    """

    def __init__(self, cfg: SftConfig, allow_changed: Collection[str] = ()):
        self.path = RUNS / cfg.run_name
        self.config_path = self.path / "config.toml"
        self.metrics_path = self.path / "metrics.jsonl"
        if self.config_path.is_file():
            self._compare(cfg, allow_changed)

    def _compare(self, cfg: SftConfig, allow_changed: Collection[str]) -> None:
        import tomllib

        changed = changed_settings(read_toml(self.config_path), tomllib.loads(to_toml(cfg)))
        semantic = {k: v for k, v in changed.items() if k not in (*HARMLESS, *allow_changed)}
        if semantic:
            listed = ", ".join(f"{k} was {old!r} and is now {new!r}" for k, (old, new) in semantic.items())
            raise ConfigError(
                f"run {str(self.path)!r} exists with other settings ({listed}); take another name (name=...), delete "
                f"the folder, or resume all the same with --allow-changed {','.join(semantic)}"
            )

    def check_store(self, fingerprint: str, allow_changed: Collection[str]) -> None:
        """The features are those that the run began with, wherever the store lies now.

        Raises:
            ConfigError: they are not, and `allow_changed` does not name data.store.
        """
        record = self.path / "provenance.json"
        if not record.is_file() or "data.store" in allow_changed:
            return
        before = json.loads(record.read_text()).get("store_fingerprint")
        if before != fingerprint:
            raise ConfigError(
                f"run {str(self.path)!r} began with the features {str(before)[:12]}, and the store now has "
                f"{fingerprint[:12]}; take another name (name=...), delete the folder, set data.store to the first "
                "store, or go on all the same with --allow-changed data.store"
            )

    def begin(self, cfg: SftConfig, deepspeed: dict[str, Any], **extra: Any) -> None:
        """Record what this run is."""
        self.path.mkdir(parents=True, exist_ok=True)
        save_toml(cfg, self.config_path)
        write_json(self.path / "deepspeed.json", deepspeed)
        write_json(self.path / "provenance.json", provenance(**extra))

    def truncate_metrics(self, step: int) -> None:
        """Forget the records of steps >= `step`: a resumed run writes them again."""
        if self.metrics_path.is_file():
            lines = [x for x in self.metrics_path.read_text().splitlines() if x and json.loads(x)["step"] < step]
            self.metrics_path.write_text("".join(f"{x}\n" for x in lines))

    def append(self, record: dict[str, Any]) -> None:
        with open(self.metrics_path, "a") as f:
            f.write(json.dumps(record) + "\n")
