"""`make bench PART=kernels`: the fused loss against torch's head matmul and cross-entropy in the same chunks, on a CPU.

Each measurement is a process of its own (memory is its peak resident set above the state before the first call), with
pinned threads; best of the repeats. Writes runs/bench/kernels.json. The GPU's counterpart is `kernels.bench_gpu`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

SHAPES = {
    # blocks, K, D, V, rows of a chunk
    "V 8192": (64, 16, 256, 8192, 256),
    "V 49152": (64, 16, 576, 49152, 256),
}
TINY = {"V 512": (8, 16, 32, 512, 32)}


def measure(kind: str, shape: tuple[int, ...], repeats: int) -> None:
    """One process's work: prints seconds and bytes as JSON."""
    import torch
    import torch.nn.functional as F

    from kernels.decay_ce import weighted_cross_entropy
    from kernels.weighting import decay

    A, K, D, V, chunk_rows = shape
    g = torch.Generator().manual_seed(0)
    hidden_AKD = torch.randn(A, K, D, generator=g).requires_grad_()
    head_VD = torch.randn(V, D, generator=g) * D**-0.5
    labels_AK = torch.randint(0, V, (A, K), generator=g)
    mask_AK = torch.ones(A, K, dtype=torch.bool)
    mask_AK[:, 0] = False
    weighting = decay(7.0)

    def fused():
        return weighted_cross_entropy(
            hidden_AKD, head_VD, labels_AK, mask_AK, weighting, chunk_rows=chunk_rows
        ).numerator

    def torch_chunks():
        weight_R = weighting(mask_AK.float(), mask_AK)[mask_AK]
        hidden_RD, labels_R = hidden_AKD[mask_AK], labels_AK[mask_AK]
        total = torch.zeros(())
        for x, y, w in zip(*(t.split(chunk_rows) for t in (hidden_RD, labels_R, weight_R)), strict=True):
            total = total + (w * F.cross_entropy(x @ head_VD.T, y, reduction="none")).sum()
        return total

    run = fused if kind == "fused" else torch_chunks
    Path("/proc/self/clear_refs").write_text("5")  # the peak of making the tensors above is not this run's
    before = resident("VmRSS")
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        loss = run()
        loss.backward()
        seconds.append(time.perf_counter() - began)
        grad, hidden_AKD.grad = hidden_AKD.grad, None
    print(
        json.dumps(
            {
                "seconds": min(seconds),
                "bytes": resident("VmHWM") - before,
                "loss": loss.item(),
                "grad": grad.norm().item(),
            }
        )
    )


def resident(key: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at the peak since `clear_refs`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def compare(name: str, shape: tuple[int, ...], repeats: int, threads: int) -> list[dict]:
    env = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))}
    results = {}
    for kind in ("fused", "torch"):
        command = [sys.executable, "-m", "kernels.bench", "--measure", kind, json.dumps(shape), str(repeats)]
        results[kind] = json.loads(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
    ours, theirs = results["fused"], results["torch"]
    assert abs(ours["loss"] / theirs["loss"] - 1) < 1e-4, (ours, theirs)
    assert abs(ours["grad"] / theirs["grad"] - 1) < 1e-4, (ours, theirs)
    what = f"weighted cross-entropy, {name}, forward + backward"
    opponent = "torch matmul + cross_entropy, same chunks"
    return [
        {
            "what": f"{what}{suffix}",
            "unit": unit,
            "ours": ours[key],
            "opponent": theirs[key],
            "opponent_name": opponent,
            "ratio": theirs[key] / max(ours[key], 1e-12),
        }
        for key, unit, suffix in (("seconds", "s", ""), ("bytes", "B", ", peak memory"))
    ]


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tiny", action="store_true", help="a smoke test of seconds; its figures mean nothing")
    p.add_argument("--threads", type=int, default=1, help="CPU threads of every process")
    p.add_argument("--repeats", type=int, default=7)
    p.add_argument("--out", default="runs/bench/kernels.json")
    p.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.measure:
        measure(args.measure[0], json.loads(args.measure[1]), int(args.measure[2]))
        return 0
    rows = []
    for name, shape in (TINY if args.tiny else SHAPES).items():
        rows += compare(name, shape, 2 if args.tiny else args.repeats, args.threads)
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
