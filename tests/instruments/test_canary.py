"""The canary on the CPU: pools of the three layouts, rows as upstream's decode and verify have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dsv4_probe import canary
from dsv4_probe.canary import expected_pages, slots_of

from tests.instruments.fakes import POOL_PAGES, Server


@pytest.fixture(params=["fp8", "fp4", "bf16"])
def server(request: Any, report: Any) -> Server:
    made = Server(report, request.param)
    made.request(1, 900)
    made.request(2, 260)
    return made


def test_legal_writes_are_clean(server: Server, report: Any) -> None:
    batch = server.batch([1, 2], [512, 260])  # 512 and 260 are multiples of 4: both rows write
    pages = [int(location) // 256 for location in batch.out_cache_loc]
    server.step(batch, *((layer, pages[0], 63) for layer in (0, 1)), (0, pages[1], 0))
    server.step(server.batch([1, 2], [513, 261]))
    assert report.events == {("canary", "clean"): 2} and report.lines() == []
    assert server.canary.status()["page_changes"] == 3


def test_a_stray_write_is_named_with_its_pages_and_slots(server: Server, report: Any) -> None:
    batch = server.batch([1, 2], [512, 260])
    legal = int(batch.out_cache_loc[0]) // 256
    stray = int(server.req_to_token[1, 256]) // 256
    assert legal == stray  # the legal page, but other slots of it
    other = int(server.req_to_token[1, 0]) // 256
    server.step(batch, (0, legal, 63), (0, legal, 5), (1, other, 0), (1, other, 40))
    [event] = report.lines()
    assert (event["verdict"], event["alarm"], event["step"], event["bucket"]) == ("outside", True, 1, "key")
    assert (event["changed"], event["expected"], event["outside"]) == (2, 2, 2)
    assert event["page_numbers"] == sorted([legal, other])
    assert event["pages"] == [
        {"layer": 1, "page": legal, "row": 0, "slots": [5], "changed_slots": [5, 63]},
        {"layer": 2, "page": other, "row": 0, "slots": [0, 40], "changed_slots": [0, 40]},
    ]


def test_a_row_that_does_not_write_makes_every_write_stray(server: Server, report: Any) -> None:
    batch = server.batch([1], [511])
    server.step(batch, (0, int(batch.out_cache_loc[0]) // 256, 63))
    assert report.events["canary", "outside"] == 1


def test_several_tokens_a_row(server: Server, report: Any) -> None:
    batch = server.batch([1, 2], [514, 260], per_row=5)  # positions 509…513 and 255…259
    first, second = int(server.req_to_token[1, 511]) // 256, int(server.req_to_token[2, 259]) // 256
    old = int(server.req_to_token[2, 255]) // 256
    server.step(batch, (0, first, 63), (0, second, 0), (0, old, 63))
    assert report.events == {("canary", "clean"): 1}, report.lines()
    server.step(batch, (0, int(server.req_to_token[1, 513]) // 256, 0))
    assert report.events["canary", "outside"] == 1


def test_location_zero_is_legal_at_every_replay(server: Server, report: Any) -> None:
    server.req_to_token[3, :4] = torch.arange(4)  # a row that uses page 0
    server.step(server.batch([3], [3]), (0, 0, 0), (1, 0, 0))
    assert report.events == {("canary", "clean"): 1}
    server.step(server.batch([3], [3]), (0, 0, 1))
    assert report.events["canary", "outside"] == 1


def test_pages_of_others_are_never_looked_at(server: Server, report: Any) -> None:
    batch = server.batch([1], [512])
    foreign = int(server.req_to_token[2, 0]) // 256
    server.step(batch, (0, foreign, 7))
    server.write(0, foreign, 9)
    server.step(batch)
    assert report.events == {("canary", "clean"): 2}


def test_a_change_between_replays_is_external(server: Server, report: Any) -> None:
    batch = server.batch([1], [512])
    page = int(server.req_to_token[1, 0]) // 256
    server.step(batch)
    server.write(1, page, 12)
    server.step(batch)
    [event] = report.lines()
    assert (event["verdict"], event["alarm"], event["page_numbers"]) == ("external", False, [page])
    assert event["pages"][0]["slots"] == [12] and event["pages"][0]["layer"] == 2
    assert report.events["canary", "outside"] == 0


def test_a_page_that_another_request_got_meanwhile_is_no_external_change(server: Server, report: Any) -> None:
    server.step(server.batch([1], [200]))
    server.step(server.batch([2], [200]))
    assert report.events == {("canary", "clean"): 2}


def test_the_story_in_its_numbers(report: Any) -> None:
    server = Server(report, "bf16", layers=8)
    server.request(1, 700)
    server.request(2, 700)
    batch = server.batch([1, 2], [512, 300])
    legal = [(int(batch.out_cache_loc[0]) // 256, 63), (int(batch.out_cache_loc[1]) // 256, 10)]
    stray = [(int(server.req_to_token[1, 0]) // 256, 3), (int(server.req_to_token[2, 0]) // 256, 30)]
    server.step(batch, *((layer, page, slot) for layer in range(8) for page, slot in legal + stray))
    [event] = report.lines()
    assert (event["changed"], event["expected"], event["outside"]) == (32, 2, 16)
    assert event["page_numbers"] == sorted(page for page, _ in stray)


def test_more_layers_than_memory_take_turns(report: Any, monkeypatch: Any, capsys: Any) -> None:
    server = Server(report, layers=3)
    server.request(1, 300)
    monkeypatch.setattr(canary, "MAX_BYTES", 3 * 8 * 65 * 4)  # room for one layer of eight pages, thrice
    batch = server.batch([1], [300])
    server.canary.largest = 2
    stray = int(server.req_to_token[1, 0]) // 256
    seen = []
    for _ in range(6):
        server.step(batch, (1, stray, 8))
        seen.append(report.events["canary", "outside"])
    assert "by turns" in capsys.readouterr().err
    assert 1 <= seen[-1] < 6 and server.canary.status()["layers_a_replay"] < 3
    assert report.events["canary", "external"] == 0  # what other layers left behind is no change


@pytest.mark.parametrize(
    ("tokens", "positions"),
    [
        (3, 3),  # two rows with three tokens
        (0, 0),  # no token at all
        (1, 1),  # fewer tokens than rows
        (2 * (canary.MOST_TOKENS_PER_ROW + 1), 2 * (canary.MOST_TOKENS_PER_ROW + 1)),
        (4, 3),  # a token without its position
    ],
)
def test_rows_that_do_not_hold_as_many_tokens_each_are_skipped_and_counted(
    server: Server, report: Any, tokens: int, positions: int
) -> None:
    batch = server.batch([1, 2], [512, 260])
    batch.out_cache_loc = batch.out_cache_loc[:1].repeat(tokens)
    batch.positions = batch.positions[:1].repeat(positions)
    server.step(batch)
    assert server.canary.status()["skipped"] == {"no even rows": 1} and not report.events
    server.step(server.batch([1, 2], [512, 260]))
    assert report.events == {("canary", "clean"): 1}


@pytest.mark.parametrize("missing", ["out_cache_loc", "positions"])
def test_a_batch_without_places_is_skipped_and_counted(server: Server, report: Any, missing: str) -> None:
    batch = server.batch([1], [512])
    setattr(batch, missing, None)
    server.step(batch)
    assert server.canary.status()["skipped"] == {"no even rows": 1} and not report.events


def test_a_batch_without_rows_is_skipped_and_counted(server: Server, report: Any) -> None:
    server.step(server.batch([], []))
    assert server.canary.status()["skipped"] == {"no even rows": 1} and not report.events


def test_as_many_tokens_a_row_as_a_draft_may_have(server: Server, report: Any) -> None:
    batch = server.batch([1, 2], [512, 260], per_row=canary.MOST_TOKENS_PER_ROW)
    server.step(batch, (0, int(server.req_to_token[1, 511]) // 256, 63))
    assert report.events == {("canary", "clean"): 1}, report.lines()


def test_a_page_that_only_draft_tokens_reach_is_seen(server: Server, report: Any) -> None:
    batch = server.batch([1], [260], per_row=5)  # positions 255…259, the last four in the second page
    batch.seq_lens_cpu -= 5  # under speculative decoding, the lengths before these tokens
    second = int(server.req_to_token[1, 256]) // 256
    server.step(batch, (0, second, 0))
    assert report.events == {("canary", "clean"): 1}, report.lines()
    server.step(batch, (0, second, 9))
    assert report.events["canary", "outside"] == 1


def test_without_lengths_on_the_host_every_page_is_still_seen(server: Server, report: Any) -> None:
    batch = server.batch([1], [900])
    batch.seq_lens_cpu = None
    server.step(batch, (1, int(server.req_to_token[1, 899]) // 256, 0))
    assert report.events == {("canary", "outside"): 1}


def test_what_was_found_is_told_at_the_next_replay(server: Server, report: Any) -> None:
    batch = server.batch([1], [512])
    server.canary.begins(server.runner, "key", batch)
    server.write(0, int(server.req_to_token[1, 0]) // 256, 7)
    server.canary.ends(server.runner, "key", batch)
    assert not report.events
    server.canary.begins(server.runner, "key", batch)
    assert report.events == {("canary", "outside"): 1}


def test_rows_longer_than_there_is_memory_for_are_watched_as_far_as_it_goes(
    server: Server, report: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(canary, "MAX_BYTES", 3 * 65 * 4)  # one row's first three pages, on one layer
    batch = server.batch([1], [768])
    batch.seq_lens_cpu -= 1
    server.step(batch, (0, int(server.req_to_token[1, 600]) // 256, 7))  # in the third page
    assert report.events == {("canary", "outside"): 1} and server.canary.status()["skipped"] == {}
    server.step(server.batch([1], [900]))
    assert server.canary.status()["skipped"] == {"pages past the kept width": 1}


def test_more_rows_than_ever_before_are_taken_in(server: Server, report: Any) -> None:
    server.step(server.batch([1], [512]))
    batch = server.batch([1, 2], [513, 261])
    server.step(batch, (0, int(server.req_to_token[2, 0]) // 256, 1))
    assert report.events == {("canary", "clean"): 1, ("canary", "outside"): 1}
    assert server.canary.status()["replays"] == 2


def test_a_pool_of_another_form_is_refused(report: Any) -> None:
    server = Server(report)
    server.request(1, 10)
    server.buffers[:] = [torch.zeros((POOL_PAGES, 1000), dtype=torch.uint8)]
    with pytest.raises(ValueError, match="1000 bytes; known are"):
        server.step(server.batch([1], [10]))


def test_expected_pages() -> None:
    assert expected_pages([1027, 1028, 2000], [3, 4, 7]) == {4: {0}, 7: {52}}
    assert slots_of(-1, 0) == list(range(32)) and slots_of(0, 1 << 31) == [63]
