"""Small HTTP servers on loopback: threads, ephemeral ports, and every request kept."""

from __future__ import annotations

import json
import re
import socket
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODELS = {"object": "list", "data": [{"id": "dsv4"}]}


@dataclass
class Request:
    """One request as the server got it; header names in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Reply:
    """An answer; `json` wins over `body`."""

    status: int = 200
    json: Any = None
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


Answer = Callable[[Request], Reply]


def free_port(host: str = "127.0.0.1") -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as one:
        one.bind((host, 0))
        return int(one.getsockname()[1])


class Server:
    """Answers each request by a function; `requests` holds all of them, in order."""

    def __init__(self, answer: Answer, host: str = "127.0.0.1", port: int = 0) -> None:
        self.answer = answer
        self.requests: list[Request] = []
        self.closing = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(self.command, self.path, headers, body)
                outer.requests.append(request)
                reply = outer.answer(request)
                data = json.dumps(reply.json).encode() if reply.json is not None else reply.body
                self.send_response(reply.status)
                for name, value in {"Content-Length": str(len(data)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = _serve

            def log_message(self, *_: Any) -> None:
                """Quiet: the requests are kept."""

        class Listener(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True
            block_on_close = False

            def handle_error(self, *_: Any) -> None:
                """A client that leaves at its deadline is no error of the server's."""

        self._server = Listener((host, port), Handler)
        self.host, self.port = host, int(self._server.server_address[1])
        self.url = f"http://{'[' + host + ']' if ':' in host else host}:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def paths(self, method: str | None = None) -> list[str]:
        return [one.path for one in self.requests if method in (None, one.method)]

    def close(self) -> None:
        if not self.closing.is_set():
            self.closing.set()
            self._server.shutdown()
            self._server.server_close()


class RawServer:
    """Hands each accepted connection to a function: for servers that do not keep to HTTP."""

    def __init__(self, serve: Callable[[socket.socket, threading.Event], Any]) -> None:
        self.closing = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        self._serve = serve
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(connection,), daemon=True).start()

    def _one(self, connection: socket.socket) -> None:
        with connection:
            try:
                self._serve(connection, self.closing)
            except OSError:
                return  # the client left, which is what a deadline does

    def close(self) -> None:
        self.closing.set()
        self._socket.close()


def chat_reply(text: str | None = "the answer is 4", **message: Any) -> Reply:
    """What /v1/chat/completions answers."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text, **message}}
    return Reply(json={"object": "chat.completion", "choices": [choice]})


class Engine(Server):
    """A worker as HTTP sees it. Behaviour is in plain attributes."""

    def __init__(self, port: int = 0) -> None:
        self.health: int = 200
        self.loads: list[dict[str, Any]] = [{"num_running_reqs": 0, "num_waiting_reqs": 0}]
        self.chat: Answer = lambda _: chat_reply()
        super().__init__(self._engine, port=port)

    def _engine(self, request: Request) -> Reply:
        if request.path == "/health":
            return Reply(self.health)
        if request.path == "/v1/loads":
            return Reply(json={"loads": self.loads})
        if request.path == "/v1/chat/completions":
            return self.chat(request)
        return Reply(404)


class FakeRouter(Server):
    """sglang-router 0.3.2 as facts say: asynchronous adds and removals, ids that change, keys."""

    def __init__(self, port: int = 0) -> None:
        self.key: str | None = None
        self.listed: dict[str, dict[str, Any]] = {}
        self.add_healthy = True
        self.add_job: Any = None
        self.ignores_delete = False
        self.models = Reply(json=MODELS)
        self.chat: Answer = lambda _: chat_reply()
        self.after_delete: Callable[[], None] = lambda: None
        super().__init__(self._route, port=port)

    def add(self, url: str, role: str, healthy: bool = True, bootstrap_port: int | None = None) -> None:
        number = str(uuid.uuid4())
        self.listed[number] = {
            "id": number,
            "url": url,
            "worker_type": {"unified": "regular"}.get(role, role),
            "is_healthy": healthy,
            "load": 0,
            "bootstrap_port": bootstrap_port,
            "job_status": None,
        }

    def urls(self) -> list[str]:
        return sorted(one["url"] for one in self.listed.values())

    def _route(self, request: Request) -> Reply:
        if request.path == "/v1/models":
            return self.models
        if request.path == "/v1/chat/completions":
            return self.chat(request)
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return Reply(401)
        if request.path == "/workers" and request.method == "GET":
            return Reply(json={"workers": list(self.listed.values()), "total": len(self.listed)})
        if request.path == "/workers" and request.method == "POST":
            body = request.json()
            kind = body["worker_type"]
            self.add(body["url"], kind, self.add_healthy, body.get("bootstrap_port"))
            number = next(reversed(self.listed))
            self.listed[number]["job_status"] = self.add_job
            return Reply(202, json={"status": "accepted", "worker_id": number, "url": body["url"]})
        found = re.fullmatch(r"/workers/([^/]+)", request.path)
        if found is None or found[1] not in self.listed:
            return Reply(404, json={"error": "not found"})
        if request.method == "DELETE":
            if not self.ignores_delete:
                del self.listed[found[1]]
                self.after_delete()
            return Reply(202, json={"status": "accepted"})
        return Reply(json=self.listed[found[1]])
