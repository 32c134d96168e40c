"""The gate proves itself: simulated waves through the same `decide`, against bars set beforehand."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

import numpy as np

from dsv4_fleet.judge.decide import FAIL, PASS, Evidence, Questions, Shape, decide, rules_for, sessions_needed
from dsv4_fleet.judge.statistics import Floats, Ints

WAVES: Final = 10_000
ICCS: Final = (0.0, 0.05, 0.1, 0.2)
WORKERS: Final = (1, 2, 4, 8)
LOOKS: Final = 10
MOST_SESSIONS: Final = 2000  # of one worker; what needs more is out of reach
FEWEST_SESSIONS: Final = 100  # of one worker: three turns each carry it past the 240th request
TABLE: Final = "certificate.json"


@dataclass(frozen=True)
class Scenario:
    """What is true of the simulated waves: rates of corrupted sessions and of honest soft errors."""

    name: str
    rate: float
    control: float
    soft: float = 0.0


@dataclass(frozen=True)
class Bar:
    """What must hold of a scenario: the rate of an outcome, at most or at least; safety is never waived."""

    scenario: str
    outcome: str  # pass, fail or different
    most: float | None = None
    least: float | None = None

    @property
    def safety(self) -> bool:
        """A bar on a wrong verdict holds everywhere; one on power only where the judge can say PASS at all."""
        return self.most is not None

    def met(self, count: int, waves: int) -> bool:
        if self.most is not None:
            return count <= _slack(self.most, waves, up=True)
        return count >= _slack(self.least or 0.0, waves, up=False)

    def text(self) -> str:
        return (f"at most {self.most:.0%}" if self.most else "none") if self.safety else f"at least {self.least:.0%}"


def _slack(bar: float, waves: int, up: bool) -> float:
    """The count that the bar allows; with fewer waves than the full number, two standard errors more."""
    extra = 0.0 if waves >= WAVES else 2 * math.sqrt(bar * (1 - bar) * waves)
    return bar * waves + extra if up else bar * waves - extra


def scenarios(questions: Questions) -> tuple[Scenario, ...]:
    known, allowed = questions.known, questions.allowed
    return (
        Scenario("known", known, known),
        Scenario("near", 3 * allowed, known),
        Scenario("allowed", allowed, known),
        Scenario("clean", 0.0, known),
        Scenario("same", known, known),
        Scenario("honest", 0.0, known, soft=1.5 * allowed),
    )


BARS: Final = (
    Bar("known", "pass", most=0.0),
    Bar("known", "fail", least=0.99),
    Bar("near", "pass", most=0.01),
    Bar("allowed", "pass", most=0.05),
    Bar("allowed", "fail", most=0.01),
    Bar("clean", "pass", least=0.95),
    Bar("same", "different", most=0.01),
    Bar("honest", "fail", most=0.01),
)


@dataclass(frozen=True)
class Cell:
    """One simulated kind of wave: what is asked, how many workers, what is true."""

    questions: Questions
    workers: int
    scenario: Scenario
    waves: int
    seed: tuple[int, ...]
    true_icc: float | None = None  # where the assumed one is wrong


def controls(workers: int) -> int:
    """Old workers held beside a wave: one, and one more for every four workers past the first four."""
    return max(1, workers // 4)


def planned(questions: Questions, workers: int) -> int:
    """Sessions of each worker that a plan takes for such a wave."""
    return max(FEWEST_SESSIONS, sessions_needed(questions, (workers,), MOST_SESSIONS) or 3 * FEWEST_SESSIONS)


def simulate(cell: Cell) -> dict[str, Any]:
    """The table's row of one cell."""
    questions, workers, scenario, waves = cell.questions, cell.workers, cell.scenario, cell.waves
    sessions = planned(questions, workers)
    icc = questions.icc if cell.true_icc is None else cell.true_icc
    random = np.random.default_rng(cell.seed)
    looks = np.diff(np.linspace(0, sessions, LOOKS + 1).astype(int))
    own = _own_rates(random, scenario.rate, icc, (waves, workers))
    hard = np.cumsum(random.binomial(looks[None, :, None], own[:, None, :]), axis=1)
    seen = np.broadcast_to(np.cumsum(looks)[None, :, None], hard.shape)
    soft = random.binomial(sessions - hard[:, -1], scenario.soft)
    shape = Shape(
        (sessions,) * workers,
        control=(sessions,) * controls(workers),
        reference=sessions * workers if scenario.soft else 0,
    )
    control = _own_rates(random, scenario.control, icc, (waves, len(shape.control)))
    none: Ints = np.zeros((waves, 0), dtype=np.int64)
    rules = rules_for(questions, shape, sessions)
    decisions = decide(
        rules,
        Evidence(
            hard=hard,
            seen=seen,
            against=hard[:, -1] + soft,
            soft=soft,
            complete=np.ones(waves, dtype=bool),
            earlier_hard=none,
            earlier_against=none,
            control_hard=random.binomial(sessions, control).sum(axis=1),
            reference_soft=random.binomial(shape.reference, scenario.soft, waves),
        ),
    )
    return {
        "scenario": scenario.name,
        "rate": scenario.rate,
        "icc": questions.icc,
        "workers": workers,
        "sessions": sessions,
        "controls": len(shape.control),
        "reachable": rules.reachable,
        "waves": waves,
        "pass": int((decisions.verdict == PASS).sum()),
        "fail": int((decisions.verdict == FAIL).sum()),
        "different": int(decisions.different.sum()),
        "control_silent": int((~decisions.control_shows).sum()),
        "median_fail_look": float(np.median(looks_of))
        if len(looks_of := decisions.fail_look[decisions.fail_look >= 0] + 1)
        else None,
    }


