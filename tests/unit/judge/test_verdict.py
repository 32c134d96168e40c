"""Verdicts through the command line: what passes, what fails, and all that must be INCONCLUSIVE."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from dsv4_fleet.cli import main
from dsv4_fleet.judge import plan as plans
from tests.unit.judge.cases import GE_DIFF, OVERLAP, SESSIONS, STARTED, Bench, facts, plan, result

CLEAN: dict[str, dict[str, int]] = {"new1": {}, "old1": {"hard": 50}}


def codes(verdict: dict[str, Any]) -> list[str]:
    return sorted({reason["code"] for reason in verdict["reasons"]})


def test_clean_data_beside_a_control_with_the_fault_pass(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    the_plan = plan()
    code, verdict = bench.judge(the_plan, [result(the_plan, CLEAN)])
    assert (code, verdict["verdict"], verdict["reasons"]) == (0, "PASS", [])
    assert verdict["wave"]["upper"] == pytest.approx(1 - 0.05 ** (1 / SESSIONS))
    assert verdict["control"]["rate"] == pytest.approx(50 / SESSIONS)
    assert verdict["wave"]["more_sessions"] == {"0.01": 0, "0.005": 598 - SESSIONS, "0.001": 2995 - SESSIONS}
    assert verdict["arms_differ"]
    words = capsys.readouterr().out
    assert words.splitlines()[-1] == "verdict: PASS"
    assert "268 for 0.50%" in words


def test_none_of_eighty_is_only_below_three_point_seven_percent(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    the_plan = plan(sessions=80)
    code, verdict = bench.judge(the_plan, [result(the_plan, {"new1": {}, "old1": {"hard": 13}}, sessions=80)])
    assert (code, verdict["verdict"]) == (2, "INCONCLUSIVE")
    assert {"too_few_workers", "no_coverage"} == set(codes(verdict))
    words = capsys.readouterr().out
    assert "0 corrupted of 80 sessions (0.0%; 95 % bounds: above 0.00%, below 3.68%)" in words
    assert "for a stronger claim: 219 for 1.00%" in words


def test_the_fault_fails_and_the_report_says_where(bench: Bench) -> None:
    the_plan = plan(waves=(2,))
    code, verdict = bench.judge(the_plan, [result(the_plan, {"new1": {}, "new2": {"hard": 45}, "old1": {"hard": 50}})])
    assert (code, verdict["verdict"]) == (1, "FAIL")
    assert "new2" in verdict["reasons"][0]["text"]
    assert verdict["evidence"]["fail_after_sessions"] < 2 * SESSIONS


def test_the_fault_fails_before_the_planned_exposure(bench: Bench) -> None:
    the_plan = plan()
    code, verdict = bench.judge(the_plan, [result(the_plan, {"new1": {"hard": 6}}, sessions=40)])
    assert (code, verdict["verdict"]) == (1, "FAIL")
    assert "too_few_sessions" in codes(verdict)


Change = Callable[[dict[str, Any]], None]


def to_worker(**values: Any) -> Change:
    return lambda run: run["workers"]["new1"].update(values)


def to_peak(**values: Any) -> Change:
    return lambda run: run["workers"]["new1"]["peak"].update(values)


def to_declared(name: str, **values: Any) -> Change:
    return lambda run: run["workers"][name]["declared"].update(values)


def to_session(index: int, **values: Any) -> Change:
    def change(run: dict[str, Any]) -> None:
        next(item for item in run["sessions"] if (item["worker"], item["index"]) == ("new1", index)).update(values)

    return change


def to_turns(name: str, **values: Any) -> Change:
    def change(run: dict[str, Any]) -> None:
        for item in run["sessions"]:
            if item["worker"] == name:
                for turn in item["turns"]:
                    turn.update(values)

    return change


def without_sessions(run: dict[str, Any]) -> None:
    run["sessions"] = [item for item in run["sessions"] if item["worker"] != "new1"]


def without_control(run: dict[str, Any]) -> None:
    del run["workers"]["old1"]
    run["sessions"] = [item for item in run["sessions"] if item["worker"] != "old1"]


def much_earlier(run: dict[str, Any]) -> None:
    for item in run["sessions"]:
        if item["worker"] == "old1":
            item["started"] -= 9000
            item["ended"] -= 9000


def other_script(run: dict[str, Any]) -> None:
    run["sessions"][0]["script"] = "another"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        pytest.param(without_sessions, "too_few_sessions", id="no data"),
        pytest.param(lambda run: run["sessions"].pop(0), "too_few_sessions", id="one session too few"),
        pytest.param(to_session(5, **{"class": "failed"}), "failed_sessions", id="a failed session"),
        pytest.param(lambda run: run.update(interrupted=True), "interrupted", id="interrupted"),
        pytest.param(to_peak(client_sessions=79), "concurrency", id="79 open at the client"),
        pytest.param(to_peak(running=12), "concurrency", id="12 at once at the worker"),
        pytest.param(to_peak(running=None), "concurrency", id="the worker does not say"),
        pytest.param(
            lambda run: run["workers"]["old1"]["peak"].update(client_sessions=1), "concurrency", id="control alone"
        ),
        pytest.param(
            to_worker(requests=200, after={"settings": "same", "version": None, "requests": 210}),
            "exposure",
            id="too few requests since boot",
        ),
        pytest.param(to_turns("new1", completion_tokens=1), "exposure", id="too few tokens"),
        pytest.param(to_turns("new1", long=False), "no_coverage", id="no long answers"),
        pytest.param(to_turns("new1", request=100), "no_coverage", id="no late answers"),
        pytest.param(to_turns("new1", beside=15), "no_coverage", id="never crowded"),
        pytest.param(to_turns("new1", stream=False), "no_coverage", id="nothing streamed"),
        pytest.param(to_worker(cache_flushed=False), "cache_kept", id="cache not flushed"),
        pytest.param(to_declared("new1", instruments=[GE_DIFF]), "diagnostics", id="GE_DIFF on"),
        pytest.param(to_declared("old1", instruments=[GE_DIFF]), "diagnostics", id="GE_DIFF on the control"),
        pytest.param(to_worker(declared=None), "state_unknown", id="state unknown"),
        pytest.param(to_declared("new1", state=None), "state_unknown", id="no state in its process"),
        pytest.param(to_declared("new1", release=None), "state_unknown", id="processes of two releases"),
        pytest.param(to_declared("new1", flags={}), "state_unknown", id="no passports"),
        pytest.param(
            to_worker(after={"settings": "other", "version": None, "requests": 2000}),
            "state_changed",
            id="other settings after",
        ),
        pytest.param(
            to_worker(after={"settings": "same", "version": None, "requests": 300}),
            "state_changed",
            id="request counter went back",
        ),
        pytest.param(to_worker(direct=False), "worker_unknown", id="through a router"),
        pytest.param(without_control, "no_control", id="no old worker left"),
        pytest.param(to_declared("old1", restarted_at=None), "not_restarted", id="control not restarted"),
        pytest.param(
            to_declared("old1", restarted_at=STARTED - 90_000), "not_restarted", id="control restarted long ago"
        ),
        pytest.param(much_earlier, "apart", id="control at another time"),
        pytest.param(other_script, "unpaired", id="other scripts"),
        pytest.param(lambda run: run["sessions"].append(run["sessions"][3]), "double_session", id="a session twice"),
        pytest.param(lambda run: run.update(plan=None), "other_plan", id="run without the plan"),
        pytest.param(lambda run: run.update(started=5.0), "plan_too_late", id="plan made after the run"),
        pytest.param(lambda run: run.update(seed=2), "other_scripts", id="other seed"),
        pytest.param(
            to_session(5, **{"class": "model", "suspect": "hard"}), "wave_not_clear", id="hard, but alone too"
        ),
        pytest.param(
            to_session(5, **{"class": "soft", "suspect": "unconfirmed"}), "wave_not_clear", id="one soft error"
        ),
    ],
)
def test_inconclusive(bench: Bench, change: Change, code: str) -> None:
    the_plan = plan()
    run = result(the_plan, CLEAN)
    unchanged = facts(run)
    change(run)
    after = {
        "workers": {**unchanged["workers"], **{name: item for name, item in facts(run)["workers"].items() if item}}
    }
    exit_code, verdict = bench.judge(the_plan, [run], after=after)
    assert (exit_code, verdict["verdict"]) == (2, "INCONCLUSIVE")
    assert code in codes(verdict)


def test_no_result_at_all_is_inconclusive(bench: Bench) -> None:
    code, verdict = bench.judge(plan(), [])
    assert (code, verdict["verdict"]) == (2, "INCONCLUSIVE")
    assert codes(verdict) == ["no_control", "no_data"]


def test_an_error_that_the_model_makes_alone_does_not_count(bench: Bench) -> None:
    the_plan = plan()
    run = result(the_plan, CLEAN)
    for item in run["sessions"]:
        if item["index"] % 60 == 0 and item["class"] == "clean":
            item.update({"class": "model", "suspect": "soft"})
    code, verdict = bench.judge(the_plan, [run])
    assert (code, verdict["wave"]["model"], verdict["control"]["model"]) == (0, 6, 5)


def test_a_worker_that_errs_alone_more_than_the_others_may_be_broken_for_good(bench: Bench) -> None:
    the_plan = plan()
    run = result(the_plan, CLEAN)
    for index in range(0, 300, 10):
        to_session(index, **{"class": "model", "suspect": "soft"})(run)
    code, verdict = bench.judge(the_plan, [run])
    assert (code, codes(verdict)) == (2, ["model_errors"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("state", "other"), ("release", "other"), ("flags", {OVERLAP: True}), ("instruments", [GE_DIFF]),
        ("boot_id", "other"), ("main_pid", 8), ("start_time", 100),
    ],
)  # fmt: skip
def test_a_worker_that_changed_during_the_run_is_inconclusive_even_with_the_fault(
    bench: Bench, key: str, value: object
) -> None:
    the_plan = plan()
    run = result(the_plan, {"new1": {"hard": 50}, "old1": {"hard": 50}})
    after = facts(run)
    after["workers"]["new1"][key] = value
    code, verdict = bench.judge(the_plan, [run], after=after)
    assert (code, verdict["verdict"]) == (2, "INCONCLUSIVE")
    assert "state_changed" in codes(verdict)


def test_no_word_of_the_worker_after_the_run_is_no_pass(bench: Bench) -> None:
    the_plan = plan()
    code, verdict = bench.judge(the_plan, [result(the_plan, CLEAN)], after={"workers": {}})
    assert (code, codes(verdict)) == (2, ["state_unknown"])


def test_a_planned_instrument_may_be_on(bench: Bench) -> None:
    the_plan = plan(diagnostics={"treatment": [GE_DIFF]})
    run = result(the_plan, CLEAN)
    to_declared("new1", instruments=[GE_DIFF])(run)
    assert bench.judge(the_plan, [run])[0] == 0


def test_flags_that_are_not_as_planned_are_inconclusive(bench: Bench) -> None:
    the_plan = plan(expect={"treatment": {OVERLAP: False}, "control": {OVERLAP: True}})
    run = result(the_plan, CLEAN)
    assert bench.judge(the_plan, [run])[0] == 0
    to_declared("old1", flags={OVERLAP: False})(run)
    code, verdict = bench.judge(the_plan, [run])
    assert (code, codes(verdict)) == (2, ["other_state"])


def test_a_silent_control_voids_the_comparison(bench: Bench) -> None:
    the_plan = plan()
    code, verdict = bench.judge(the_plan, [result(the_plan, {"new1": {}, "old1": {"hard": 4}})])
    assert (code, codes(verdict)) == (2, ["control_silent"])


def test_too_few_workers_for_the_claim(bench: Bench) -> None:
    the_plan = plan(icc=0.1)
    code, verdict = bench.judge(the_plan, [result(the_plan, CLEAN)])
    assert (code, codes(verdict)) == (2, ["too_few_workers"])
    assert not verdict["pass_within_reach"]


def test_a_changed_plan_is_inconclusive(bench: Bench) -> None:
    the_plan = plan()
    changed = the_plan.to_json()
    changed["questions"]["allowed"] = 0.05
    code, verdict = bench.judge(changed, [result(the_plan, CLEAN)])
    assert (code, verdict["verdict"], codes(verdict)) == (2, "INCONCLUSIVE", ["unusable_input"])
    assert "was changed after it was made" in verdict["reasons"][0]["text"]


@pytest.mark.parametrize("broken", ["", "[]", '{"kind": "dsv4-fleet stress"}', "\0"])
def test_a_result_that_cannot_be_read_is_inconclusive(bench: Bench, broken: str) -> None:
    code, verdict = bench.judge(plan(), [broken])
    assert (code, verdict["verdict"], codes(verdict)) == (2, "INCONCLUSIVE", ["unusable_input"])


def test_a_judge_that_crashes_is_inconclusive(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    the_plan = plan()

    def crash(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("dsv4_fleet.judge.report.decide", crash)
    code, verdict = bench.judge(the_plan, [result(the_plan, CLEAN)])
    assert (code, verdict["verdict"]) == (2, "INCONCLUSIVE")
    assert verdict["reasons"][0]["text"] == "RuntimeError: planted"


def test_a_judge_that_is_killed_leaves_no_older_verdict(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    the_plan = plan()
    assert bench.judge(the_plan, [result(the_plan, CLEAN)])[1]["verdict"] == "PASS"

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dsv4_fleet.judge.report.decide", killed)
    with pytest.raises(KeyboardInterrupt):
        bench.judge(the_plan, [result(the_plan, CLEAN)])
    assert '"INCONCLUSIVE"' in (bench.place / "verdict.json").read_text(encoding="utf-8")


def test_a_gate_that_is_not_certified_says_nothing(bench: Bench) -> None:
    the_plan = plan()
    run = result(the_plan, {"new1": {"hard": 50}, "old1": {"hard": 50}})
    code, verdict = bench.judge(the_plan, [run], options=("--certificate", bench.write("certificate.json", {})))
    assert (code, verdict["verdict"]) == (2, "INCONCLUSIVE")
    assert "not_certified" in codes(verdict)


# ---- several waves


def wave(the_plan: plans.Plan, number: int, hard: int = 0, control: bool = True) -> dict[str, Any]:
    run = result(
        the_plan, {f"new{number}": {"hard": hard}, **({"old1": {"hard": 60}} if control else {})}, sessions=450
    )
    return run


@pytest.fixture
def two() -> plans.Plan:
    return plan(waves=(1, 1), sessions=450)


def test_the_pool_is_judged_too(bench: Bench, two: plans.Plan) -> None:
    code, verdict = bench.judge(two, [wave(two, 2)], earlier=[wave(two, 1)])
    assert (code, verdict["pool"]["workers"]) == (0, 2)
    code, verdict = bench.judge(two, [wave(two, 2)], earlier=[wave(two, 1, hard=9)])
    assert code != 0
    assert verdict["wave"]["hard"] == 0


def test_earlier_clean_waves_do_not_outvote_a_bad_worker(bench: Bench, two: plans.Plan) -> None:
    many = [wave(two, number, control=False) for number in range(3, 12)]
    assert bench.judge(two, [wave(two, 2, hard=60)], earlier=many)[0] == 1
    code, verdict = bench.judge(two, [wave(two, 2, hard=3)], earlier=many)
    assert (code, codes(verdict)) == (2, ["wave_not_clear"])


def test_a_worker_measured_until_it_looks_well_does_not_count(bench: Bench, two: plans.Plan) -> None:
    code, verdict = bench.judge(two, [wave(two, 1)], earlier=[wave(two, 1)])
    assert (code, codes(verdict)) == (2, ["measured_twice"])


def test_the_last_wave_has_no_control_unless_the_plan_says_how(bench: Bench) -> None:
    two = plan(waves=(1, 1), sessions=450)
    code, verdict = bench.judge(two, [wave(two, 2, control=False)], earlier=[wave(two, 1)])
    assert (code, codes(verdict)) == (2, ["no_control"])

    earlier = plan(waves=(1, 1), sessions=450, control=plans.Control("earlier"))
    assert bench.judge(earlier, [wave(earlier, 2, control=False)], earlier=[wave(earlier, 1)])[0] == 0
    old = wave(earlier, 1)
    late = wave(earlier, 2, control=False)
    late["started"] += 90_000
    code, verdict = bench.judge(earlier, [late], earlier=[old])
    assert (code, codes(verdict)) == (2, ["no_control"])


def test_the_worker_that_is_held_back_must_be_the_control(bench: Bench) -> None:
    for name, code in (("old1", 0), ("old2", 2)):
        held = plan(control=plans.Control("held_back", name))
        assert bench.judge(held, [result(held, CLEAN)])[0] == code


@pytest.mark.parametrize(
    ("change", "code"),
    [
        pytest.param(to_declared("new1", flags={OVERLAP: False, GE_DIFF: True}, instruments=[GE_DIFF]), "diagnostics",
                     id="GE_DIFF was on"),
        pytest.param(to_peak(client_sessions=4), "concurrency", id="few at once"),
        pytest.param(to_turns("new1", request=100), "no_coverage", id="no late answers"),
        pytest.param(to_turns("new1", completion_tokens=1), "exposure", id="few tokens"),
        pytest.param(to_worker(declared=None), "state_unknown", id="state unknown"),
        pytest.param(lambda run: run.update(interrupted=True), "interrupted", id="interrupted"),
    ],
)  # fmt: skip
def test_an_earlier_wave_that_could_not_see_the_fault_does_not_fill_the_pool(
    bench: Bench, two: plans.Plan, change: Change, code: str
) -> None:
    before = wave(two, 1)
    after = facts(before)
    change(before)
    bench.wave("one", before, after if before["workers"]["new1"]["declared"] is None else None)
    bench.write("plan.json", two.to_json())
    words = ["judge", "--plan", str(bench.place / "plan.json"), "--result", bench.write("two.json", wave(two, 2))]
    words += ["--after", bench.write("after.json", facts(wave(two, 2))), "--earlier", str(bench.place / "one")]
    report = bench.place / "report.json"
    assert main([*words, "--report", str(report)]) == 2
    assert codes(json.loads(report.read_text(encoding="utf-8"))) == [code]


def test_a_worker_of_an_earlier_wave_that_changed_during_its_run_voids_the_pool(bench: Bench, two: plans.Plan) -> None:
    bench.judge(two, [wave(two, 2)], earlier=[wave(two, 1)])
    folder = bench.place / "earlier0"
    said = json.loads((folder / "after" / "new1.json").read_text(encoding="utf-8"))
    said["seen"]["process"]["pid"] += 1
    bench.write("earlier0/after/new1.json", said)
    words = ["judge", "--plan", str(bench.place / "plan.json"), "--result", str(bench.place / "result0.json")]
    words += ["--after", str(bench.place / "after.json"), "--earlier", str(folder)]
    report = bench.place / "report.json"
    assert main([*words, "--report", str(report)]) == 2
    assert codes(json.loads(report.read_text(encoding="utf-8"))) == ["state_changed"]


# ---- soft errors


def test_a_model_with_honest_errors_and_no_fault_does_not_fail(bench: Bench) -> None:
    the_plan = plan(waves=(2,))
    run = result(the_plan, {"new1": {"soft": 5}, "new2": {"soft": 5}, "old1": {"hard": 50}, "ref1": {"soft": 5}})
    code, verdict = bench.judge(the_plan, [run])
    assert (code, verdict["verdict"]) == (2, "INCONCLUSIVE")
    assert verdict["reference"] == {"sessions": SESSIONS, "soft": 5}


def test_soft_errors_beyond_the_references_fail(bench: Bench) -> None:
    the_plan = plan()
    run = result(the_plan, {"new1": {"soft": 50}, "old1": {"hard": 50}, "ref1": {"soft": 5}})
    code, verdict = bench.judge(the_plan, [run])
    assert (code, codes(verdict)) == (1, ["soft_excess"])


def test_a_reference_with_the_fault_is_none(bench: Bench) -> None:
    the_plan = plan()
    run = result(the_plan, {"new1": {"soft": 50}, "old1": {"hard": 50}, "ref1": {"hard": 1}})
    code, verdict = bench.judge(the_plan, [run])
    assert code == 2
    assert "reference_dirty" in codes(verdict)


def test_what_cannot_be_read_or_written_is_no_fail(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 is a FAIL: nothing else may end with it."""
    the_plan = bench.write("plan.json", plan().to_json())
    file = bench.write("file", "")
    for words in (
        ["--plan", the_plan, "--report", f"{file}/verdict.json"],
        ["--make-plan", f"{file}/plan.json"],
        ["--make-plan", str(bench.place / "new.json"), "--wave-sizes", "0"],
        ["--make-plan", str(bench.place / "new.json"), "--expect", "treatment"],
        ["--certify", "--for-plan", str(bench.place / "none.json")],
        ["--certify", "--for-plan", file],
    ):
        assert main(["judge", *words]) == 2, words
        assert capsys.readouterr().err.startswith("dsv4-fleet judge: ")
    assert not (bench.place / "new.json").exists()


