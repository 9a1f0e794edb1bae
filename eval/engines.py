"""The same prompts through a serving engine, with the engine's own acceptance counters beside ours.

    python -m eval --engine vllm …                     vLLM in an environment of its own (`eval.engines_env`)
    python -m eval --engine http://127.0.0.1:8000 …    a running vLLM or SGLang server that drafts with the drafter

Prompts go as token ids, the very ones that our loop decoded (later turns follow our answers), so texts and counters
can be compared. vLLM counts in Prometheus metrics, which are read before and after a suite: nobody else may use the
server meanwhile. SGLang's metrics are gauges over its last batches; its exact counts come with every answer.
"""

import concurrent.futures
import dataclasses
import json
import re
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.engines_env import python
from infra.errors import ConfigError, EngineError

SIDE = Path(__file__).with_name("engines_side.py")
VLLM_COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


@dataclasses.dataclass(frozen=True)
class Sampling:
    max_new_tokens: int
    temperature: float
    seed: int
    stop_ids: tuple[int, ...]
    concurrency: int
    """requests at once"""


@dataclasses.dataclass
class EngineResult:
    """What an engine did with the prompts of one suite.

    Attributes:
        answers: token ids of each answer, stop token included; or its text where the server does not return ids.
        tokens: of all answers.
        drafts: drafted blocks that were verified.
        accepted: drafts that the engine counted as accepted; what stands behind a stop token counts.
        accepted_per_position: entry k - 1: blocks whose draft k was accepted; empty where the engine does not count it.
        reported: the engine's own gauges, as they stood at the end.
    """

    answers: list[list[int]] | list[str]
    tokens: int
    seconds: float
    drafts: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = dataclasses.field(default_factory=list)
    reported: dict[str, float] = dataclasses.field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """For report.json. `tau_pooled` counts as we do (emitted tokens, first ones left out, per block);
        `tau_pooled_uncut` is the engines' own mean acceptance length, 1 + accepted / drafts."""
        cycles = self.drafts
        return {
            "cycles": cycles,
            "tokens": self.tokens - len(self.answers),
            "tau_pooled": (self.tokens - len(self.answers)) / cycles if cycles else None,
            "tau_pooled_uncut": 1 + self.accepted / cycles if cycles else None,
            "accepted_per_position": self.accepted_per_position,
            "tokens_per_s": self.tokens / self.seconds if self.seconds else None,
            **({"reported": self.reported} if self.reported else {}),
        }


def run_vllm(
    target: Path,
    drafter: Path | None,
    draft_tokens: int,
    suites: Mapping[str, Sequence[Sequence[int]]],
    sampling: Sampling,
    dtype: str,
    *,
    timeout_s: float = 3600.0,
) -> tuple[dict[str, EngineResult], str]:
    """vLLM in a process of its own: suite -> result, and its version. Without a drafter it decodes plainly.

    Args:
        target, drafter: folders; the drafter in z-lab's or speculators' layout.
        draft_tokens: K - 1.

    Raises:
        ResourceError: vLLM is not installed.
        EngineError: it failed; the sentence ends with its last words.
    """
    job = {
        "target": str(target.resolve()),
        "drafter": str(drafter.resolve()) if drafter else None,
        "draft_tokens": draft_tokens,
        "dtype": dtype,
        "suites": {name: [list(p) for p in prompts] for name, prompts in suites.items()},
        **dataclasses.asdict(sampling),
    }
    with tempfile.TemporaryDirectory(prefix="flashdraft-vllm-") as tmp:
        source, out = Path(tmp) / "in.json", Path(tmp) / "out.json"
        source.write_text(json.dumps(job))
        command = [python(), "-P", str(SIDE), str(source), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=tmp)
        if done.returncode or not out.is_file():
            raise EngineError(
                f"vLLM failed with drafter {job['drafter']} ({_last_words(done.stderr)}); run it again with "
                "VLLM_LOGGING_LEVEL=DEBUG, or evaluate without --engine"
            )
        data = json.loads(out.read_text())
    return {name: EngineResult(**r) for name, r in data["suites"].items()}, f"vllm {data['version']}"


def _last_words(stderr: str) -> str:
    lines = [x.strip() for x in stderr.splitlines() if x.strip()]
    errors = [x for x in lines if re.search(r"\b\w*Error\b", x)]
    return (errors or lines or ["no message"])[-1][-400:]


