"""A small server that speaks OpenAI's chat protocol on loopback and really runs a target, with faults on demand."""

import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from pipeline.config import RegenerateConfig
from pipeline.generate import Generator, Request
from pipeline.render import Renderer


class Server(ThreadingHTTPServer):
    """`faults`: what to do instead of answering, first come first served: an HTTP status or "hang up"."""

    daemon_threads = True

    def __init__(self, target, return_ids=True):
        super().__init__(("127.0.0.1", 0), Handler)
        self.target, self.return_ids = target, return_ids
        self.renderer = Renderer(target.config, target.tokenizer, target.chat_template(), target.stop_ids)
        self.generator = Generator(target, RegenerateConfig(batch_size=1))
        self.lock = threading.Lock()
        self.faults, self.bodies, self.headers = [], [], []
        self.inside = self.most_inside = 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append(body)
            server.headers.append(dict(self.headers))
            server.inside += 1
            server.most_inside = max(server.most_inside, server.inside)
            fault = server.faults.pop(0) if server.faults else None
        try:
            if fault == "hang up":
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
            elif fault is not None:
                self.reply(fault, {"error": {"message": "as asked"}})
            elif self.path != "/v1/chat/completions" or body["model"] != "tiny":
                self.reply(404, {"error": {"message": f"no {self.path} or model {body['model']}"}})
            else:
                self.reply(200, self.answer(body))
        finally:
            with server.lock:
                server.inside -= 1

    def answer(self, body):
        server = self.server
        with server.lock:
            ids = server.renderer.prompt_ids(tuple(body["messages"]), body.get("tools"))
            (response,) = server.generator.generate([Request("", ids, body["max_tokens"])])
        message = {"role": "assistant", "content": response.text}
        choice = {"index": 0, "message": message, "finish_reason": response.finish_reason}
        if server.return_ids and body.get("return_token_ids"):
            choice["token_ids"] = response.token_ids
        return {"choices": [choice], "usage": {"completion_tokens": len(response.token_ids)}}

    def reply(self, status, data):
        payload = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.send_header("Content-Type", "application/json")
        if status == 429:
            self.send_header("Retry-After", "0.05")
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args):
        pass


@contextmanager
def serving(target, **options):
    server = Server(target, **options)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