@pytest.mark.parametrize("words", [["--plan", "none.json"], ["--plan", "plan.json", "--result", "none.json"]])
def test_what_is_not_there_is_named(bench: Bench, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    bench.write("plan.json", plan().to_json())
    words = [str(bench.place / word) if word.endswith(".json") else word for word in words]
    assert main(["judge", *words]) == 2
    shown = capsys.readouterr()
    assert "none.json can't be used: No such file" in shown.out and shown.out.endswith("verdict: INCONCLUSIVE\n")
    assert "Traceback" not in shown.out + shown.err


# ---- plans and the picture


def test_a_plan_is_made_once_and_says_what_it_can_reach(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(bench.place / "plan.json")
    assert main(["judge", "--make-plan", path, "--wave-sizes", "1", "7", "--icc", "0.05"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert "INCONCLUSIVE: too few workers" in first
    assert "can earn a PASS" in second
    assert main(["judge", "--make-plan", path]) == 2
    assert "a plan is not changed" in capsys.readouterr().err


def test_the_hash_covers_every_part_of_the_plan() -> None:
    made = plan().to_json()
    for section in ("questions", "exposure", "control"):
        for name, value in made[section].items():
            if isinstance(value, int | float):
                changed = copy.deepcopy(made)
                changed[section][name] = value + 0.001 if isinstance(value, float) else value + 1
                with pytest.raises(ValueError, match="found"):
                    plans.load(changed)
    for name in ("created", "seed"):
        with pytest.raises(plans.PlanError, match="was changed"):
            plans.load({**made, name: made[name] + 1})


def test_the_picture_shows_all_waves(bench: Bench, two: plans.Plan) -> None:
    _, first = bench.judge(two, [wave(two, 1)])
    bench.wave("earlier0", wave(two, 1))
    bench.write("earlier0/verdict.json", first)
    picture = bench.place / "rates.png"
    bench.judge(two, [wave(two, 2, hard=70)], earlier=[wave(two, 1)], options=("--picture", str(picture)))
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    assert (width, height > 700) == (1425, True)
