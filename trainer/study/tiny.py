"""A small language model made on the spot, for studies where no small real one is at hand.

The `tiny` target's architecture with the byte tokenizer, trained for a few minutes on the documentation strings of
Python's standard library: text that every machine with Python has, and that a model of 300,000 weights can learn
enough of for drafts to differ in difficulty.
"""

import ast
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

from features.target_source import byte_tokenizer
from infra.progress import Progress

STEPS, BATCH, LENGTH = 1500, 32, 128


def trained_tiny(folder: Path, max_length: int) -> dict[str, Any]:
    """A target file's content for the model in `folder`, trained there if it is not yet."""
    if not (folder / "config.json").is_file():
        _train(folder)
    return {
        "name": "tiny-docs",
        "dtype": "float32",
        "tap_layer_ids": [1, 2, 3],
        "mask_token_id": 259,
        "block_size": 16,
        "max_length": max_length,
        "chat_template": "{{ messages[-1].content }}",
        "source": {"kind": "folder", "path": str(folder)},
    }


def library_text() -> bytes:
    """Docstrings of the standard library's modules, in the order of their names."""
    parts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            tree = ast.parse(path.read_text())
        except (SyntaxError, UnicodeDecodeError):
            continue
        nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
        parts += [doc for n in nodes if (doc := ast.get_docstring(n))]
    return "\n\n".join(parts).encode()


def _train(folder: Path) -> None:
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    tokenizer = byte_tokenizer()
    text = tokenizer(library_text().decode(), return_tensors="pt").input_ids[0]
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=6, head_dim=16,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
    generator = torch.Generator().manual_seed(0)
    print(f"training a target on {len(text):,} bytes of documentation, {STEPS} steps", file=sys.stderr, flush=True)
    with Progress(STEPS, "target", "steps") as progress:
        for _ in range(STEPS):
            starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)
            ids = torch.stack([text[s : s + LENGTH] for s in starts.tolist()])
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress.update(loss=float(loss.detach()))
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
