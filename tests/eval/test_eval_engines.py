"""Serving engines: a loopback server that decodes with the tiny target and speaks vLLM's and SGLang's protocols."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from eval.config import EvalConfig
from eval.decode import DecodeSettings, decode, plain_decode
from eval.engines import Sampling, Server, parse_metrics
from eval.engines_measure import check_engine
from eval.proposer import DrafterProposer
from eval.run import evaluate, summary
from infra.errors import CheckpointError, ConfigError, EngineError, ResourceError


class Engine(ThreadingHTTPServer):
    """One server of either kind. `drafting` False: it serves, and counts no draft."""

    daemon_threads = True

    def __init__(self, kind, target, drafter, *, ids=True, drafting=True):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.kind, self.target, self.ids, self.drafting = kind, target, ids, drafting
        self.proposer = DrafterProposer(drafter, target.frozen_head())
        self.lock, self.cycles = threading.Lock(), []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, prompt, max_new_tokens):
        settings = DecodeSettings(max_new_tokens=max_new_tokens)
        with self.lock:
            if not self.drafting:
                return plain_decode(self.target, [prompt], settings)[0]
            (trace,) = decode(self.target, self.proposer, [prompt], settings)
            self.cycles += trace.cycles
        return trace

    def metrics(self):
        if self.kind == "sglang":
            return '# TYPE sglang:spec_accept_length gauge\nsglang:spec_accept_length{model_name="t"} 2.5\n'
        if self.kind == "other":
            return "process_cpu_seconds_total 1.0\n"
        matched = [c.matched for c in self.cycles]
        labels = 'engine="0",model_name="a \\"quoted\\" {name}"'
        lines = [
            f"vllm:num_requests_running{{{labels}}} 0.0",
            f"vllm:spec_decode_num_drafts_total{{{labels}}} {100.0 + len(matched)}",
            f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {7.0 + sum(matched)}",
        ]
        for k in range(7):
            count = 1.0 + sum(n > k for n in matched)
            lines.append(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{k}"}} {count}')
        return "\n".join(lines) + "\n"


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        if self.path == "/metrics":
            return self._send(self.server.metrics().encode())
        self._send(json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/generate":
            sampling = body["sampling_params"]
            trace = self.server.answer(body["input_ids"], sampling["max_new_tokens"])
            histogram = [sum(c.matched == i for c in trace.cycles) for i in range(8)]
            meta = {
                "completion_tokens": len(trace.answer_ids),
                "spec_verify_ct": len(trace.cycles),
                "spec_accept_histogram": histogram,
            }
            return self._send(json.dumps({"output_ids": trace.answer_ids, "text": "", "meta_info": meta}).encode())
        if body["model"] != "tiny" or not body["return_token_ids"]:
            return self.send_error(400, "no such model")
        trace = self.server.answer(body["prompt"], body["max_tokens"])
        choice = {"text": self.server.target.tokenizer.decode(trace.answer_ids, skip_special_tokens=True)}
        if self.server.ids:
            choice["token_ids"] = trace.answer_ids
        self._send(json.dumps({"choices": [choice], "usage": {"completion_tokens": len(trace.answer_ids)}}).encode())

    def _send(self, data):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def engine(tiny, drafter):
    started = []

    def start(kind, **options):
        started.append(Engine(kind, tiny, drafter, **options))
        return started[-1]

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("kind", "ids"), [("vllm", True), ("vllm", False), ("sglang", True)])
def test_the_counters_of_a_server_stand_beside_ours(engine, tiny_run, tmp_path, in_tmp, kind, ids):
    server = engine(kind, ids=ids)
    report = evaluate(
        EvalConfig(
            model="tiny", drafter=str(tiny_run / "runs/demo"), store=str(next((tiny_run / "store/tiny").iterdir())),
            suites=("heldout",), limit=4, max_new_tokens=24, batch_size=2, engine=server.url, out=str(tmp_path / "out"),
            track=False,
        )
    )  # fmt: skip
    e = report["suites"]["heldout"]["engine"]
    assert e["name"] == f"{kind} at {server.url}"
    assert e["answers_equal_to_ours"] == e["answers"] == 4
    ours = e["ours"]
    assert e["accepted_per_position"] == ours["accepted_per_position"] and sum(ours["accepted_per_position"]) > 0
    for key in ("cycles", "tokens", "tau_pooled", "tau_pooled_uncut"):
        assert e[key] == pytest.approx(ours[key]), key
    assert ours["tau_pooled"] == report["suites"]["heldout"]["tau_pooled"]
    assert f"{kind} at {server.url}" in summary(report) and "4/4" in summary(report)
    if kind == "sglang":
        assert e["reported"] == {"spec_accept_length": 2.5}


def test_servers_that_cannot_be_compared_are_refused(engine):
    sampling = Sampling(8, 0.0, 0, (), 2)
    with pytest.raises(EngineError, match="has no vllm: or sglang: metrics"):
        Server(engine("other").url)
    with pytest.raises(EngineError, match="answered without drafting; start it with the drafter"):
        Server(engine("vllm", drafting=False).url).run([[65, 66, 67]], sampling)
    gone = engine("vllm")
    server = Server(gone.url)
    server.model = "another"
    with pytest.raises(EngineError, match=r"answers /v1/completions with 400 [^;]*; see its log"):
        server.run([[65]], sampling)
    gone.shutdown()
    gone.server_close()
    with pytest.raises(EngineError, match="does not answer /metrics"):
        Server(gone.url)
    with pytest.raises(ConfigError, match="'vlm' is neither 'vllm' nor an address"):
        Server("vlm")


def test_what_no_engine_does_is_refused_before_decoding(make_drafter, tmp_path):
    from eval.session import LoadedDrafter

    def check(drafter, **settings):
        check_engine(EvalConfig(engine="vllm", **settings), LoadedDrafter(tmp_path, drafter, None))

    check(make_drafter())
    with pytest.raises(ConfigError, match="verify_length cannot be compared with engine 'vllm'"):
        check(make_drafter(), verify_length=4)
    with pytest.raises(ConfigError, match="'rejection' cannot be compared"):
        check(make_drafter(), verification="rejection", temperature=1.0)
    with pytest.raises(CheckpointError, match=r"an ablation .input_fusion.*no engine serves"):
        check(make_drafter(conditioning="input_fusion"))


def test_a_missing_vllm_says_how_to_install_it(monkeypatch, tmp_path):
    from eval.engines_env import python

    monkeypatch.setenv("FLASHDRAFT_ENGINES", str(tmp_path))
    monkeypatch.delenv("FLASHDRAFT_VLLM_PYTHON", raising=False)
    with pytest.raises(ResourceError, match=r"vLLM is not installed in .*run python -m eval.engines_env"):
        python()


def test_prometheus_text():
    text = '# HELP a b\na_total{x="1",y="p\\"q"} 3.0\na_total{x="2"} 4\nb 1e-3 1700000000\n'
    assert parse_metrics(text) == {"a": [({"x": "1", "y": 'p\\"q'}, 3.0), ({"x": "2"}, 4.0)], "b": [({}, 1e-3)]}
