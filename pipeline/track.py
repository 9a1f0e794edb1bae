"""The features stage in MLflow: what went into the store, how fast, and how long documents and answers are."""

from pathlib import Path

import pyarrow.parquet as pq

from features.writer import StoreWriter
from infra.config import to_toml
from infra.tracking import Tracker, track
from pipeline.config import FeaturesConfig
from pipeline.run import FeaturesResult


def log_features(cfg: FeaturesConfig, result: FeaturesResult, run: str = "") -> None:
    """Log a finished `build_features`.

    Args:
        run: name of the drafter's run that the features are for (the stage becomes its child); empty: a run of its own.
    """
    if not run and not result.counts["computed_shards"]:
        return  # nothing new, and nobody to belong to
    name = run or f"{cfg.target.name}-features"
    tags = {"target": cfg.target.name, "store": result.fingerprint[:12], "store_path": result.store_path}
    folder = f"runs/{run}" if run else None
    resume = result.counts["computed_shards"] == 0
    with track(name, "features", folder=folder, config_toml=to_toml(cfg), tags=tags, resume=resume) as tracker:
        numbers = {f"features/{k}": v for k, v in result.counts.items() if isinstance(v, int | float)}
        numbers |= {f"answers/{k}": v for k, v in result.answers.items() if isinstance(v, int | float)}
        numbers |= {"features/bytes": result.bytes, "features/seconds": result.seconds}
        if result.throughput:
            numbers["features/prefill_tokens_per_s"] = result.throughput
        tracker.metrics(numbers)
        profile = {k: result.counts[k] for k in ("stored_documents", "stored_tokens", "shards")}
        tracker.dataset(cfg.target.name, result.fingerprint, result.store_path, profile, context="features")
        if result.complete and Path(result.work_folder).is_dir():  # a cluster's work folder may be out of reach
            _figures(tracker, result)


def _figures(tracker: Tracker, result: FeaturesResult) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plan = StoreWriter(result.store_path).plan
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.hist(plan["length"].to_numpy(), bins=40)
    left.set(title="tokens per document", xlabel="tokens", ylabel="documents")
    documents = pq.read_table(f"{result.work_folder}/documents.parquet", columns=["loss_mask"])
    share = [float(mask.values.to_numpy().mean()) for mask in documents["loss_mask"]]
    right.hist(share, bins=40, range=(0, 1))
    right.set(title="share of the answer in a document", xlabel="supervised / all tokens")
    tracker.figure("documents.png", figure)
    plt.close(figure)
