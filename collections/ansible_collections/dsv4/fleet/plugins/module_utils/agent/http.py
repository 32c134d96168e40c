"""One HTTP request on a fresh connection, under one wall-clock deadline.

No proxy variable is looked at, no redirect followed, no connection kept: a probe must speak with the
process that listens now, not with what a library remembers.
"""

from __future__ import annotations

import errno
import http.client
import json
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

MAX_BYTES = 8 << 20


class RequestError(Exception):
    """No answer. `kind`: refused, unreachable, resolve, timeout, closed, protocol or size."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class Answer:
    """A complete answer, whatever its status; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON; RequestError if it is none."""
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise RequestError("protocol", f"found {excerpt(self.body)!r}, expected JSON ({error})") from error


def request(
    method: str,
    host: str,
    port: int,
    path: str,
    *,
    timeout_s: float,
    body: Any = None,
    key: str | None = None,
    max_bytes: int = MAX_BYTES,
) -> Answer:
    """Send one request and read its whole answer within `timeout_s` seconds, all steps together.

    `body` is sent as JSON; `key` as a bearer token. Raises RequestError.
    """
    deadline = time.monotonic() + timeout_s
    headers = {"Connection": "close", "Accept": "application/json", "Accept-Encoding": "identity"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None
    if body is not None:
        data = json.dumps(body).encode()
        headers["Content-Type"] = "application/json"
    where = f"{method} http://{bracketed(host)}:{port}{path}"
    connection = http.client.HTTPConnection(host, port)
    try:
        connection.sock = _connect(host, port, deadline)
        connection.request(method, path, body=data, headers=headers)
        response = connection.getresponse()
        content = _read(response, max_bytes, where)
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, content)
    except RequestError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        kind = _kind(error, deadline)
        text = f"no complete answer within {timeout_s:.1f} s" if kind == "timeout" else _words(error)
        raise RequestError(kind, f"{where}: {text}") from error
    finally:
        connection.close()


def split(url: str) -> tuple[str, int, str]:
    """Host, port and path prefix of an `http` URL; ValueError for anything else."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise ValueError(f"found URL {url!r}, expected http://HOST:PORT")
    return parts.hostname, parts.port or 80, parts.path.rstrip("/")


def bracketed(host: str) -> str:
    """The host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def excerpt(text: bytes | str, limit: int = 200) -> str:
    """The beginning of a text for a message."""
    words = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    return words if len(words) <= limit else words[:limit] + "…"


class _Socket(socket.socket):
    """A socket each of whose waits ends at one deadline, however slowly bytes drip in."""

    deadline = 0.0

    def _arm(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("deadline")
        self.settimeout(left)

    def recv_into(self, *arguments: Any) -> int:  # what http.client's file object reads by
        self._arm()
        return super().recv_into(*arguments)

    def sendall(self, *arguments: Any) -> None:  # its time-out is for all of the data
        self._arm()
        super().sendall(*arguments)

    def connect(self, address: Any) -> None:
        self._arm()
        super().connect(address)


def _connect(host: str, port: int, deadline: float) -> _Socket:
    addresses = _resolve(host, port, deadline)
    last: OSError | None = None
    for at, (family, kind, protocol, address) in enumerate(addresses):
        left = deadline - time.monotonic()
        candidate = _Socket(family, kind, protocol)
        candidate.deadline = time.monotonic() + left / (len(addresses) - at)  # a dead address leaves time for the next
        try:
            candidate.connect(address)
        except OSError as error:
            candidate.close()
            last = error
            continue
        candidate.deadline = deadline
        return candidate
    raise last if last is not None else OSError(errno.EADDRNOTAVAIL, "no address")


def _resolve(host: str, port: int, deadline: float) -> list[tuple[int, int, int, Any]]:
    """Addresses of a literal at once; of a name in a thread, because a resolver knows no deadline."""
    found: list[tuple[int, int, int, Any]] = []
    failed: list[OSError] = []

    def look(flags: int) -> None:
        try:
            for family, kind, protocol, _, address in socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=flags
            ):
                found.append((family, kind, protocol, address))
        except OSError as error:
            failed.append(error)

    look(socket.AI_NUMERICHOST)
    if not found:
        failed.clear()
        thread = threading.Thread(target=look, args=(0,), daemon=True)
        thread.start()
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            raise RequestError("timeout", f"name {host!r} was not resolved in time; look at the resolver")
    if failed:
        raise RequestError("resolve", f"name {host!r} does not resolve: {failed[0]}")
    return found


def _read(response: http.client.HTTPResponse, max_bytes: int, where: str) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        part = response.read(65536)
        if not part:
            break
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise RequestError("size", f"{where}: found more than {max_bytes} bytes, expected fewer")
    if response.length:  # bytes that Content-Length promised and the peer did not send
        raise RequestError("closed", f"{where}: connection closed {response.length} bytes before the end")
    return b"".join(parts)


def _kind(error: Exception, deadline: float) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, TimeoutError) or time.monotonic() >= deadline:
        return "timeout"
    if isinstance(error, (ConnectionError, http.client.IncompleteRead, http.client.RemoteDisconnected)):
        return "closed"
    return "unreachable" if isinstance(error, OSError) else "protocol"


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
