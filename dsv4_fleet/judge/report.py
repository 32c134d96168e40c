"""The verdict with its reasons, in JSON and in words."""

from __future__ import annotations

from typing import Any, Final

from scipy import stats

from dsv4_fleet.judge.decide import (
    FAIL,
    INCONCLUSIVE,
    NAMES,
    PASS,
    Decisions,
    Questions,
    Rules,
    decide,
    rules_for,
)
from dsv4_fleet.judge.evidence import Case, Reason, Worker, is_good, strata
from dsv4_fleet.judge.plan import Plan
from dsv4_fleet.judge.statistics import lower_bound, none_bad, upper_bound

FORMAT: Final = 1
KIND: Final = "dsv4-fleet judge verdict"
SHOWN_ERROR: Final = 0.05  # one-sided, of every bound that is shown
MOST_WORKERS: Final = 1000


def judge(case: Case, objection: str | None) -> dict[str, Any]:
    """The verdict on a case; `objection` is what the gate's certificate lacks."""
    if objection:
        case.object("not_certified", objection, void=True)
    plan, shape = case.plan, case.shape
    longest = max([plan.exposure.sessions, *(len(worker.sessions) for worker in case.treated)])
    rules = rules_for(plan.questions, shape, longest)
    decisions = decide(rules, case.evidence())
    reasons = list(case.reasons)
    verdict = int(decisions.verdict[0])
    if any(reason.void for reason in reasons):
        verdict = INCONCLUSIVE
    reasons += _statistical(case, rules, decisions)
    if verdict == PASS and reasons:
        raise AssertionError(
            f"found PASS with reasons against it ({reasons}), expected none; this is a fault of the judge"
        )
    return {
        "format": FORMAT,
        "kind": KIND,
        "verdict": NAMES[verdict],
        "plan": plan.hash,
        "reasons": [{"code": reason.code, "text": reason.text, "void": reason.void} for reason in reasons],
        "wave": _group(plan, case.treated, 0.0),
        "pool": _group(plan, [*case.treated, *case.earlier], plan.questions.icc),
        "control": _group(plan, case.controls, 0.0),
        "reference": {
            "sessions": shape.reference,
            "soft": sum(worker.count(plan, "soft") for worker in case.references),
        },
        "workers": {
            worker.name: {"arm": worker.arm, **_group(plan, [worker], 0.0)}
            for worker in (*case.treated, *case.controls)
        },
        "earlier": {worker.name: {"arm": worker.arm, **_group(plan, [worker], 0.0)} for worker in case.earlier},
        "evidence": {
            "wave": float(decisions.wave_evidence[0]),
            "pool": float(decisions.pool_evidence[0]),
            "threshold": rules.threshold,
            "pool_threshold": rules.pool_threshold,
            "fail_after_sessions": int(decisions.fail_look[0]) + 1 if decisions.fail_look[0] >= 0 else None,
        },
        "arms_differ": bool(decisions.different[0]),
        "pass_within_reach": rules.reachable,
        "coverage": {worker.name: _coverage(plan, worker) for worker in case.treated},
        "allowed": plan.questions.allowed,
        "known": plan.questions.known,
    }


def _group(plan: Plan, workers: list[Worker], icc: float) -> dict[str, Any]:
    """Counts and exact 95 % bounds of the planned sessions; what has no answer counts as bad in the upper one."""
    sizes = tuple(len(worker.planned(plan)) for worker in workers if worker.planned(plan))
    sessions = sum(sizes)
    hard = sum(worker.count(plan, "hard") for worker in workers)
    bad = sessions - sum(is_good(item) for worker in workers for item in worker.planned(plan))
    tokens = sum(
        turn["completion_tokens"] for worker in workers for item in worker.planned(plan) for turn in item["turns"]
    )
    group = {
        level: sum(worker.count(plan, level) for worker in workers)
        for level in ("clean", "hard", "soft", "model", "failed")
    }
    return {
        "workers": len(workers),
        "sessions": sessions,
        **group,
        "against": bad,
        "icc": icc,
        "rate": hard / sessions if sessions else None,
        "lower": lower_bound(hard, sizes, icc, SHOWN_ERROR) if sessions else 0.0,
        "upper": upper_bound(bad, sizes, icc, SHOWN_ERROR) if sessions else 1.0,
        "hard_per_million_tokens": hard / tokens * 1e6 if tokens else None,
        "more_sessions": more_sessions(bad, sessions, plan.questions) if workers else None,
    }


def more_sessions(bad: int, sessions: int, questions: Questions) -> dict[str, int]:
    """Clean sessions still wanting, on these workers, until their own rate is below each rate, 95 % sure."""
    return {
        f"{rate:g}": max(0, _enough(bad, rate) - sessions)
        for rate in (questions.allowed, questions.allowed / 2, questions.allowed / 10)
    }


def _enough(bad: int, rate: float) -> int:
    """The fewest sessions of which `bad` bad ones exclude the rate."""
    low, high = bad, 1
    while stats.binom.cdf(bad, high, rate) > SHOWN_ERROR:
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if stats.binom.cdf(bad, middle, rate) <= SHOWN_ERROR else (middle, high)
    return high


