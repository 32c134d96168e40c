"""From result files to counts, and every reason that stands against a PASS."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Final

import fastjsonschema
import numpy as np

from dsv4_fleet.judge.decide import Evidence, Shape
from dsv4_fleet.judge.plan import Plan
from dsv4_fleet.judge.statistics import lower_bound, upper_bound

IDENTITY: Final = ("state", "release", "flags", "instruments", "boot_id", "main_pid", "start_time")
STRATA: Final = ("long", "late", "crowded", "streamed", "whole")


@dataclass(frozen=True)
class Reason:
    """`void`: the data say nothing, so no verdict but INCONCLUSIVE. Else it stands against a PASS only."""

    code: str
    text: str
    void: bool = False


@dataclass
class Worker:
    """One worker's sessions, of one run; `after` is what its host says once the run is over."""

    name: str
    run: dict[str, Any]
    facts: dict[str, Any]
    sessions: list[dict[str, Any]]
    after: dict[str, Any] | None

    @property
    def arm(self) -> str:
        return str(self.facts["arm"])

    def planned(self, plan: Plan) -> list[dict[str, Any]]:
        return [session for session in self.sessions if session["index"] < plan.exposure.sessions]

    def count(self, plan: Plan, *levels: str) -> int:
        return sum(session["class"] in levels for session in self.planned(plan))

    def against(self, plan: Plan) -> int:
        """Planned sessions that are not shown to be clean; the model's own soft errors are not the fault's."""
        good = sum(is_good(session) for session in self.planned(plan))
        return plan.exposure.sessions - good

    @property
    def span(self) -> tuple[float, float]:
        return min(item["started"] for item in self.sessions), max(item["ended"] for item in self.sessions)


def is_good(session: dict[str, Any]) -> bool:
    return bool(session["class"] == "clean" or (session["class"] == "model" and session["suspect"] == "soft"))


@dataclass
class Case:
    """All that a verdict is made of."""

    plan: Plan
    treated: list[Worker]
    controls: list[Worker]
    references: list[Worker]
    earlier: list[Worker]
    reasons: list[Reason] = field(default_factory=list)

    def object(self, code: str, text: str, void: bool = False) -> None:
        self.reasons.append(Reason(code, text, void))

    @property
    def shape(self) -> Shape:
        sessions = self.plan.exposure.sessions
        return Shape(
            (sessions,) * max(1, len(self.treated)),
            (sessions,) * len(self.earlier),
            (sessions,) * len(self.controls),
            sum(len(worker.planned(self.plan)) for worker in self.references),
        )

    def evidence(self) -> Evidence:
        """The counts for `decide`; the looks are the ends of the treated sessions, one by one."""
        plan, order = self.plan, []
        for column, worker in enumerate(self.treated):
            order += [(session["ended"], column, session["class"] == "hard") for session in worker.sessions]
        order.sort()
        steps = np.zeros((2, max(1, len(order)), max(1, len(self.treated))), dtype=np.int64)
        for look, (_, column, hard) in enumerate(order):
            steps[0, look, column] = hard
            steps[1, look, column] = 1
        hard, seen = np.cumsum(steps, axis=1)[:, None]
        against = [worker.against(plan) for worker in self.treated] or [plan.exposure.sessions]
        return Evidence(
            hard=hard,
            seen=seen,
            against=np.array([against]),
            soft=np.array([[worker.count(plan, "soft") for worker in self.treated] or [0]]),
            complete=np.array([not self.reasons]),
            earlier_hard=np.array([[worker.count(plan, "hard") for worker in self.earlier]], dtype=np.int64),
            earlier_against=np.array([[worker.against(plan) for worker in self.earlier]], dtype=np.int64),
            control_hard=np.array([sum(worker.count(plan, "hard") for worker in self.controls)]),
            reference_soft=np.array([sum(worker.count(plan, "soft") for worker in self.references)]),
        )


@functools.lru_cache(maxsize=1)
def check() -> Callable[[Any], Any]:
    """Raises fastjsonschema.JsonSchemaException for what is no result file."""
    text = resources.files("dsv4_fleet.stress").joinpath("result.schema.json").read_text(encoding="utf-8")
    made: Callable[[Any], Any] = fastjsonschema.compile(json.loads(text))
    return made


