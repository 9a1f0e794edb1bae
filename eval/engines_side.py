"""What runs inside vLLM's environment: `engines_side.py IN.json OUT.json`. Imports nothing of ours.

IN: target and drafter folders, draft_tokens, dtype, suites {name: [token ids]}, max_new_tokens, temperature, seed,
stop_ids, concurrency. OUT: version, suites {name: answers, tokens, seconds, and what vLLM's metrics counted}.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # counters of a second process would come too late
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_per_position",
}


def mend_grouped_norm() -> bool:
    """vLLM normalises the drafter's context keys of all layers in one call, with one row of weights per layer; its CPU
    kernel (0.32.0) takes the first row for all of them, which moves logits by about 1 and makes every fifth draft
    another one. Where the kernel errs, and nowhere else, the layers are normalised one by one instead.

    Returns:
        whether it errs.
    """
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, weights = torch.ones(2, 1, 1, 64, device=device), torch.tensor([[1.0], [2.0]], device=device).repeat(1, 64)
    out = torch.empty_like(x)
    ops.rms_norm(out, x, weights, 1e-6)
    if torch.allclose(out, weights[:, None, None], atol=1e-3):
        return False

    def one_by_one(self, all_k):
        normed = torch.empty_like(all_k)
        for layer, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(normed[layer], all_k[layer], weight, self._rms_norm_eps)
        return normed

    DFlashQwen3Model._normalize_context_k = one_by_one
    return True


def main(source: str, destination: str) -> None:
    import vllm

    job = json.loads(Path(source).read_text())
    longest = max(len(p) for prompts in job["suites"].values() for p in prompts)
    speculative = None
    if job["drafter"]:
        speculative = {"method": "dflash", "model": job["drafter"], "num_speculative_tokens": job["draft_tokens"]}
    mended = bool(speculative) and mend_grouped_norm()
    llm = vllm.LLM(
        model=job["target"],
        dtype=job["dtype"],
        speculative_config=speculative,
        disable_log_stats=False,
        # a draft never reaches past the model's length: the counters would differ from ours at the end of an answer
        max_model_len=longest + job["max_new_tokens"] + job["draft_tokens"] + 2,
        max_num_seqs=job["concurrency"],
        enable_prefix_caching=False,  # every prompt is computed, as in our loop
        enforce_eager=True,
        seed=job["seed"],
    )
    sampling = vllm.SamplingParams(
        temperature=job["temperature"],
        max_tokens=job["max_new_tokens"],
        stop_token_ids=job["stop_ids"],
        seed=job["seed"] if job["temperature"] > 0 else None,
        detokenize=False,
    )
    out = {}
    for name, prompts in job["suites"].items():
        before, began = counters(llm), time.monotonic()
        replies = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        seconds = time.monotonic() - began
        after = counters(llm)
        answers = [list(r.outputs[0].token_ids) for r in replies]
        out[name] = {
            "answers": answers,
            "tokens": sum(map(len, answers)),
            "seconds": seconds,
            **{key: minus(after[key], before.get(key)) for key in after},
        }
    version = vllm.__version__ + (" (its norm of the context's keys mended)" if mended else "")
    Path(destination).write_text(json.dumps({"version": version, "suites": out}))


def counters(llm) -> dict:
    out = {}
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            values = getattr(metric, "values", None)
            out[COUNTERS[metric.name]] = list(values) if values is not None else metric.value
    return out


def minus(after, before):
    if isinstance(after, list):
        return [int(a - b) for a, b in zip(after, before or [0] * len(after), strict=True)]
    return int(after - (before or 0))


if __name__ == "__main__":
    main(*sys.argv[1:])
