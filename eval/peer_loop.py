"""The authors' own generation loop (`dflash` on PyPI) on given prompts: `peer_loop.py IN.json OUT.json`.

Runs with the package's folder on PYTHONPATH (`trainer.drafter.peers`) and imports nothing of ours. IN: target and
drafter folders, prompts (token ids), max_new_tokens, stop_ids. OUT: per prompt the answer and the emitted tokens of
each cycle.
"""

import json
import sys
import time
from pathlib import Path

import torch


def main(source: str, destination: str) -> None:
    from dflash import model as dflash
    from transformers import AutoModelForCausalLM

    job = json.loads(Path(source).read_text())
    dflash._cuda_time = time.perf_counter  # its timer asks for CUDA
    target = AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32).eval()
    drafter = dflash.DFlashDraftModel.from_pretrained(job["drafter"], dtype=torch.float32).eval()
    out = []
    for prompt in job["prompts"]:
        result = dflash.dflash_generate(
            drafter,
            target,
            torch.tensor([prompt]),
            max_new_tokens=job["max_new_tokens"],
            stop_token_ids=job["stop_ids"],
            return_stats=True,
        )
        answer = result.output_ids[0, len(prompt) :].tolist()
        out.append({"answer": answer, "emitted": result.acceptance_lengths})
    Path(destination).write_text(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