def _own_rates(random: np.random.Generator, rate: float, icc: float, shape: tuple[int, int]) -> Floats:
    if icc == 0 or rate == 0:
        return np.full(shape, rate)
    size = 1 / icc - 1
    return random.beta(rate * size, (1 - rate) * size, shape)


def cells(questions: Questions, waves: int, seed: int) -> Iterator[Cell]:
    """Every scenario, correlation and wave size."""
    for at, scenario in enumerate(scenarios(questions)):
        for icc in ICCS:
            for workers in WORKERS:
                yield Cell(
                    dataclasses.replace(questions, icc=icc),
                    workers,
                    scenario,
                    waves,
                    (seed, at, round(icc * 1000), workers),
                )


def certify(
    questions: Questions,
    waves: int,
    seed: int,
    processes: int,
    progress: Callable[[dict[str, Any]], object] = lambda row: None,
) -> dict[str, Any]:
    """Simulate all cells; the certificate says what was asked, of which code, and how each bar came out."""
    rows = []
    with ProcessPoolExecutor(processes) as pool:
        for row in pool.map(simulate, cells(questions, waves, seed)):
            row["bars"] = [_judged(bar, row) for bar in BARS if bar.scenario == row["scenario"]]
            rows.append(row)
            progress(row)
    return {
        "format": 1,
        "code": code_digest(),
        "questions": {name: value for name, value in dataclasses.asdict(questions).items() if name != "icc"},
        "iccs": list(ICCS),
        "waves": waves,
        "seed": seed,
        "certified": all(bar["met"] or bar["waived"] for row in rows for bar in row["bars"]),
        "rows": rows,
    }


def _judged(bar: Bar, row: dict[str, Any]) -> dict[str, Any]:
    met = bar.met(row[bar.outcome], row["waves"])
    # Out of reach is what the rules say before any data; there the judge must never say PASS.
    waived = not bar.safety and not row["reachable"] and row["pass"] == 0
    return {"outcome": bar.outcome, "bar": bar.text(), "met": met, "waived": waived and not met}


def code_digest() -> str:
    """sha256 over the modules that a verdict is computed by."""
    package = resources.files("dsv4_fleet.judge")
    text = "".join(package.joinpath(name).read_text(encoding="utf-8") for name in ("statistics.py", "decide.py"))
    return hashlib.sha256(text.encode()).hexdigest()