class Server:
    """A running OpenAI-compatible server of vLLM or SGLang.

    Raises:
        EngineError: nothing answers, or it is neither of the two, or its metrics are off.
    """

    def __init__(self, url: str, timeout_s: float = 600.0):
        if not re.match(r"https?://", url):
            raise ConfigError(f"engine {url!r} is neither 'vllm' nor an address; give http://host:port of a server")
        self.url, self.timeout_s = url.rstrip("/").removesuffix("/v1"), timeout_s
        metrics = self.metrics()
        kinds = [k for k in ("vllm", "sglang") if any(name.startswith(f"{k}:") for name in metrics)]
        if len(kinds) != 1:
            raise EngineError(
                f"server {self.url} has no vllm: or sglang: metrics; give a vLLM server, or start SGLang with "
                "--enable-metrics"
            )
        self.kind = kinds[0]
        models = self._json("/v1/models")["data"]
        self.model = models[0]["id"]

    def run(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> EngineResult:
        """All prompts, `sampling.concurrency` at once.

        Raises:
            EngineError: a request fails, or the server does not draft.
        """
        ask = self._vllm if self.kind == "vllm" else self._sglang
        before, began = self.metrics(), time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(sampling.concurrency) as pool:
            replies = list(pool.map(lambda p: ask(list(p), sampling), prompts))
        seconds = time.monotonic() - began
        after = self.metrics()
        result = EngineResult([r["answer"] for r in replies], sum(r["tokens"] for r in replies), seconds)
        if self.kind == "vllm":
            counted = {k: _total(after, name) - _total(before, name) for k, name in VLLM_COUNTERS.items()}
            result.drafts, result.accepted = int(counted["drafts"]), int(counted["accepted"])
            now, then = _by_position(after), _by_position(before)
            result.accepted_per_position = [int(now[k] - then.get(k, 0.0)) for k in sorted(now)]
        else:
            result.drafts = sum(r["drafts"] for r in replies)
            histograms = [r["histogram"] for r in replies]
            result.accepted_per_position = _from_histograms(histograms)
            # without histograms: what was emitted beside each block's own token
            result.accepted = sum(result.accepted_per_position) or result.tokens - len(replies) - result.drafts
            result.reported = {
                name.removeprefix("sglang:"): _total(after, name)
                for name in ("sglang:spec_accept_length", "sglang:spec_accept_rate")
                if name in after
            }
        if not result.drafts and result.tokens > len(replies):
            raise EngineError(
                f"server {self.url} answered without drafting; start it with the drafter (as its README.md says)"
            )
        return result

    def metrics(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """Prometheus metrics: name -> [(labels, value)]."""
        return parse_metrics(self._get("/metrics").decode())

    def _vllm(self, prompt: list[int], s: Sampling) -> dict[str, Any]:
        reply = self._json(
            "/v1/completions",
            {
                "model": self.model, "prompt": prompt, "max_tokens": s.max_new_tokens, "temperature": s.temperature,
                "seed": s.seed, "stop_token_ids": list(s.stop_ids), "return_token_ids": True,
            },
        )  # fmt: skip
        choice = reply["choices"][0]
        answer = choice.get("token_ids")  # servers before 0.10.2 do not know return_token_ids
        return {
            "answer": choice["text"] if answer is None else answer,
            "tokens": reply["usage"]["completion_tokens"],
        }

    def _sglang(self, prompt: list[int], s: Sampling) -> dict[str, Any]:
        sampling = {
            "max_new_tokens": s.max_new_tokens, "temperature": s.temperature, "stop_token_ids": list(s.stop_ids),
        }  # fmt: skip
        reply = self._json("/generate", {"input_ids": prompt, "sampling_params": sampling})
        meta = reply["meta_info"]
        return {
            "answer": reply.get("output_ids") or reply["text"],
            "tokens": meta["completion_tokens"],
            "drafts": meta.get("spec_verify_ct", 0),
            "histogram": meta.get("spec_accept_histogram") or [],
        }

    def _get(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                return reply.read()
        except urllib.error.HTTPError as e:
            text = e.read().decode(errors="replace")[:300]
            raise EngineError(f"server {self.url} answers {path} with {e.code} ({text}); see its log") from None
        except (OSError, TimeoutError) as e:
            raise EngineError(
                f"server {self.url} does not answer {path} ({e}); start it, or correct --engine"
            ) from None

    def _json(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return json.loads(self._get(path, body))


_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def parse_metrics(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Prometheus' text format; a counter's suffix `_total` is dropped."""
    out: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.splitlines():
        m = _SAMPLE.match(line)
        if m:
            name = m[1].removesuffix("_total")
            out.setdefault(name, []).append((dict(_LABEL.findall(m[2] or "")), float(m[3])))
    return out


def _total(metrics: dict[str, list[tuple[dict[str, str], float]]], name: str) -> float:
    return sum(value for _, value in metrics.get(name, []))


def _by_position(metrics: dict[str, list[tuple[dict[str, str], float]]]) -> dict[int, float]:
    out: dict[int, float] = {}
    for labels, value in metrics.get(PER_POSITION, []):
        k = int(labels["position"])
        out[k] = out.get(k, 0.0) + value
    return out


def _from_histograms(histograms: Sequence[Sequence[int]]) -> list[int]:
    """`h[i]` blocks that accepted i drafts, per request -> blocks whose draft k was accepted."""
    width = max((len(h) for h in histograms), default=0)
    total = [sum(h[i] for h in histograms if i < len(h)) for i in range(width)]
    return [sum(total[k:]) for k in range(1, width)]
