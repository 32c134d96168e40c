"""One request under one deadline: nothing that a server or an environment does may stretch or bend it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from agent import http

from tests.unit.agent_observation.loopback import RawServer, Reply, Request, Server

Start = Callable[..., Server]


@pytest.fixture
def raw() -> Iterator[Callable[[Callable[[socket.socket, threading.Event], None]], RawServer]]:
    started: list[RawServer] = []

    def start(serve: Callable[[socket.socket, threading.Event], None]) -> RawServer:
        started.append(RawServer(serve))
        return started[-1]

    yield start
    for one in started:
        one.close()


def drip(head: bytes, each: bytes) -> Callable[[socket.socket, threading.Event], None]:
    """Sends `head`, then `each` twenty times a second, for longer than anyone should wait."""

    def serve(connection: socket.socket, closing: threading.Event) -> None:
        connection.recv(65536)
        connection.sendall(head)
        for _ in range(200):
            if closing.wait(0.05):
                return
            connection.sendall(each)

    return serve


def test_answer_is_whole_and_request_says_what_it_was_told(server: Start) -> None:
    def answer(request: Request) -> Reply:
        return Reply(201, json=request.json(), headers={"X-Seen": request.headers["authorization"]})

    one = server(answer)
    answered = http.request("POST", one.host, one.port, "/a?b=1", timeout_s=10, body={"x": [1, "ü"]}, key="k1")
    assert (answered.status, answered.json()) == (201, {"x": [1, "ü"]})
    assert answered.headers["x-seen"] == "Bearer k1"
    assert one.paths() == ["/a?b=1"]


def test_redirect_is_a_result_and_is_not_followed(server: Start) -> None:
    one = server(lambda request: Reply(302, headers={"Location": "/login"}) if request.path == "/health" else Reply(200))
    assert http.request("GET", one.host, one.port, "/health", timeout_s=10).status == 302
    assert one.paths() == ["/health"]


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_proxy_variables_are_ignored(server: Start, monkeypatch: pytest.MonkeyPatch, dead_port: int, name: str) -> None:
    monkeypatch.setenv(name, f"http://127.0.0.1:{dead_port}")
    one = server(lambda _: Reply(200))
    assert http.request("GET", one.host, one.port, "/", timeout_s=10).status == 200


@pytest.mark.parametrize(
    ("head", "each"),
    [
        (b"", b""),
        (b"", b"H"),
        (b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"."),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n.\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["silent", "status line", "headers", "body", "chunks", "continue"],
)
def test_a_server_that_drips_cannot_stretch_the_deadline(raw: Callable[..., RawServer], head: bytes, each: bytes) -> None:
    one = raw(drip(head, each))
    started = time.monotonic()
    with pytest.raises(http.RequestError) as caught:
        http.request("GET", "127.0.0.1", one.port, "/", timeout_s=0.6)
    assert caught.value.kind == "timeout"
    assert time.monotonic() - started < 3


def test_a_peer_that_reads_nothing_cannot_stretch_the_deadline(raw: Callable[..., RawServer]) -> None:
    one = raw(lambda _, closing: closing.wait(60))
    started = time.monotonic()
    with pytest.raises(http.RequestError) as caught:
        http.request("POST", "127.0.0.1", one.port, "/", timeout_s=0.6, body="x" * (32 << 20))
    assert caught.value.kind == "timeout"
    assert time.monotonic() - started < 5


def test_a_resolver_that_hangs_cannot_stretch_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo
    release = threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        if options.get("flags") == 0:
            release.wait(30)
        return real(*arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    started = time.monotonic()
    with pytest.raises(http.RequestError, match="was not resolved in time") as caught:
        http.request("GET", "router1.example.internal", 80, "/", timeout_s=0.5)
    release.set()
    assert caught.value.kind == "timeout"
    assert time.monotonic() - started < 3


def test_closed_port_is_refused(dead_port: int) -> None:
    with pytest.raises(http.RequestError) as caught:
        http.request("GET", "127.0.0.1", dead_port, "/", timeout_s=10)
    assert caught.value.kind == "refused"
    assert f"GET http://127.0.0.1:{dead_port}/" in str(caught.value)


@pytest.mark.parametrize(
    ("bytes_", "kind"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf", "closed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhal", "closed"),
        (b"", "closed"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "protocol"),
    ],
    ids=["short body", "short chunk", "nothing", "not HTTP"],
)
def test_a_cut_answer_is_no_answer(raw: Callable[..., RawServer], bytes_: bytes, kind: str) -> None:
    def serve(connection: socket.socket, _: threading.Event) -> None:
        connection.recv(65536)
        connection.sendall(bytes_)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(65536)

    with pytest.raises(http.RequestError) as caught:
        http.request("GET", "127.0.0.1", raw(serve).port, "/", timeout_s=10)
    assert caught.value.kind == kind


def test_size_is_bounded(server: Start) -> None:
    one = server(lambda _: Reply(200, body=b"x" * 5000))
    with pytest.raises(http.RequestError) as caught:
        http.request("GET", one.host, one.port, "/", timeout_s=10, max_bytes=4999)
    assert caught.value.kind == "size"
    assert len(http.request("GET", one.host, one.port, "/", timeout_s=10, max_bytes=5000).body) == 5000


def test_ipv6_loopback(server: Start) -> None:
    one = server(lambda request: Reply(200, body=request.headers["host"].encode()), host="::1")
    assert http.request("GET", "::1", one.port, "/", timeout_s=10).body == f"[::1]:{one.port}".encode()


def test_name_with_a_dead_first_address_reaches_the_next(server: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    one = server(lambda _: Reply(200))
    real = socket.getaddrinfo

    def both(host: str, port: int, **options: int) -> object:
        if host != "localhost":
            return real(host, port, **options)
        if options["flags"]:
            raise OSError("not a literal")
        return [*real("::1", port, type=socket.SOCK_STREAM), *real("127.0.0.1", port, type=socket.SOCK_STREAM)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    assert http.request("GET", "localhost", one.port, "/", timeout_s=10).status == 200


@pytest.mark.parametrize("url", ["https://h:1", "h:1", "http://", "http://u:p@h:1", "http://h:1/?q"])
def test_only_plain_http_urls(url: str) -> None:
    with pytest.raises(ValueError, match="expected http://HOST:PORT"):
        http.split(url)


def test_urls_are_split() -> None:
    assert http.split("http://[::1]:80/x/") == ("::1", 80, "/x")
    assert http.split("http://router1") == ("router1", 80, "")