def _statistical(case: Case, rules: Rules, decisions: Decisions) -> list[Reason]:
    """What the counts themselves say for FAIL or against PASS."""
    questions, reasons, plan = case.plan.questions, [], case.plan
    if decisions.verdict[0] == FAIL:
        if decisions.fail_look[0] >= 0:
            worst = max(range(rules.shape.wave.__len__()), key=lambda at: decisions.worker_evidence[0, at])
            odds = f"{max(decisions.wave_evidence[0], decisions.pool_evidence[0]):.3g} to 1"
            reasons.append(
                Reason(
                    "corrupted",
                    f"found evidence of {odds} against a rate of {questions.allowed:.2%} after "
                    f"{decisions.fail_look[0] + 1} sessions, most of it on {case.treated[worst].name}",
                )
            )
        if decisions.fail_end[0]:
            reasons.append(
                Reason(
                    "corrupted",
                    "found more corrupted sessions at the planned exposure than a rate of "
                    f"{questions.allowed:.2%} explains, expected fewer than {rules.fail_critical}",
                )
            )
        if decisions.soft_excess[0]:
            reasons.append(
                Reason(
                    "soft_excess",
                    f"found more soft errors than the reference has, by more than {questions.allowed:.2%}",
                )
            )
        return reasons
    if not case.treated:  # what counts say is said of some
        return reasons
    if not rules.reachable:
        reasons.append(Reason("too_few_workers", _too_few(plan, rules)))
    for clear, code, what, critical in (
        (decisions.wave_clear[0], "wave_not_clear", "this wave", rules.wave_critical),
        (decisions.pool_clear[0], "pool_not_clear", "all treated workers so far", rules.pool_critical),
    ):
        if not clear and critical >= 0:
            reasons.append(
                Reason(
                    code,
                    f"found more sessions of {what} that are not shown to be clean than a PASS allows, "
                    f"expected at most {critical}",
                )
            )
    for at, worker in enumerate(case.treated):
        if (found := worker.against(plan)) > rules.worker_critical[at] >= 0:
            reasons.append(
                Reason(
                    "worker_not_clear",
                    f"found {found} sessions of {worker.name} that are not shown to be "
                    f"clean, expected at most {rules.worker_critical[at]}: it may have the known fault",
                )
            )
    if case.controls and not decisions.control_shows[0]:
        hard = sum(worker.count(plan, "hard") for worker in case.controls)
        reasons.append(
            Reason(
                "control_silent",
                f"found {hard} corrupted sessions on the control, expected at least "
                f"{rules.control_critical}: the fault does not show, so the comparison is void",
            )
        )
    return reasons


def _too_few(plan: Plan, rules: Rules) -> str:
    """How many workers the claim would need."""
    questions, sessions = plan.questions, plan.exposure.sessions
    enough = next(
        (
            workers
            for workers in range(1, MOST_WORKERS)
            if all(none_bad(sessions, rate, questions.icc) ** workers <= error for rate, error in questions.excluded)
        ),
        None,
    )
    own = next(
        (
            count
            for count in range(1, 100_000)
            if all((1 - rate) ** (count * len(rules.shape.wave)) <= error for rate, error in questions.excluded)
        ),
        None,
    )
    return (
        f"found {len(rules.shape.pool)} treated workers with {sessions} sessions each, expected at least {enough} at a "
        f"correlation of {questions.icc:g} within a worker, and {own} sessions on each worker of this wave: even "
        "flawless data would not show that the rate is allowed"
    )


def _coverage(plan: Plan, worker: Worker) -> dict[str, Any]:
    """Of each kind of session: how many, how many corrupted, and the 95 % upper bound."""
    return {
        name: {
            "sessions": len(sessions),
            "hard": (hard := sum(item["class"] == "hard" for item in sessions)),
            "upper": upper_bound(hard, (len(sessions),), 0.0, SHOWN_ERROR) if sessions else 1.0,
        }
        for name, sessions in strata(plan, worker.planned(plan)).items()
    }


def words(verdict: dict[str, Any]) -> str:
    """The verdict as an operator reads it; the verdict itself is the last line."""
    if "wave" not in verdict:
        return _ending(verdict)
    lines = []
    for title, group in (
        ("this wave", verdict["wave"]),
        ("all treated so far", verdict["pool"]),
        ("control", verdict["control"]),
        *((f"  {name}", worker) for name, worker in verdict["workers"].items()),
    ):
        if not group["sessions"]:
            lines.append(f"{title}: no session")
            continue
        lines.append(
            f"{title}: {group['hard']} corrupted of {group['sessions']} sessions ({group['rate']:.1%}; 95 % bounds: "
            f"above {group['lower']:.2%}, below {group['upper']:.2%}); soft {group['soft']}, model's own "
            f"{group['model']}, failed {group['failed']}"
        )
    if verdict["wave"]["sessions"]:
        wants = ", ".join(f"{count} for {float(rate):.2%}" for rate, count in verdict["wave"]["more_sessions"].items())
        lines.append(f"more clean sessions wanted on this wave's workers for a stronger claim: {wants}")
    for name, kinds in verdict["coverage"].items():
        lines.append(
            f"coverage of {name}: "
            + ", ".join(
                f"{kind} {found['hard']}/{found['sessions']}"
                if found["sessions"]
                else f"{kind}: none, nothing is said of it"
                for kind, found in kinds.items()
            )
        )
    return "\n".join([*lines, _ending(verdict)])


def _ending(verdict: dict[str, Any]) -> str:
    """The reasons, then the verdict."""
    reasons = [f"{reason['code']}: {reason['text']}" for reason in verdict["reasons"]]
    return "\n".join([*reasons, f"verdict: {verdict['verdict']}"])
