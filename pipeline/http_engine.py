"""Answers from servers that speak OpenAI's protocol (vLLM, SGLang): many requests in flight, retries, resume.

The server applies its own copy of the chat template, so it must serve the same model; it gets the template's arguments
as `chat_template_kwargs`. Servers that return token ids (vLLM with `return_token_ids`) have them kept; from others the
text is tokenised again.
"""

import contextlib
import http.client
import json
import os
import random
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from infra.errors import ConfigError, ResourceError
from infra.provenance import sha256_hex
from pipeline.config import RegenerateConfig
from pipeline.generate import Request

Asked = tuple[Request, list[dict[str, Any]], Any]  # request, turns, tools
KEEP_EVERY = 64  # answers per part
KEEP_AFTER_S = 10.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
RETRY_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}
GIVE_UP_AFTER = 32  # failed requests in a row: then the servers are down, and each further one would wait a minute


class RequestFailed(Exception):
    """One request failed for good."""


def answer_over_http(
    cfg: RegenerateConfig, template_args: dict[str, Any], asked: list[Asked]
) -> Iterator[tuple[list[dict[str, Any]], dict[str, str]]]:
    """Groups of (answers, {key: reason} of failures) as they come, to be kept at once.

    Raises:
        ResourceError: servers that do not answer at all.
        ConfigError: a server refuses the key or the model's name.
    """
    client = _Client(cfg, template_args)
    rows: list[dict[str, Any]] = []
    errors: dict[str, str] = {}
    in_a_row, kept = 0, time.monotonic()
    pool = ThreadPoolExecutor(cfg.concurrency, thread_name_prefix="ask")
    todo: Iterator[Asked] = iter(asked)
    running: dict[Future, str] = {}
    try:
        while True:
            while len(running) < cfg.concurrency and (item := next(todo, None)) is not None:
                running[pool.submit(client.answer, *item)] = item[0].key
            if not running:
                break
            done, _ = wait(running, timeout=KEEP_AFTER_S, return_when=FIRST_COMPLETED)
            for future in done:
                in_a_row = _collect(future, running.pop(future), rows, errors, in_a_row)
            if in_a_row >= min(GIVE_UP_AFTER, len(asked)):
                raise ResourceError(
                    f"{in_a_row} requests in a row failed (the last: {next(reversed(errors.values()))}); "
                    f"check the servers {', '.join(cfg.urls)} and run again, answered prompts are kept"
                )
            if len(rows) >= KEEP_EVERY or time.monotonic() - kept > KEEP_AFTER_S:
                yield rows, errors
                rows, errors, kept = [], {}, time.monotonic()
    except (Exception, KeyboardInterrupt):
        yield rows, errors
        raise
    finally:
        client.stop()
        pool.shutdown(wait=False, cancel_futures=True)
    yield rows, errors


def _collect(future: Future, key: str, rows: list, errors: dict[str, str], in_a_row: int) -> int:
    try:
        rows.append(future.result())
        return 0
    except RequestFailed as e:
        errors[key] = f"request failed: {e}"
        return in_a_row + 1


