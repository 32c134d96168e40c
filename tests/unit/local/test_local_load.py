"""What counts as served and as lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.local.load import Load, judge
from tests.local.settings import LocalError

CHUNK = 'data: {"choices": [{"delta": {"content": "1"}}]}'
DONE = "data: [DONE]"


@pytest.mark.parametrize(
    ("status", "lines", "reason"),
    [
        (200, [CHUNK, "", CHUNK, "", DONE], None),
        (200, [": a comment", CHUNK, DONE], None),
        (503, [], "HTTP 503"),
        (200, [CHUNK, CHUNK], "without [DONE]"),
        (200, [], "without [DONE]"),
        (200, [CHUNK, 'data: {"error": {"message": "x"}}', DONE], "error inside"),
        (200, [DONE], "without choices"),
        (200, ['data: {"choices": []}', DONE], "without choices"),
        (200, [CHUNK, "data: {cut", DONE], "not JSON"),
        (200, ["data: 3", DONE], "error inside"),
    ],
)
def test_an_answer_is_served_or_lost(status: int, lines: list[str], reason: str | None) -> None:
    found = judge(status, lines)
    assert found is None if reason is None else found is not None and reason in found


class Answers(BaseHTTPRequestHandler):
    """Streams two chunks; every third answer is cut before its end."""

    count = 0
    lock = threading.Lock()

    def do_POST(self) -> None:
        with self.lock:
            Answers.count = number = Answers.count + 1
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        end = "" if number % 3 == 0 else f"{DONE}\n\n"
        self.wfile.write(f"{CHUNK}\n\n{CHUNK}\n\n{end}".encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    Answers.count = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_every_request_is_counted_once(url: str) -> None:
    with Load(url, clients=2, pause_s=0.0) as load:
        load.wait_served(10)
    tally = load.tally
    assert tally.served + tally.lost_count == Answers.count
    assert tally.lost == {"a stream without [DONE]": Answers.count // 3}
    assert str(tally).startswith(f"{tally.served} served, {tally.lost_count} lost (")


def test_proxy_variables_do_not_matter(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with Load(url, clients=1) as load:
        load.wait_served(1)
    assert load.tally.served >= 1


def test_nobody_answering_is_lost_requests() -> None:
    load = Load("http://127.0.0.1:9", clients=1, pause_s=0.01)
    with load, pytest.raises(LocalError, match="expected 1 served"):
        load.wait_served(1, seconds=0.5)
    assert load.tally.served == 0 and load.tally.lost_count > 0


def test_it_stops_by_itself(url: str) -> None:
    with Load(url, clients=1, seconds=0.2) as load:
        load._thread.join(30)
        assert not load._thread.is_alive()
