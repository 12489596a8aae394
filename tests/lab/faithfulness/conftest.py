"""A server with OpenAI's interface on the loopback, which answers as it is instructed."""

import json
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Judging(ThreadingHTTPServer):
    """Answers each request by `answer(prompt)`: a text, or (status, body) as they are. Records what was asked."""

    daemon_threads = True

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.asked, self.keys = answer, [], []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][1]["content"]
        self.server.asked.append(body | {"path": self.path})
        self.server.keys.append(self.headers["Authorization"])
        answer = self.server.answer(prompt)
        status, content = answer if isinstance(answer, tuple) else (200, chat(answer))
        self.send_response(status)
        if status == 302:
            self.send_header("Location", content)
        if status == 429:
            self.send_header("Retry-After", "0")
        self.end_headers()
        with suppress(OSError):  # the client may have given up
            self.wfile.write(content.encode())

    def log_message(self, *_):
        pass


def chat(text):
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


@pytest.fixture
def judging(monkeypatch):
    """Return a function that starts a server with a function of prompts."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    servers = []

    def start(answer):
        servers.append(Judging(answer))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
