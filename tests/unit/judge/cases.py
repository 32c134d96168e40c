"""Result files made by hand: what `dsv4-fleet stress` would have written."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from dsv4_fleet.cli import main
from dsv4_fleet.judge import plan as plans
from dsv4_fleet.judge.decide import Questions

OVERLAP, GE_DIFF = "SGLANG_OPT_USE_MULTI_STREAM_OVERLAP", "SGLANG_DSV4_GE_DIFF"
SESSIONS = 330
RESTARTED, STARTED = 5_000_000_100.0, 5_000_000_200.0


def plan(
    waves: tuple[int, ...] = (1,),
    icc: float = 0.0,
    sessions: int = SESSIONS,
    exposure: dict[str, Any] | None = None,
    **others: Any,
) -> plans.Plan:
    """A plan for independent workers, made long before the runs."""
    return plans.make(Questions(icc=icc, waves=len(waves)), waves, sessions, exposure=exposure, **others)


def declared(overlap: bool, **others: Any) -> dict[str, Any]:
    flags = {OVERLAP: overlap, GE_DIFF: False}
    return {
        "state": f"state{overlap:d}",
        "release": "release",
        "flags": flags,
        "armed": [],
        "instruments": [],
        "boot_id": "boot",
        "main_pid": 7,
        "start_time": 99,
        "restarted_at": RESTARTED,
        **others,
    }


def session(worker: str, index: int, level: str = "clean", **others: Any) -> dict[str, Any]:
    turn = {
        "class": "clean",
        "kind": "",
        "detail": "",
        "parser": False,
        "stream": True,
        "long": index % 4 == 0,
        "request": 3 * index + 3,
        "beside": 80,
        "prompt_tokens": 300,
        "completion_tokens": 60,
    }
    start = STARTED + index
    return {
        "worker": worker,
        "index": index,
        "script": f"script{index}",
        "started": start,
        "ended": start + 5,
        "class": level,
        "suspect": "unconfirmed" if level in ("hard", "soft") else "",
        "replays": [],
        "turns": [turn, {**turn, "stream": index % 2 == 0}, {**turn, "class": "clean" if level == "model" else level}],
        **others,
    }


def worker(arm: str = "treatment", sessions: int = SESSIONS, **others: Any) -> dict[str, Any]:
    requests = 3 * sessions
    return {
        "arm": arm,
        "url": "http://192.0.2.1:30002",
        "direct": True,
        "declared": declared(arm == "control"),
        "before": {"settings": "same", "version": "0.5.18", "requests": 10},
        "after": {"settings": "same", "version": "0.5.18", "requests": 10 + requests},
        "cache_flushed": True,
        "requests": requests,
        "peak": {"client_sessions": 80, "client_requests": 80, "running": 75, "waiting": 9, "samples": 100},
        **others,
    }


def result(the_plan: plans.Plan, bad: dict[str, dict[str, int]], sessions: int = SESSIONS) -> dict[str, Any]:
    """A run with `bad` of each class on each named worker; a name that begins with "old" is a control."""
    arms = {"old": "control", "ref": "reference"}
    all_sessions = []
    for name, classes in bad.items():
        levels = [level for level, count in classes.items() for _ in range(count)]
        # Spread evenly, as a fault that does not depend on time would be.
        at = {round((number + 0.5) * sessions / len(levels)): level for number, level in enumerate(levels)}
        all_sessions += [session(name, index, at.get(index, "clean")) for index in range(sessions)]
    return {
        "format": 1,
        "kind": "dsv4-fleet stress",
        "plan": the_plan.hash,
        "seed": the_plan.seed,
        "started": STARTED,
        "ended": STARTED + 900,
        "interrupted": False,
        "stopped_early": False,
        "cut_sessions": 0,
        "asked": {"sessions": sessions, "concurrency": 80, "turns": 3, "only": None},
        "client": {"load_s": 60.0, "processor_s": 9.0, "peak_sessions": 160},
        "counts": {level: 0 for level in ("clean", "hard", "soft", "model", "failed")},
        "rates": {"hard_per_session": 0.0, "hard_per_million_tokens": 0.0, "completion_tokens": 1},
        "workers": {name: worker(arms.get(name[:3], "treatment"), sessions) for name in bad},
        "sessions": all_sessions,
    }


def facts(*results: dict[str, Any]) -> dict[str, Any]:
    """What the hosts say after the runs: the same as before."""
    return {
        "workers": {name: copy.deepcopy(item["declared"]) for one in results for name, item in one["workers"].items()}
    }


def inspection(said: dict[str, Any]) -> dict[str, Any]:
    """The file that the play writes of a worker of which the hosts say this."""
    passport = {name: said[name] for name in ("release", "flags", "armed")}
    process = {"pid": said["main_pid"], "start_time": said["start_time"], "state": said["state"], "environment": {}}
    host = {"boot_id": said["boot_id"], "now": said["restarted_at"]}
    return {"seen": {"host": host, "process": process, "passports": [passport, passport]}, "elapsed_s": 0}


class Bench:
    """A folder in which cases are judged through the command line."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def write(self, name: str, value: Any) -> str:
        path = self.place / name
        path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
        return str(path)

    def wave(self, name: str, run: dict[str, Any], after: dict[str, Any] | None = None) -> str:
        """The folder that the play leaves behind."""
        (self.place / name).mkdir(exist_ok=True)
        self.write(f"{name}/result.json", run)
        (self.place / name / "after").mkdir(exist_ok=True)
        for worker, said in (facts(run) if after is None else after)["workers"].items():
            self.write(f"{name}/after/{worker}.json", inspection(said))
        return str(self.place / name)

    def judge(
        self,
        the_plan: plans.Plan | dict[str, Any],
        now: list[Any],
        earlier: list[Any] | None = None,
        after: dict[str, Any] | None = None,
        options: tuple[str, ...] = (),
    ) -> tuple[int, dict[str, Any]]:
        """Exit code and verdict."""
        known = [item for item in now if isinstance(item, dict)]
        words = [
            "judge",
            "--plan",
            self.write("plan.json", the_plan if isinstance(the_plan, dict) else the_plan.to_json()),
        ]
        for number, item in enumerate(now):
            words += ["--result", self.write(f"result{number}.json", item)]
        for number, item in enumerate(earlier or []):
            words += ["--earlier", self.wave(f"earlier{number}", item)]
        words += ["--after", self.write("after.json", facts(*known) if after is None else after)]
        code = main([*words, "--report", str(self.place / "verdict.json"), *options])
        return code, json.loads((self.place / "verdict.json").read_text(encoding="utf-8"))