@dataclass(frozen=True)
class Run:
    """A result of `dsv4-fleet stress`, and what the hosts say of its workers afterwards, by name."""

    result: dict[str, Any]
    after: dict[str, Any]


def gather(plan: Plan, runs: list[Run], past: list[Run]) -> Case:
    """Everything that was measured in this wave and in those before it, with the reasons why it may not be enough."""
    results, earlier = [run.result for run in runs], [run.result for run in past]
    now, before = list(_workers(runs)), list(_workers(past))
    case = Case(
        plan,
        treated=[worker for worker in now if worker.arm == "treatment"],
        controls=[worker for worker in now if worker.arm == "control"],
        references=[worker for worker in (*now, *before) if worker.arm == "reference"],
        earlier=[worker for worker in before if worker.arm == "treatment"],
    )
    if plan.control.rule == "earlier" and not case.controls:
        start = min((result["started"] for result in results), default=0.0)
        case.controls = [
            worker
            for worker in before
            if worker.arm == "control" and start - worker.run["started"] <= plan.control.most_age_s
        ]
    _same_plan(case, [*results, *earlier])
    _once(case)
    # The pool is no better than its weakest worker: what holds for this wave's holds for those before it.
    for worker in (*case.treated, *case.earlier):
        _exposed(case, worker)
        _covered(case, worker)
    for worker in (*case.treated, *case.earlier, *case.controls):
        _complete(case, worker)
        _known_state(case, worker)
    _failed(case)
    _model_errors(case)
    _controlled(case)
    _reference(case)
    if not case.treated:
        case.object("no_data", "found no session of a treated worker, expected the planned ones")
    return case


def _workers(runs: list[Run]) -> Iterator[Worker]:
    for run in runs:
        for name, facts in run.result["workers"].items():
            sessions = [item for item in run.result["sessions"] if item["worker"] == name]
            yield Worker(name, run.result, facts, sessions, run.after.get(name))


def _same_plan(case: Case, results: list[dict[str, Any]]) -> None:
    plan = case.plan
    for result in results:
        if result["plan"] != plan.hash:
            case.object("other_plan", f"found a run for plan {result['plan']}, expected {plan.hash}", void=True)
        elif result["started"] < plan.created:
            case.object(
                "plan_too_late",
                "found a run that began before the plan was made, expected it after",
                void=True,
            )
        if result["seed"] != plan.seed or result["asked"]["turns"] != plan.exposure.turns:
            case.object(
                "other_scripts",
                f"found seed {result['seed']} and {result['asked']['turns']} turns, expected "
                f"{plan.seed} and {plan.exposure.turns} as planned",
                void=True,
            )


def _once(case: Case) -> None:
    """A worker that was measured twice was perhaps measured until it looked well."""
    names = Counter(worker.name for worker in (*case.treated, *case.earlier))
    if twice := sorted(name for name, times in names.items() if times > 1):
        case.object(
            "measured_twice",
            f"found more than one run of {', '.join(twice)} under one plan, expected one; "
            "make a new plan to measure again",
            void=True,
        )
    for worker in (*case.treated, *case.controls, *case.earlier):
        if len({item["index"] for item in worker.sessions}) < len(worker.sessions):
            case.object("double_session", f"found a session of {worker.name} twice, expected each once", void=True)


def _complete(case: Case, worker: Worker) -> None:
    plan, planned = case.plan, worker.planned(case.plan)
    if worker.run["interrupted"]:
        case.object("interrupted", f"found an interrupted run of {worker.name}, expected a whole one")
    if len(planned) < plan.exposure.sessions:
        case.object(
            "too_few_sessions",
            f"found {len(planned)} of the planned sessions on {worker.name}, expected {plan.exposure.sessions}",
        )
    if worker.facts["cache_flushed"] is not True:
        case.object("cache_kept", f"found no empty cache on {worker.name} at the start, expected it flushed")
    peak = worker.facts["peak"]
    if peak["client_sessions"] < plan.exposure.concurrency:
        case.object(
            "concurrency",
            f"found at most {peak['client_sessions']} sessions open at once to {worker.name}, "
            f"expected {plan.exposure.concurrency}",
        )
    if (peak["running"] or 0) < plan.exposure.at_worker:
        case.object(
            "concurrency",
            f"found at most {peak['running'] or 0} requests at once as {worker.name} itself says, "
            f"expected {plan.exposure.at_worker}",
        )