class _Client:
    """One connection per thread and server, kept open."""

    def __init__(self, cfg: RegenerateConfig, template_args: dict[str, Any]):
        self.cfg, self.template_args = cfg, template_args
        self.stopped = threading.Event()
        self.turn = 0
        self.local = threading.local()
        self.open: list[http.client.HTTPConnection] = []
        self.headers = {"Content-Type": "application/json"}
        if key := os.environ.get(cfg.api_key_env):
            self.headers["Authorization"] = f"Bearer {key}"
        for url in cfg.urls:
            if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
                raise ConfigError(
                    f"regenerate.urls has {url!r}; give http:// or https:// addresses as http://host:8000/v1"
                )

    def answer(self, request: Request, messages: list[dict[str, Any]], tools: Any) -> dict[str, Any]:
        """The row for `Responses`.

        Raises:
            RequestFailed: after all tries, or at once when the request itself is refused.
        """
        body = self._body(request, messages, tools)
        reason = ""
        for attempt in range(self.cfg.retries + 1):
            if self.stopped.is_set():
                raise RequestFailed("stopped")
            self.turn += 1  # a lost update between threads only changes which server is next
            url = self.cfg.urls[self.turn % len(self.cfg.urls)]
            try:
                status, after, data = self._post(url, body)
            except (OSError, http.client.HTTPException) as e:
                reason, after = f"{url}: {e or type(e).__name__}", None
                self._forget(url)
            else:
                if status == 200:
                    try:
                        return _row(request.key, json.loads(data))
                    except (ValueError, KeyError, IndexError, TypeError) as e:
                        reason = f"{url}: an answer without choices[0].message.content ({type(e).__name__})"
                else:
                    said = data[:300].decode(errors="replace").replace("\n", " ")
                    reason = f"{url}: HTTP {status} {said}"
                    if status in (401, 403, 404):
                        raise ConfigError(
                            f"{reason}; check regenerate.urls, regenerate.model = {self.cfg.model!r} and the key in "
                            f"${self.cfg.api_key_env}"
                        )
                    if status not in RETRY_STATUS:
                        raise RequestFailed(reason)
            if attempt < self.cfg.retries:
                longest = min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S)
                self.stopped.wait(after if after is not None else longest * random.uniform(0.5, 1.0))
        raise RequestFailed(reason)

    def _body(self, request: Request, messages: list[dict[str, Any]], tools: Any) -> bytes:
        cfg = self.cfg
        body: dict[str, Any] = {
            "model": cfg.model,
            "messages": messages,
            "max_tokens": request.max_new_tokens,
            "temperature": cfg.temperature,
            "return_token_ids": True,
        }
        if cfg.temperature > 0:
            body |= {"top_p": cfg.top_p, "seed": int(sha256_hex(f"{cfg.seed}/{request.key}")[:7], 16)}
            body |= {"top_k": cfg.top_k} if cfg.top_k else {}
        if tools:
            body["tools"] = tools
        if self.template_args:
            body["chat_template_kwargs"] = self.template_args
        return json.dumps(body).encode()

    def _post(self, url: str, body: bytes) -> tuple[int, float | None, bytes]:
        connection = self._connection(url)
        path = urllib.parse.urlsplit(url).path.rstrip("/") + "/chat/completions"
        connection.request("POST", path, body, self.headers)
        response = connection.getresponse()
        data = response.read()
        wait_s = response.headers.get("Retry-After", "")
        return response.status, float(wait_s) if wait_s.replace(".", "", 1).isdigit() else None, data

    def _connection(self, url: str) -> http.client.HTTPConnection:
        known = self.local.__dict__.setdefault("connections", {})
        if url not in known:
            parts = urllib.parse.urlsplit(url)
            if parts.scheme == "https":
                context = ssl.create_default_context()
                known[url] = http.client.HTTPSConnection(parts.netloc, timeout=self.cfg.timeout_s, context=context)
            else:
                known[url] = http.client.HTTPConnection(parts.netloc, timeout=self.cfg.timeout_s)
            known[url].connect()
            self.open.append(known[url])
            # else each small request waits 40 ms for the acknowledgement of the headers
            known[url].sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return known[url]

    def stop(self) -> None:
        """Ends requests in flight, whose threads would otherwise hold the process for `timeout_s`."""
        self.stopped.set()
        for connection in self.open:
            with contextlib.suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _forget(self, url: str) -> None:
        connection = self.local.__dict__.get("connections", {}).pop(url, None)
        if connection is not None:
            connection.close()


def _row(key: str, data: dict[str, Any]) -> dict[str, Any]:
    choice = data["choices"][0]
    text = choice["message"]["content"]
    reasoning = choice["message"].get("reasoning_content")
    if not isinstance(text, str) and not reasoning:
        raise TypeError("no text")
    ids = choice.get("token_ids")
    if reasoning and not ids:  # a reasoning parser took the markers away that the target emitted
        text = f"<think>\n{reasoning.strip()}\n</think>\n\n{text or ''}"
    return {"key": key, "text": text or "", "token_ids": ids, "finish_reason": choice.get("finish_reason") or "unknown"}