def shipped() -> dict[str, Any] | None:
    """The certificate that came with this package; None where there is none."""
    path = resources.files("dsv4_fleet.judge").joinpath(TABLE)
    if not path.is_file():
        return None
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def objection(certificate: dict[str, Any] | None, questions: Questions) -> str | None:
    """Why the certificate does not cover these questions; None where it does.

    More waves only split the budget further, so a certificate for fewer waves covers them.
    """
    if certificate is None:
        return "found no certificate, expected one; run `dsv4-fleet judge --certify`"
    if not certificate.get("certified"):
        return "found a certificate whose bars were not met, expected all of them met or out of reach"
    if certificate["code"] != code_digest():
        return "found a certificate of other code than this, expected one of this; run `dsv4-fleet judge --certify`"
    if certificate["waves"] < WAVES:
        return f"found a certificate of {certificate['waves']} waves, expected {WAVES}"
    asked = dataclasses.asdict(questions)
    if certificate["questions"]["waves"] > asked["waves"]:
        return "found a certificate for more waves than are planned, expected one for at most as many"
    for name, value in certificate["questions"].items():
        if name != "waves" and value != asked[name]:
            return f"found a certificate for {name} {value}, expected {asked[name]} as planned; certify with the plan"
    if questions.icc not in certificate["iccs"]:
        return f"found a certificate for correlations {certificate['iccs']}, expected {questions.icc} among them"
    return None


def table(certificate: dict[str, Any]) -> str:
    """The certificate as Markdown: one row for each scenario and correlation, wave sizes side by side."""
    rows = certificate["rows"]
    lines = [
        "| truth | correlation | " + " | ".join(f"{workers} in the wave" for workers in WORKERS) + " |",
        "|---|---|" + "---|" * len(WORKERS),
    ]
    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        for icc in certificate["iccs"]:
            found = [row for row in rows if row["scenario"] == scenario and row["icc"] == icc]
            lines.append(f"| {_truth(scenario, found[0]['rate'])} | {icc:g} | " + " | ".join(_entry(row) for row in found) + " |")
    lines += ["", "† too few workers for the claim: no PASS whatever the data, and the plan says so beforehand."]
    return "\n".join(lines) + "\n"


def page(certificate: dict[str, Any]) -> str:
    """The certificate as a page of the documentation."""
    rates = {row["scenario"]: row["rate"] for row in certificate["rows"]}
    bars = "\n".join(f"| {_truth(bar.scenario, rates[bar.scenario])} | {bar.outcome} | {bar.text()} |" for bar in BARS)
    planned = "\n".join(f"| {icc:g} | " + " | ".join(_planned(certificate, icc)) + " |" for icc in certificate["iccs"])
    wide = " | ".join(f"{workers} in the wave" for workers in WORKERS)
    return (
        "# Certificate of the gate\n\nMade by `make certify`; [judge.md](judge.md) says what the words mean. "
        f"{certificate['waves']:,} simulated waves\nin each cell, one control worker beside each wave, two beside eight.\n\n"
        f"## Bars\n\n| truth | outcome | bar |\n|---|---|---|\n{bars}\n\n"
        f"## Sessions on each worker, as planned\n\n| correlation | {wide} |\n|---|{'---|' * len(WORKERS)}\n{planned}\n\n"
        f"## How the waves came out\n\n{table(certificate)}"
    )


def _truth(scenario: str, rate: float) -> str:
    """What is true of a scenario's waves."""
    titles = {"same": "A/A: both arms {:.3g} %", "honest": "{:.3g} %, and honest soft errors"}
    return titles.get(scenario, "{:.3g} %").format(100 * rate)


def _planned(certificate: dict[str, Any], icc: float) -> list[str]:
    """Sessions on each worker, for each size of a wave; marked where they can't be enough."""
    cells_of = {row["workers"]: row for row in certificate["rows"] if row["icc"] == icc}
    return [f"{cells_of[size]['sessions']}{'' if cells_of[size]['reachable'] else ' †'}" for size in WORKERS]


def _entry(row: dict[str, Any]) -> str:
    waves = row["waves"]
    if row["scenario"] == "same":
        text = f"different {row['different'] / waves:.2%}"
    else:
        rest = waves - row["pass"] - row["fail"]
        text = " · ".join(
            f"{name} {count / waves:.2%}"
            for name, count in (("PASS", row["pass"]), ("FAIL", row["fail"]), ("INCONCLUSIVE", rest))
            if count
        )
    if any(not bar["met"] and not bar["waived"] for bar in row["bars"]):
        return f"**{text}: bar missed**"
    return text if row["reachable"] else f"{text} †"
