"""Compile the Triton kernels for GPUs that are not here, and read what the compiler used: `python -m kernels.aot`.

Needs no GPU. Prints one JSON line per kernel and architecture with registers, spilled bytes and shared memory; shapes
are those of Qwen3-8B's drafter (32 query heads on 8 key heads of 128, K = 16, vocabulary 151,936) in bf16.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import anchored_attention as attention
from kernels import decay_ce_triton as loss

ARCHITECTURES = (80, 90, 100)
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

_HEADS = {"K": 16, "H": 32, "G": 8, "E": 128, "MP": 64, "KP": 16, "EP": 128, "CAUSAL": False, "WINDOW": 0}


def _signature(kernel, pointers: dict[str, str], scalars: dict[str, str], constants: dict) -> dict[str, str]:
    types = {**pointers, **scalars, **dict.fromkeys(constants, "constexpr")}
    return {name: types[name] for name in kernel.arg_names}


def _attention_case(kernel, launch: dict, drop: tuple[str, ...] = ()):
    constants = {k: v for k, v in _HEADS.items() if k not in drop} | {"N": launch["N"]}
    wide = ("lse_ptr", "delta_ptr")
    indices = ("start_ptr", "end_ptr", "order_ptr", "first_ptr", "last_ptr")
    pointers = {
        n: "*fp32" if n in wide else "*i64" if n in indices else "*bf16" for n in kernel.arg_names if n.endswith("_ptr")
    }
    options = {"num_warps": launch["num_warps"], "num_stages": launch["num_stages"]}
    return kernel, _signature(kernel, pointers, {"S": "i32", "scale": "fp32"}, constants), constants, options


def _loss_case(kernel):
    constants = {"TILE": loss.TILE}
    indices = ("argmax_ptr", "label_ptr")
    pointers = {
        n: "*bf16" if n == "logits_ptr" else "*i64" if n in indices else "*fp32"
        for n in kernel.arg_names
        if n.endswith("_ptr")
    }
    signature = _signature(kernel, pointers, {"stride": "i64", "V": "i32"}, constants)
    return kernel, signature, constants, {"num_warps": loss.WARPS}


def cases() -> dict[str, tuple]:
    return {
        "decay_ce statistics": _loss_case(loss._statistics_kernel),
        "decay_ce gradient": _loss_case(loss._gradient_kernel),
        "attention forward": _attention_case(attention._forward_kernel, attention.FORWARD),
        "attention backward, block": _attention_case(attention._backward_block_kernel, attention.BACKWARD_BLOCK),
        "attention backward, rows": _attention_case(
            attention._backward_rows_kernel, attention.BACKWARD_ROWS, drop=("KP", "CAUSAL")
        ),
    }


def compile_case(name: str, architecture: int) -> dict:
    """Compile one kernel for sm_<architecture>; registers and spilled bytes per thread as cuobjdump reports them."""
    kernel, signature, constants, options = cases()[name]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        text = subprocess.run(
            [str(_CUOBJDUMP), "--dump-resource-usage", f.name], capture_output=True, text=True, check=True
        ).stdout
    usage = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {
        "kernel": name,
        "sm": architecture,
        "registers": usage["REG"],
        "spilled_bytes": usage["STACK"] + usage["LOCAL"],
        "shared_bytes": compiled.metadata.shared,
    }


def main() -> None:
    for name in cases():
        for architecture in ARCHITECTURES:
            print(json.dumps(compile_case(name, architecture)), flush=True)


if __name__ == "__main__":
    main()
