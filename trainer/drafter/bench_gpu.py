"""`make bench-gpu`: the kernels' tests and the speed of one training step on a GPU, in under ten minutes, one JSON.

Legend: S context rows, L taps, D hidden size, A blocks, K block size, V vocabulary, H/G query/key heads, E head dim.

Needs torch, triton and transformers only, and no network: the drafter is built from plain numbers (those of Qwen3-8B's)
with random weights. Liger-Kernel joins where importable. `--device cpu --tiny` is its smoke test.
"""

import argparse
import json
import os
import platform
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from kernels.decay_ce import Teacher, weighted_cross_entropy
from kernels.weighting import decay, dpace
from trainer.drafter.attention import ContextRanges, anchored_attention
from trainer.drafter.model import Drafter

# bf16 without sparsity, TFLOP/s, from the vendor's data sheets
PEAK_TFLOPS = {"H200": 989, "H100": 989, "B200": 2250, "A100": 312}

QWEN3_8B = {"D": 4096, "I": 12288, "layers": 5, "H": 32, "G": 8, "E": 128, "V": 151936, "L": 5, "K": 16}
TINY = {"D": 32, "I": 64, "layers": 2, "H": 4, "G": 2, "E": 16, "V": 503, "L": 2, "K": 4}


def drafter_config(n: dict) -> SimpleNamespace:
    """What `Drafter` reads of a `DrafterConfig`, which needs pydantic."""
    fields = {
        "vocab_size": n["V"],
        "hidden_size": n["D"],
        "intermediate_size": n["I"],
        "num_hidden_layers": n["layers"],
        "num_attention_heads": n["H"],
        "num_key_value_heads": n["G"],
        "head_dim": n["E"],
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "sliding_window": None,
    }
    rope = {"rope_theta": 1e6, "rope_scaling": None, "max_position_embeddings": 40960, "hidden_act": "silu"}
    return SimpleNamespace(
        **fields,
        block_size=n["K"],
        mask_token_id=n["V"] - 1,
        num_taps=n["L"],
        conditioning="kv_injection",
        drafting="block",
        needs_context_embeds=False,
        layer_causal=lambda _: False,
        layer_window=lambda _: None,
        transformer_json=lambda: {**fields, **rope, "layer_types": ["full_attention"] * n["layers"]},
    )


def step_flops(n: dict, S: int, A: int) -> dict[str, float]:
    """Floating-point operations of forward and backward, by part (multiply-add = 2; attention over half of S)."""
    D, E, rows = n["D"], n["E"], A * n["K"]
    projections = D * E * (2 * n["H"] + 2 * n["G"])
    layer = projections + 3 * D * n["I"]
    return {
        "blocks": 6 * rows * layer * n["layers"],
        "context": 6 * S * 2 * D * E * n["G"] * n["layers"] + 4 * S * n["L"] * D * D,
        "attention": 3.5 * 4 * rows * (S / 2 + n["K"]) * n["H"] * E * n["layers"],
        "head": 4 * A * (n["K"] - 1) * n["V"] * D,
    }


def make_row(n: dict, S: int, A: int, device: str, dtype: torch.dtype) -> SimpleNamespace:
    g = torch.Generator().manual_seed(0)
    anchors = torch.randperm(S - n["K"], generator=g)[:A].sort().values
    ids = torch.randint(0, n["V"] - 1, (S,), generator=g)
    labels = ids[anchors[:, None] + torch.arange(n["K"])]
    mask = torch.ones_like(labels, dtype=torch.bool)
    mask[:, 0] = False
    return SimpleNamespace(
        hidden_SLD=torch.randn(S, n["L"], n["D"], generator=g).to(device, dtype),
        positions_S=torch.arange(S, device=device),
        labels_AK=labels.to(device),
        mask_AK=mask.to(device),
        anchors_A=anchors.to(device),
        embedding_VD=(torch.randn(n["V"], n["D"], generator=g) * 0.02).to(device, dtype),
        head_VD=(torch.randn(n["V"], n["D"], generator=g) * n["D"] ** -0.5).to(device, dtype),
    )


