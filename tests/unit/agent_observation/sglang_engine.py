"""A stand-in engine for the gate's tests: reads its behaviour from a JSON file at each request.

health: status, "hang" or "exit" (answers 200, then dies); chat: text, status, "hang"; children: command
lines it starts; passport: what to write, null for none; delay: seconds before it listens.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def settings() -> dict[str, Any]:
    with open(sys.argv[1], encoding="utf-8") as file:
        content: dict[str, Any] = json.load(file)
        return content


def write_passport(content: dict[str, Any] | None, directory: str) -> None:
    if content is None:
        return
    with open("/proc/self/stat", "rb") as file:
        start = int(file.read().rpartition(b")")[2].split()[19])
    path = os.path.join(directory, f"{os.getpid()}.json")
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump({**content, "pid": os.getpid(), "start_time": start}, file)
    os.replace(path + ".new", path)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        health = settings().get("health", 200)
        if isinstance(health, list):  # one after another, the last one stays
            server.asked += 1
            health = health[min(server.asked, len(health)) - 1]
        if health == "hang":
            time.sleep(300)
        if health == "exit":
            self._send(200, b"")
            os._exit(3)
        self._send(int(health), b"", {"Location": "/login"} if 300 <= int(health) < 400 else {})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chat = settings().get("chat", "the answer is 4")
        time.sleep(settings().get("chat_delay", 0))
        if chat == "exit":
            os._exit(3)
        if isinstance(chat, int):
            self._send(chat, b"{}")
            return
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": chat}}
        self._send(200, json.dumps({"choices": [choice]}).encode())

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    asked = 0


if __name__ == "__main__":
    first = settings()
    if first.get("exit_at_start"):
        sys.exit(3)
    write_passport(first["passport"], first["passports"])
    for command in first.get("children", ()):
        subprocess.Popen(command["argv"], env={**os.environ, **command.get("env", {})})
    time.sleep(first.get("delay", 0))
    if first.get("listen", True):
        host = first.get("host", "127.0.0.1")
        Server.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = Server((host, first["port"]), Handler)
        if first.get("heir"):  # a child that keeps the listening socket open
            subprocess.Popen(["/bin/sleep", "120"], pass_fds=[server.fileno()])
        server.serve_forever(0.05)
    time.sleep(300)
