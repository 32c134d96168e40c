"""Starts the stand-in engine as a real process on loopback, in a place of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

PROGRAM = Path(__file__).parents[2] / "standin" / "launch_server.py"
# The interpreter that has the engine's three libraries, where the one of the tests has not.
PYTHON = os.environ.get("DSV4_STANDIN_PYTHON", sys.executable)
WAIT_S = 60.0  # how long anything may take on a machine that is busy
# No proxies, and no certificates: reading those costs more than a whole test.
CLIENT: dict[str, Any] = {"trust_env": False, "verify": False, "timeout": WAIT_S}
FAST = {
    "start_s": 0.1,
    "listen_s": 0.0,
    "health_min_s": 0.05,
    "sigterm_poll_s": 0.2,
    "token_ms": 2.0,
    "prefill_ms": 5.0,
}


def free_port() -> int:
    """A loopback port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(what: str, condition: Callable[[], Any]) -> Any:
    """The condition's first true value; an AssertionError that says what was waited for."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited {WAIT_S:.0f} s for: {what}")


def overlay_tree(base: Path, place: Path, changes: dict[str, Callable[[str], str]]) -> Path:
    """A tree like `base` (the directory that holds `sglang/`) with some files changed: links elsewhere."""
    for rel, change in changes.items():
        here, there = place, base
        for part in Path(rel).parts[:-1]:
            here, there = here / part, there / part
            if here.is_symlink():
                here.unlink()
            here.mkdir(parents=True, exist_ok=True)
            for entry in there.iterdir():
                link = here / entry.name
                if entry.name != "__pycache__" and not link.exists():
                    link.symlink_to(entry)
        target = place / rel
        target.unlink()
        target.write_text(change((base / rel).read_text(encoding="utf-8")), encoding="utf-8")
    return place


class StandIn:
    """One running stand-in engine. Its files lie in `place`."""

    def __init__(
        self,
        place: Path,
        tree: Path | None,
        arguments: list[str],
        env: dict[str, str],
        settings: dict[str, Any],
        faults: dict[str, Any],
        cwd: Path | None,
        port: int | None,
    ) -> None:
        self.place, self.port = place, port or free_port()
        self.host = "127.0.0.1"
        self.log = place / "log"
        self.faults_file = place / "faults.json"
        self.set_faults(faults)
        (place / "settings.json").write_text(json.dumps({**FAST, **settings}))
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SGLANG_", "SGL_", "DSV4_", "PYTHON", "SPT_", "STANDIN_"))
        }
        path = {} if tree is None else {"PYTHONPATH": str(tree)}
        own = {"STANDIN_SETTINGS": str(place / "settings.json"), "STANDIN_FAULTS": str(self.faults_file)}
        work = cwd or place / "cwd"
        work.mkdir(exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [PYTHON, "-B", str(PROGRAM), "--port", str(self.port), *arguments],
                cwd=work,
                env={**clean, **path, **own, **env},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def url(self) -> str:
        """Without a slash at its end."""
        return f"http://{self.host}:{self.port}"

    @property
    def text(self) -> str:
        """What it has printed."""
        return self.log.read_text(encoding="utf-8")

    def set_faults(self, faults: dict[str, Any]) -> None:
        """Write the faults file whole, by rename."""
        fresh = self.faults_file.with_suffix(".new")
        fresh.write_text(json.dumps(faults))
        fresh.replace(self.faults_file)

    def get(self, path: str, **options: Any) -> httpx.Response:
        """One GET on a connection of its own, without proxies."""
        with httpx.Client(**CLIENT) as client:
            return client.get(self.url + path, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """One POST of a JSON body."""
        with httpx.Client(**CLIENT) as client:
            return client.post(self.url + path, json=body, **options)

    def status(self, path: str = "/health") -> int | None:
        """The status of a GET; None where nothing listens or nothing is answered."""
        try:
            return self.get(path).status_code
        except httpx.TransportError:
            return None

    def wait_healthy(self) -> StandIn:
        """Until /health is 200; fails at once with the log where the process ends."""

        def healthy() -> bool:
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.text}"
            return self.status() == 200

        until(f"{self.url}/health to answer 200", healthy)
        return self

    def exit_code(self) -> int:
        """Its exit code, once it has ended."""
        return self.process.wait(timeout=WAIT_S)

    def scheduler(self) -> int:
        """The scheduler process's id."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        named = [int(pid) for pid in children if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sglang::")]
        assert len(named) == 1, f"found children {children}, expected one sglang::scheduler"
        return named[0]

    def load(self, section: str = "core") -> dict[str, Any]:
        """The one load of `/v1/loads`."""
        loads = self.get("/v1/loads", params={"include": section}).json()["loads"]
        assert len(loads) == 1
        return dict(loads[0])

    def chat(self, content: str, **more: Any) -> dict[str, Any]:
        """The answer of a chat completion that is not streamed."""
        answer = self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **more})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def word(self, word: str) -> str | None:
        """What comes back for a word that is asked for."""
        content = self.chat(f"Repeat this word: {word}")["choices"][0]["message"]["content"]
        return None if content is None else str(content)

    @contextmanager
    def talking(self, tokens: int = 5000) -> Iterator[Stream]:
        """A stream that is open and has begun, read to its end in the background."""
        stream = Stream(self, {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": tokens})
        until("the stream's first chunk", lambda: stream.events or stream.done.is_set())
        try:
            yield stream
        finally:
            stream.close()

    def close(self) -> None:
        """End what is left of it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=WAIT_S)


class Stream:
    """A streamed chat completion, read by a thread."""

    def __init__(self, standin: StandIn, body: dict[str, Any], path: str = "/v1/chat/completions") -> None:
        self.events: list[str] = []
        self.error: str | None = None
        self.done = threading.Event()
        self._close = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(standin.url + path, {**body, "stream": True}))
        self._thread.start()

    def _read(self, url: str, body: dict[str, Any]) -> None:
        try:
            with (
                httpx.Client(**CLIENT) as client,
                client.stream("POST", url, json=body) as response,
            ):
                for line in response.iter_lines():
                    if self._close.is_set():
                        break
                    if line.startswith("data: "):
                        self.events.append(line[6:])
        except httpx.TransportError as error:
            self.error = repr(error)
        finally:
            self.done.set()

    def result(self) -> list[str]:
        """All events, once the stream has ended."""
        assert self.done.wait(WAIT_S), "the stream did not end"
        return self.events

    def close(self) -> None:
        """Hang up, if it still runs."""
        self._close.set()
        self._thread.join(WAIT_S)


def sse(standin: StandIn, body: dict[str, Any], path: str = "/v1/chat/completions") -> list[str]:
    """The events of a whole stream; `[DONE]` is one."""
    stream = Stream(standin, body, path)
    events = stream.result()
    stream.close()
    assert stream.error is None, stream.error
    return events


def chunks(events: list[str]) -> list[dict[str, Any]]:
    """The JSON of each event but `[DONE]`."""
    return [json.loads(event) for event in events if event != "[DONE]"]