def _exposed(case: Case, worker: Worker) -> None:
    exposure = case.plan.exposure
    since_boot = max(worker.facts["requests"], worker.facts["after"].get("requests") or 0)
    if since_boot < exposure.requests:
        case.object(
            "exposure",
            f"found {since_boot} requests on {worker.name} since its boot, expected {exposure.requests}",
        )
    tokens = sum(turn["completion_tokens"] for item in worker.sessions for turn in item["turns"])
    if tokens < exposure.tokens:
        case.object("exposure", f"found {tokens} tokens from {worker.name}, expected {exposure.tokens}")


def strata(plan: Plan, sessions: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Sessions by what a fault may depend on."""

    def with_turn(test: Any) -> list[dict[str, Any]]:
        return [item for item in sessions if any(test(turn) for turn in item["turns"])]

    return {
        "long": with_turn(lambda turn: turn["long"]),
        "late": with_turn(lambda turn: turn["request"] > plan.exposure.late),
        "crowded": with_turn(lambda turn: turn["beside"] >= plan.exposure.crowded),
        "streamed": with_turn(lambda turn: turn["stream"]),
        "whole": with_turn(lambda turn: not turn["stream"]),
    }


def _covered(case: Case, worker: Worker) -> None:
    for name, sessions in strata(case.plan, worker.planned(case.plan)).items():
        if len(sessions) < case.plan.exposure.stratum:
            case.object(
                "no_coverage",
                f"found {len(sessions)} {name} sessions on {worker.name}, expected "
                f"{case.plan.exposure.stratum}: nothing is said of a fault that needs them",
            )


def _known_state(case: Case, worker: Worker) -> None:
    plan, declared, name, after = case.plan, worker.facts["declared"], worker.name, worker.after
    if not worker.facts["direct"]:
        case.object(
            "worker_unknown",
            f"found sessions sent to {name}, expected to know which worker answered each; "
            "send them to the workers themselves",
            void=True,
        )
        return
    _same_process(case, worker)
    if not declared:
        case.object("state_unknown", f"found nothing about the state of {name}, expected what its host says (--facts)")
        return
    if unknown := [key for key in ("state", "release", "flags") if not declared[key]]:
        case.object(
            "state_unknown",
            f"found no {', '.join(unknown)} of {name}, expected all of them from the passports of its processes; "
            "run site.yml on it",
        )
    if after is None:
        case.object(
            "state_unknown",
            f"found nothing about {name} after the run, expected what its host says (--after, or after/ beside an "
            "earlier wave's result)",
        )
    elif changed := [key for key in IDENTITY if declared.get(key) != after.get(key)]:
        case.object(
            "state_changed",
            f"found another {', '.join(changed)} of {name} after the run than before it, expected the same",
            void=True,
        )
    flags = declared.get("flags") or {}
    allowed = plan.diagnostics.get(worker.arm, [])
    if extra := [flag for flag in declared["instruments"] if flag not in allowed]:
        case.object(
            "diagnostics",
            f"found {', '.join(extra)} on at {name}, expected {allowed or 'none'} as planned: "
            "an instrument may hide the fault",
            void=True,
        )
    if wrong := [flag for flag, value in plan.expect.get(worker.arm, {}).items() if flags.get(flag) is not value]:
        case.object(
            "other_state",
            f"found {', '.join(wrong)} of {name} not as planned for the {worker.arm} arm",
            void=True,
        )


def _same_process(case: Case, worker: Worker) -> None:
    before, after = worker.facts["before"], worker.facts["after"]
    if before.get("settings") != after.get("settings") or not before.get("settings"):
        case.object(
            "state_changed",
            f"found other settings of {worker.name} after the run than before it, or none, "
            "expected the same from /server_info",
            void=bool(before.get("settings") and after.get("settings")),
        )
    counts = before.get("requests"), after.get("requests")
    if None not in counts and counts[1] < counts[0] + worker.facts["requests"]:
        case.object(
            "state_changed",
            f"found {counts[1]} requests on {worker.name} after the run and {counts[0]} before it, "
            f"expected {worker.facts['requests']} more: it was restarted",
            void=True,
        )


def _failed(case: Case) -> None:
    for arm, workers in (("treated", case.treated), ("control", case.controls)):
        failed = sum(worker.count(case.plan, "failed") for worker in workers)
        if failed > case.plan.exposure.failed:
            case.object(
                "failed_sessions",
                f"found {failed} failed {arm} sessions, expected at most "
                f"{case.plan.exposure.failed} as planned; one without an answer is not clean",
            )


def _model_errors(case: Case) -> None:
    """A worker that stays broken errs alone too: only what the other workers' model does as well is the model's."""
    others = [*case.controls, *case.references]
    mine, theirs = (
        [sum(worker.count(case.plan, "model") for worker in arm), sum(len(worker.planned(case.plan)) for worker in arm)]
        for arm in (case.treated, others)
    )
    if not mine[1]:
        return
    least = lower_bound(mine[0], (mine[1],), 0, 0.05)
    most = upper_bound(theirs[0], (theirs[1],), 0, 0.05) if theirs[1] else 0.0
    if least > most:
        case.object(
            "model_errors",
            f"found {mine[0]} sessions of {mine[1]} treated ones with errors that come alone too, and {theirs[0]} of "
            f"{theirs[1]} others, expected no more: the workers may stay broken; restart them",
        )


def _controlled(case: Case) -> None:
    rule, controls = case.plan.control, case.controls
    if not controls:
        case.object(
            "no_control",
            "found no control worker with the old state in these minutes, and the plan "
            f"says {rule.rule}; hold one back, or plan to use earlier controls",
        )
        return
    if rule.rule == "held_back" and [worker.name for worker in controls] != [rule.worker]:
        case.object(
            "no_control",
            f"found control {', '.join(worker.name for worker in controls)}, expected {rule.worker}",
        )
    scripts = [
        {item["index"]: item["script"] for item in worker.planned(case.plan)} for worker in (*case.treated, *controls)
    ]
    if any(one != scripts[0] for one in scripts):
        case.object(
            "unpaired",
            "found other scripts on some workers than on others, expected every worker to have the same",
        )
    restarts = [(worker, (worker.facts["declared"] or {}).get("restarted_at")) for worker in (*case.treated, *controls)]
    if missing := [worker.name for worker, at in restarts if at is None or at > worker.run["started"]]:
        case.object(
            "not_restarted",
            f"found no restart before the run of {', '.join(missing)}, expected both arms restarted: "
            "a restart alone can clear or cause the fault",
        )
    elif controls[0].run in [worker.run for worker in case.treated]:
        times = [at for _, at in restarts if at is not None]
        if max(times) - min(times) > rule.restart_window_s:
            case.object(
                "not_restarted",
                f"found restarts {max(times) - min(times):.0f} s apart, expected at most "
                f"{rule.restart_window_s:.0f} s between the arms",
            )
    if rule.rule != "earlier" and case.treated:
        spans = [worker.span for worker in (*case.treated, *controls) if worker.sessions]
        common = min(end for _, end in spans) - max(start for start, _ in spans)
        if common < 0.5 * min(end - start for start, end in spans):
            case.object("apart", "found arms that ran at different times, expected them in the same minutes")


def _reference(case: Case) -> None:
    if dirty := [worker.name for worker in case.references if worker.count(case.plan, "hard", "failed")]:
        case.object(
            "reference_dirty",
            f"found corrupted or failed sessions on the reference {', '.join(dirty)}, expected none; "
            "it says nothing about a healthy model's errors",
        )
        case.references = []
