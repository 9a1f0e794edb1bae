"""What a finished run says, in a few lines for people."""

from features.estimate import show_bytes
from infra.progress import duration
from pipeline.run import FeaturesResult


def text(result: FeaturesResult) -> str:
    c, a = result.counts, result.answers
    share = c["supervised_tokens"] / max(c["tokens"], 1)
    splits = f"{c['splits']['train']:,} train, {c['splits']['heldout']:,} held out"
    left_out = c["rejects"] + c["store_rejects"]
    rate = f"{result.throughput:,.0f} tokens/s prefill" if result.throughput else "nothing to compute"
    lines = [
        f"store        {result.store_path}" + ("" if result.complete else "  (not complete)"),
        f"documents    {c['stored_documents']:,} ({splits}) · {c['stored_tokens']:,} tokens, {share:.0%} by the "
        f"target · {show_bytes(result.bytes)}",
        f"left out     {left_out:,}" + (f" · reasons in {result.work_folder}/rejects.parquet" if left_out else ""),
        f"this run     {c['computed_shards']} of {c['shards']} shards · {rate} · {duration(result.seconds)}",
    ]
    if a:
        cut, loops = f"{a['truncated_share']:.0%} cut off at the limit", f"{a['repetitive_share']:.0%} repetitive"
        lines.insert(2, f"answers      {a['answers']:,} · {cut} · {loops}")
    return "\n".join(lines)