class Clock:
    """Median milliseconds of a call, and the peak memory above what was allocated before it."""

    def __init__(self, device: str, repeats: int):
        self.cuda, self.repeats = device.startswith("cuda"), repeats

    def __call__(self, run) -> dict[str, float]:
        run()  # compiles
        seconds = []
        if self.cuda:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        for _ in range(self.repeats):
            began = time.perf_counter()
            run()
            if self.cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated() - before if self.cuda else 0
        return {"ms": 1e3 * sorted(seconds)[len(seconds) // 2], "peak_gb": peak / 1e9}


def attention_tensors(n, S, A, device, dtype):
    g = torch.Generator().manual_seed(1)
    shapes = [(A, n["K"], n["H"], n["E"]), (S, n["G"], n["E"]), (S, n["G"], n["E"])]
    shapes += [(A, n["K"], n["G"], n["E"])] * 2
    return [torch.randn(s, generator=g).to(device, dtype).requires_grad_() for s in shapes]


def check_attention(n: dict, device: str) -> dict[str, float]:
    """Largest difference to the dense definition in fp32, relative to its largest value; outputs and all gradients."""
    starts = [0] * 6 + [150] * 5 + [280]
    ends = [0, 1, 40, 41, 90, 149, 150, 151, 200, 260, 279, 299]
    valid = torch.ones(len(ends), dtype=torch.bool)
    valid[3] = False
    ranges = ContextRanges(*(torch.tensor(t).to(device) for t in (starts, ends)), valid.to(device))
    executions = ("triton", "flex") if device.startswith("cuda") else ("cpu",)
    out = {}
    for dtype in (torch.float32, torch.bfloat16):
        tensors = attention_tensors(n, 300, len(ends), device, dtype)
        for causal, window in ((False, None), (True, 70)):
            results = {}
            for execution in ("dense", *executions):
                inputs = [t.detach().float().requires_grad_() if execution == "dense" else t for t in tensors]
                y = anchored_attention(*inputs, ranges, causal=causal, window=window, execution=execution)
                weight = torch.linspace(-1, 1, y.numel(), device=device).view_as(y)
                results[execution] = (y, *torch.autograd.grad((y.float() * weight).sum(), inputs))
            for execution in executions:
                worst = max(
                    ((a.float() - b).abs().max() / b.abs().max()).item()
                    for a, b in zip(results[execution], results["dense"], strict=True)
                )
                out[f"attention {execution} {str(dtype)[6:]} causal={causal} window={window}"] = worst
    return out


def check_loss(device: str) -> dict[str, float]:
    """The same for the loss op: Triton on CUDA, against the torch definition in fp32."""
    g = torch.Generator().manual_seed(2)
    A, K, D, V = 40, 8, 64, 10007
    labels = torch.randint(0, V, (A, K), generator=g).to(device)
    mask = (torch.rand(A, K, generator=g) < 0.8).to(device)
    mask[:, 0] = False
    p, ids = torch.randn(A, K, V, generator=g).log_softmax(-1).topk(16)
    out = {}
    for dtype in (torch.float32, torch.bfloat16):
        hidden = torch.randn(A, K, D, generator=g).to(device, dtype).requires_grad_()
        head = torch.randn(V, D, generator=g).to(device, dtype)
        for share in (None, 0.5):
            teacher = None if share is None else Teacher(ids.to(device), p.to(device), share)
            results = []
            for x, w, triton in ((hidden, head, None), (hidden.detach().float().requires_grad_(), head.float(), False)):
                loss = weighted_cross_entropy(
                    x, w, labels, mask, dpace(0.5), teacher=teacher, chunk_rows=100, triton=triton
                )
                results.append((loss.numerator.detach(), torch.autograd.grad(loss.numerator, x)[0]))
            worst = max(((a.float() - b).abs().max() / b.abs().max()).item() for a, b in zip(*results, strict=True))
            out[f"loss {str(dtype)[6:]} teacher={share}"] = worst
    return out


def bench_attention(n, S, A, device, dtype, clock):
    tensors = attention_tensors(n, S, A, device, dtype)
    end = torch.randperm(S, generator=torch.Generator().manual_seed(3))[:A].sort().values.to(device)
    ranges = ContextRanges(torch.zeros_like(end), end)
    out = {}
    for execution in ("triton", "flex") if device.startswith("cuda") else ("cpu", "dense"):
        out[f"{execution} forward"] = clock(lambda e=execution: anchored_attention(*tensors, ranges, execution=e))

        def both(e=execution):
            y = anchored_attention(*tensors, ranges, execution=e)
            torch.autograd.grad(y, tensors, y)

        out[f"{execution} forward + backward"] = clock(both)
    return out


def bench_loss(n, A, device, dtype, clock):
    row = make_row(n, 4 * A + n["K"], A, device, dtype)
    hidden = torch.randn(A, n["K"], n["D"], device=device, dtype=dtype).requires_grad_()

    def fused():
        weighted_cross_entropy(hidden, row.head_VD, row.labels_AK, row.mask_AK, decay(7.0)).numerator.backward()

    def plain():  # everything at once, as a trainer without a fused op does it
        logits = hidden[row.mask_AK] @ row.head_VD.T
        F.cross_entropy(logits.float(), row.labels_AK[row.mask_AK]).backward()

    out = {"ours": clock(fused), "torch matmul + cross_entropy": clock(plain)}
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger
    except ImportError:
        out["liger fused linear cross-entropy"] = "not installed"
    else:

        def liger():
            x = hidden[row.mask_AK]
            Liger.apply(x, row.head_VD, row.labels_AK[row.mask_AK])[0].backward()

        out["liger fused linear cross-entropy"] = clock(liger)
    return out


def bench_step(n, S, A, device, dtype, clock, execution, whole_logits=False):
    """bf16 weights with AdamW on them: what the GPU does per step, without the fp32 masters of a real run.

    `whole_logits` with `execution` flex (a CPU: dense) is the way of speculators 0.9 and SpecForge 0.2, whose packages
    a machine without network does not have: a mask over all blocks, logits of all slots at once, then the weights.
    """
    torch.manual_seed(0)
    with torch.device(device):
        drafter = Drafter(drafter_config(n)).to(dtype)
    drafter.execution = execution
    row = make_row(n, S, A, device, dtype)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-5, fused=True)
    zero = torch.zeros_like(row.anchors_A)

    def step():
        inputs = drafter.block_inputs(row.labels_AK, row.embedding_VD)
        out = drafter(row.hidden_SLD, row.positions_S, inputs, zero, row.anchors_A, row.anchors_A)
        if whole_logits:
            logits_AKV = out @ row.head_VD.T
            losses = F.cross_entropy(logits_AKV.flatten(0, 1).float(), row.labels_AK.flatten(), reduction="none")
            weights_AK = decay(7.0)(torch.ones_like(losses.view_as(row.labels_AK)), row.mask_AK)
            ((losses.view_as(weights_AK) * weights_AK).sum() / weights_AK.sum()).backward()
        else:
            loss = weighted_cross_entropy(out, row.head_VD, row.labels_AK, row.mask_AK, decay(7.0))
            (loss.numerator / loss.denominator).backward()
        optimizer.step()
        optimizer.zero_grad()

    result = clock(step)
    flops = step_flops(n, S, A)
    result["tflop"] = sum(flops.values()) / 1e12
    result["parameters"] = sum(p.numel() for p in drafter.parameters())
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"
    peak = next((v for k, v in PEAK_TFLOPS.items() if k in name), None)
    result["mfu"] = None if peak is None else result["tflop"] / (result["ms"] / 1e3) / peak
    return result


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--device", default="cuda")
    p.add_argument("--tiny", action="store_true", help="seconds instead of minutes; its figures mean nothing")
    p.add_argument("--repeats", type=int, default=10)
    p.add_argument("--out", default=os.path.join(os.environ.get("OUT", "runs/bench"), "gpu.json"))
    args = p.parse_args(argv)
    n = TINY if args.tiny else QWEN3_8B
    S, A = (96, 8) if args.tiny else (3072, 512)
    dtype = torch.float32 if args.tiny else torch.bfloat16
    clock = Clock(args.device, 2 if args.tiny else args.repeats)
    report: dict = {
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or "cpu",
        "torch": torch.__version__,
        "shapes": {**n, "S": S, "A": A},
        "flops": step_flops(n, S, A),
    }
    parts = {
        "check attention": lambda: check_attention({**n, "H": 8, "G": 2}, args.device),
        "check loss": lambda: check_loss(args.device),
        "attention": lambda: bench_attention(n, S, A, args.device, dtype, clock),
        "loss": lambda: bench_loss(n, A, args.device, dtype, clock),
        "step": lambda: bench_step(n, S, A, args.device, dtype, clock, "auto"),
    }
    masked = "dense"
    if args.device.startswith("cuda"):
        masked = "flex"
        parts["step flex"] = lambda: bench_step(n, S, A, args.device, dtype, clock, "flex")
    parts["step as the peers do it"] = lambda: bench_step(n, S, A, args.device, dtype, clock, masked, whole_logits=True)
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    failed = False
    for name, run in parts.items():
        began = time.perf_counter()
        try:
            report[name] = run()
        except Exception:  # one part's failure must not cost the others their GPU time
            report[name] = {"error": traceback.format_exc()[-2000:]}
            failed = True
        print(f"{name} ({time.perf_counter() - began:.0f} s): {json.dumps(report[name])[:500]}", flush=True)
        out.write_text(json.dumps(report, indent=2) + "\n")
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()
    for name in ("check attention", "check loss"):
        for what, worst in report[name].items():
            limit = 3e-2 if "bfloat16" in what else 1e-4
            if not isinstance(worst, float) or worst > limit:
                failed = True
                print(f"FAILED {what}: {worst} (at most {limit})")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
