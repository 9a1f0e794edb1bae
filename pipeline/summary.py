"""What a finished run says: a few lines for people, and MLflow."""

from features.estimate import show_bytes
from infra.progress import duration
from pipeline.run import FeaturesResult


def text(result: FeaturesResult) -> str:
    c, a = result.counts, result.answers
    lines = [
        f"store        {result.store_path}" + ("" if result.complete else "  (not complete)"),
        f"documents    {c['stored_documents']:,} ({c['splits']['train']:,} train, {c['splits']['heldout']:,} held out) · {c['stored_tokens']:,} tokens · {c['supervised_tokens'] / max(c['tokens'], 1):.0%} by the target · {show_bytes(result.bytes)}",
        f"left out     {c['rejects'] + c['store_rejects']:,}" + (f" · reasons in {result.work_folder}/rejects.parquet" if c["rejects"] else ""),
    ]
    if a:
        lines.append(f"answers      {a['answers']:,} · {a['truncated_share']:.0%} cut off at the limit · {a['repetitive_share']:.0%} repetitive")
    rate = f"{result.throughput:,.0f} tokens/s prefill" if result.throughput else "nothing to compute"
    lines.append(f"this run     {c['computed_shards']} of {c['shards']} shards · {rate} · {duration(result.seconds)}")
    return "\n".join(lines)
