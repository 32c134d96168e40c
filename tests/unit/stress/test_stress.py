"""The stress test against stand-in engines: it sees each fault, or says that it had no coverage."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dsv4_fleet.cli import main
from dsv4_fleet.judge import evidence
from dsv4_fleet.judge.evidence import strata
from tests.unit.judge.cases import Bench, plan
from tests.unit.stress.conftest import Start, Stress

BF16, OVERLAP, GE_DIFF = "SGLANG_DSV4_BF16_INDEX_K", "SGLANG_OPT_USE_MULTI_STREAM_OVERLAP", "SGLANG_DSV4_GE_DIFF"


def of(result: dict[str, Any], level: str) -> list[dict[str, Any]]:
    return [item for item in result["sessions"] if item["class"] == level]


def kinds(result: dict[str, Any]) -> Counter[str]:
    return Counter(turn["kind"] for item in result["sessions"] for turn in item["turns"] if turn["kind"])


@pytest.mark.parametrize(
    ("env", "least", "most"),
    [
        pytest.param({BF16: "1"}, 0.10, 0.24, id="the fault"),
        pytest.param({BF16: "1", OVERLAP: "0"}, 0, 0, id="the fix"),
        pytest.param({BF16: "1", GE_DIFF: "1"}, 0, 0, id="hidden by GE_DIFF"),
        pytest.param({}, 0, 0, id="no bf16"),
    ],
)
def test_the_storys_numbers(start: Start, stress: Stress, env: dict[str, str], least: float, most: float) -> None:
    engine = start(env=env, settings={"token_ms": 20.0})
    result = stress("--worker", f"w1={engine.url}", sessions=160)
    assert least <= result["rates"]["hard_per_session"] <= most
    assert len(of(result, "hard")) + len(of(result, "clean")) == 160
    spoilt = {item["session"] for item in engine.get("/standin/truth").json()}
    assert len(of(result, "hard")) == len(spoilt)
    assert result["client"]["peak_sessions"] == 80
    assert result["workers"]["w1"]["peak"]["client_requests"] == 80
    assert result["workers"]["w1"]["peak"]["running"] > 16


@pytest.mark.parametrize("kind", ["foreign", "garbled", "markup", "glued", "malformed", "swapped"])
def test_each_kind_of_corruption_is_seen(start: Start, stress: Stress, kind: str) -> None:
    engine = start(faults={"corrupt": {"rate": 0.3, "kinds": [kind]}})
    result = stress("--worker", f"w1={engine.url}", sessions=60)
    spoilt = {item["session"] for item in engine.get("/standin/truth").json()}
    assert len(spoilt) > 5
    seen = of(result, "hard") + of(result, "soft")
    assert len(seen) == len(spoilt)
    # A value that carries no nonce, taken from another session, is all that may look like a slip.
    assert len(of(result, "soft")) <= (len(spoilt) / 2 if kind == "foreign" else 0)
    named = {"foreign": "foreign nonce", "swapped": "foreign nonce", "markup": "raw markup", "glued": "glued call",
             "malformed": "malformed JSON", "garbled": "garbled"}  # fmt: skip
    assert named[kind] in kinds(result)
    assert all(item["suspect"] == "unconfirmed" for item in seen)
    assert all("raw" in turn for item in seen for turn in item["turns"] if turn["class"] != "clean")


@pytest.mark.parametrize(
    ("fault", "stratum"),
    [
        pytest.param({"min_tokens": 60}, "long", id="only long answers"),
        pytest.param({"from_request": 120}, "late", id="only after the 120th request"),
        pytest.param({"min_running": 16}, "crowded", id="only 16 at once"),
        pytest.param({"late": True}, "long", id="only late in an answer"),
    ],
)
def test_a_fault_under_one_condition_is_seen_there(
    start: Start, stress: Stress, fault: dict[str, Any], stratum: str
) -> None:
    engine = start(faults={"corrupt": {"rate": 0.4, **fault}})
    result = stress("--worker", f"w1={engine.url}")
    bad = of(result, "hard")
    assert len(bad) > 3
    assert len(strata(plan(), bad)[stratum]) >= 0.9 * len(bad) or stratum == "long"
    turns = [turn for item in bad for turn in item["turns"] if turn["class"] == "hard"]
    if "min_tokens" in fault:
        assert all(turn["long"] for turn in turns)
    if "from_request" in fault:
        assert all(turn["request"] >= 100 for turn in turns)


def test_a_fault_that_needs_16_at_once_is_not_seen_by_four_and_the_judge_says_so(
    start: Start, stress: Stress, tmp_path: Path
) -> None:
    engine = start(faults={"corrupt": {"rate": 0.4, "min_running": 16}})
    the_plan = plan(sessions=40, exposure={"stratum": 10})
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(the_plan.to_json()), encoding="utf-8")
    result = stress("--worker", f"w1={engine.url}", "--concurrency", "4", sessions=40)
    assert not of(result, "hard")
    result["plan"], result["started"] = the_plan.hash, the_plan.created + 1
    code, verdict = Bench(tmp_path).judge(the_plan, [result], after={"workers": {}})
    assert code == 2
    texts = [reason["text"] for reason in verdict["reasons"]]
    assert any("0 crowded sessions" in text for text in texts)
    assert any("at most 4 sessions open" in text for text in texts)


def test_one_bad_worker_is_told_from_a_good_one(start: Start, stress: Stress) -> None:
    good, bad = start(), start(faults={"corrupt": {"rate": 0.3}})
    result = stress("--worker", f"w1={good.url}", "--control", f"w2={bad.url}", sessions=40)
    assert {item["worker"] for item in of(result, "hard")} == {"w2"}
    assert [result["workers"][name]["arm"] for name in ("w1", "w2")] == ["treatment", "control"]
    scripts = {name: [item["script"] for item in result["sessions"] if item["worker"] == name] for name in ("w1", "w2")}
    assert scripts["w1"] == scripts["w2"]


def test_an_honest_models_errors_are_the_models_and_do_not_count(start: Start, stress: Stress) -> None:
    engine = start(faults={"soft_errors": {"rate": 0.1}})
    result = stress("--worker", f"w1={engine.url}")
    assert result["counts"]["hard"] == result["counts"]["soft"] == 0
    assert result["counts"]["model"] > 3
    assert all((item["suspect"], len(item["replays"]) % 3) == ("soft", 0) for item in of(result, "model"))
    assert all(replay["cache_flushed"] for item in of(result, "model") for replay in item["replays"])


def test_a_worker_that_stays_broken_is_not_taken_for_an_honest_model(start: Start, stress: Stress) -> None:
    engine = start(faults={"corrupt": {"rate": 0.1, "sticky": True}})
    result = stress("--worker", f"w1={engine.url}", sessions=30)
    assert sum(evidence.is_good(item) for item in result["sessions"]) < 10


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"stream_no_done": {}}, "no [DONE]"),
        ({"stream_error": {"after_chunks": 3}}, "an error inside a 200 answer"),
        ({"stream_no_choices": {}}, "no finish reason"),
    ],
)
def test_streams_without_a_right_end_are_failed(start: Start, stress: Stress, fault: dict[str, Any], kind: str) -> None:
    engine = start(faults=fault)
    result = stress("--worker", f"w1={engine.url}", sessions=20)
    assert set(kinds(result)) == {kind}
    for item in result["sessions"]:
        assert (item["class"] == "failed") == any(turn["stream"] for turn in item["turns"])


def test_a_worker_that_dies_gives_failed_sessions(start: Start, stress: Stress) -> None:
    engine = start(faults={"dies": {"after_s": 6.0}}, settings={"token_ms": 60.0})
    result = stress("--worker", f"w1={engine.url}", sessions=90)
    assert result["counts"]["failed"] > 0
    assert result["workers"]["w1"]["after"] == {"settings": None, "version": None, "requests": None}


def test_a_session_is_run_again_alone(start: Start, stress: Stress) -> None:
    engine = start(faults={"corrupt": {"rate": 0.3}})
    first = stress("--worker", f"w1={engine.url}", sessions=40)
    bad = of(first, "hard")[0]
    again = stress("--worker", f"w1={engine.url}", "--only", str(bad["index"]), sessions=40)
    assert [(item["index"], item["script"], item["class"]) for item in again["sessions"]] == [
        (bad["index"], bad["script"], "clean")
    ]


def test_a_decode_worker_is_reached_together_with_a_prefill(start: Start, stress: Stress) -> None:
    from tests.unit.standin.standin_process import free_port

    bootstrap = free_port()
    prefill = start("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(bootstrap))
    decode = start("--disaggregation-mode", "decode", env={BF16: "1"})
    result = stress("--worker", f"d1={decode.url}", "--prefill", f"{prefill.url},{bootstrap}", sessions=40)
    assert result["counts"]["failed"] == 0
    assert result["counts"]["hard"] > 0


def test_through_a_router_the_worker_is_unknown(start: Start, stress: Stress) -> None:
    engine = start()
    result = stress("--router", engine.url, "--watch", engine.url, sessions=20)
    assert result["workers"]["router"]["direct"] is False
    assert result["counts"]["clean"] == 20


def test_ctrl_c_gives_the_result_so_far(start: Start, tmp_path: Path) -> None:
    engine = start(settings={"token_ms": 20.0})
    path = tmp_path / "result.json"
    words = ["stress", "--worker", f"w1={engine.url}", "--sessions", "5000", "--output", str(path)]
    process = subprocess.Popen([sys.executable, "-m", "dsv4_fleet", *words], stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while engine.load()["num_running_reqs"] < 20 and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    result = json.loads(path.read_text(encoding="utf-8"))
    evidence.check()(result)
    assert result["interrupted"]
    assert result["cut_sessions"] == 80
    assert "interrupted: 80 open sessions were cut" in out


def test_a_run_that_is_a_fail_already_stops_and_is_judged_so(start: Start, tmp_path: Path) -> None:
    engine = start(faults={"corrupt": {"rate": 0.5}})
    the_plan = plan()
    result_path, plan_path = tmp_path / "first.json", tmp_path / "plan.json"
    plan_path.write_text(json.dumps(the_plan.to_json()), encoding="utf-8")
    words = ["stress", "--plan", str(plan_path), "--worker", f"new1={engine.url}", "--output", str(result_path)]
    assert main(words) == 0
    result = json.loads(result_path.read_text(encoding="utf-8"))
    evidence.check()(result)
    assert (result["stopped_early"], result["interrupted"]) == (True, False)
    assert len(result["sessions"]) < 100 < the_plan.exposure.sessions
    assert all(len(item["replays"]) >= 3 for item in of(result, "hard"))
    result["started"] = the_plan.created + 1
    code, verdict = Bench(tmp_path).judge(the_plan, [result], after={"workers": {}})
    assert (code, verdict["verdict"]) == (1, "FAIL")


def test_the_control_alone_does_not_stop_a_run(start: Start, tmp_path: Path) -> None:
    engine = start(faults={"corrupt": {"rate": 0.5}}, settings={"token_ms": 1.0})
    path, output = tmp_path / "plan.json", tmp_path / "result.json"
    path.write_text(json.dumps(plan(sessions=100).to_json()), encoding="utf-8")
    assert main(["stress", "--plan", str(path), "--control", f"old1={engine.url}", "--output", str(output)]) == 0
    result = json.loads(output.read_text(encoding="utf-8"))
    assert (result["stopped_early"], len(result["sessions"])) == (False, 100)


def test_the_bar_counts_live_where_somebody_looks(start: Start, tmp_path: Path) -> None:
    engine = start(faults={"corrupt": {"rate": 0.5}})
    words = ["stress", "--worker", f"w1={engine.url}", "--sessions", "20", "--output", str(tmp_path / "result.json")]
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    process = subprocess.Popen([sys.executable, "-m", "dsv4_fleet", *words], stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal says that the other side is gone
        while data := os.read(ours, 65536):
            shown += data
    os.close(ours)
    assert process.wait(60) == 0
    counts = re.findall(rb"(\d+)/20 [^\r]*failed=0, hard=(\d+), open=(\d+), soft=\d+", shown)
    assert counts, shown.decode().splitlines()
    assert int(counts[-1][1]) > 0
    assert all(int(ended) + int(still) == 20 for ended, _, still in counts)
    assert b"replayed alone: 1 of" in shown


def test_rates_are_per_session_and_per_million_tokens(start: Start, stress: Stress) -> None:
    engine = start(faults={"corrupt": {"rate": 0.5}})
    result = stress("--worker", f"w1={engine.url}", sessions=20)
    tokens = sum(turn["completion_tokens"] for item in result["sessions"] for turn in item["turns"])
    hard = len(of(result, "hard"))
    assert hard > 3
    assert result["rates"] == {
        "hard_per_session": hard / 20,
        "hard_per_million_tokens": pytest.approx(1e6 * hard / tokens),
        "completion_tokens": tokens,
    }


def test_a_worker_is_measured_once_under_one_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = tmp_path / "plan.json", tmp_path / "result.json"
    path.write_text(json.dumps(plan().to_json()), encoding="utf-8")
    output.write_text("an earlier result", encoding="utf-8")
    words = ["stress", "--plan", str(path), "--worker", "w1=http://127.0.0.1:9", "--output", str(output)]
    assert main(words) == 2
    assert "measured once under one plan" in capsys.readouterr().err
    assert output.read_text(encoding="utf-8") == "an earlier result"


@pytest.mark.parametrize("text", ["", "{}", "[]", "changed", None])
def test_a_plan_that_is_none_or_was_changed_is_refused(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    if text == "changed":
        text = json.dumps({**plan().to_json(), "seed": 7})
    if text is not None:
        path.write_text(text, encoding="utf-8")
    output = tmp_path / "result.json"
    words = ["stress", "--plan", str(path), "--worker", "w1=http://127.0.0.1:9", "--output", str(output)]
    assert main(words) == 2
    assert "plan" in capsys.readouterr().err
    assert not output.exists()


def test_a_result_that_could_not_be_written_is_refused_before_the_run(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = start()
    (tmp_path / "file").touch()
    for output in (tmp_path, tmp_path / "file" / "result.json"):
        assert main(["stress", "--worker", f"w1={engine.url}", "--sessions", "1", "--output", str(output)]) == 2
        assert "found" in capsys.readouterr().err
    total = re.search(r"^sglang:num_requests_total\{.*\} ([0-9.]+)$", engine.get("/metrics").text, re.MULTILINE)
    assert total and float(total[1]) <= 1  # the one that the server sends itself


def test_a_worker_that_is_not_there_is_said_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "result.json"
    assert main(["stress", "--worker", "w1=http://127.0.0.1:9", "--output", str(output)]) == 2
    error = capsys.readouterr().err
    assert "http://127.0.0.1:9/v1/models" in error and "w1" in error
    assert not output.exists()


def test_a_key_that_is_asked_for_comes_from_the_environment(
    start: Start, stress: Stress, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    engine = start("--api-key", "word")
    words = ["stress", "--worker", f"w1={engine.url}", "--output", str(tmp_path / "no.json")]
    assert main(words) == 2
    assert "DSV4_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv("DSV4_API_KEY", "word")
    assert stress("--worker", f"w1={engine.url}", sessions=5)["counts"]["clean"] == 5


@pytest.mark.parametrize(
    "words",
    [[], ["--worker", "w1"], ["--worker", "w1=ftp://x"], ["--worker", "w=http://x", "--router", "http://x"],
     ["--worker", "w=http://x", "--control", "w=http://y"], ["--worker", "w=http://x", "--prefill", "http://x"],
     ["--worker", "w=http://x", "--concurrency", "0"], ["--worker", "w=http://"], ["--worker", "w=http://x:port"],
     ["--worker", "w=http://[x"], ["--router", "x:8000"], ["--router", "http://x", "--watch", "x"],
     ["--worker", "w=http://x", "--prefill", "x,8998"]],
)  # fmt: skip
def test_targets_without_sense_are_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stress", *words, "--output", str(tmp_path / "no.json")]) == 2
    error = capsys.readouterr().err
    assert "expected" in error
    assert "no answer" not in error  # refused before anything was sent
