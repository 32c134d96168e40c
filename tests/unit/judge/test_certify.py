"""The simulation sees a gate that is wrong, and the certificate belongs to this code."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from dsv4_fleet.judge import certify
from dsv4_fleet.judge.decide import Questions, rules_for

WAVES = 1000


@pytest.fixture(autouse=True)
def fresh_rules() -> Iterator[None]:
    """Rules made under a planted fault must not outlive it."""
    rules_for.cache_clear()
    yield
    rules_for.cache_clear()


def row(scenario: str, workers: int, icc: float, **others: Any) -> dict[str, Any]:
    questions = Questions(icc=icc)
    found = next(item for item in certify.scenarios(questions) if item.name == scenario)
    result = certify.simulate(certify.Cell(questions, workers, found, WAVES, (1,), **others))
    result["bars"] = [certify._judged(bar, result) for bar in certify.BARS if bar.scenario == scenario]
    return result


def missed(result: dict[str, Any]) -> list[str]:
    return [bar["outcome"] for bar in result["bars"] if not (bar["met"] or bar["waived"])]


def test_every_kind_of_wave_meets_its_bars_with_fewer_waves() -> None:
    certificate = certify.certify(Questions(), 300, 2, 2)
    assert len(certificate["rows"]) == 6 * 4 * 4
    assert certificate["certified"], [item for item in certificate["rows"] if missed(item)]


def test_a_gate_that_ignores_correlation_is_found() -> None:
    assert missed(row("allowed", 1, 0.0, true_icc=0.1)) == ["pass", "fail"]


def test_a_gate_that_never_fails_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4_fleet.judge.decide.FAIL_PARTS", 1e300)
    monkeypatch.setattr("dsv4_fleet.judge.decide.Rules._fail", lambda rules: 1_000_000)
    assert missed(row("known", 1, 0.0)) == ["fail"]


def test_a_gate_that_passes_on_little_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify, "planned", lambda questions, workers: 30)
    monkeypatch.setattr("dsv4_fleet.judge.decide.critical_total", lambda sizes, icc, errors: 0)
    assert "pass" in missed(row("near", 1, 0.0))
    assert "pass" in missed(row("allowed", 1, 0.0))


def test_a_gate_that_never_passes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4_fleet.judge.decide.CONTROL_ERROR", 0.0)
    assert missed(row("clean", 1, 0.0)) == ["pass"]


def test_a_gate_that_calls_equal_arms_different_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4_fleet.judge.decide.intervals", lambda totals, *_: (totals / 321, totals / 321))
    assert missed(row("same", 1, 0.0)) == ["different"]


def test_out_of_reach_is_said_and_never_passes() -> None:
    result = row("clean", 1, 0.2)
    assert not result["reachable"]
    assert result["pass"] == 0
    assert result["bars"] == [{"outcome": "pass", "bar": "at least 95%", "met": False, "waived": True}]


def test_a_bar_on_a_wrong_verdict_is_never_waived() -> None:
    bar = certify.Bar("allowed", "fail", most=0.01)
    judged = certify._judged(bar, {"fail": 900, "pass": 0, "waves": 1000, "reachable": False})
    assert (judged["met"], judged["waived"]) == (False, False)


def test_the_full_number_of_waves_has_no_slack() -> None:
    assert certify.Bar("", "pass", most=0.05).met(500, 10_000)
    assert not certify.Bar("", "pass", most=0.05).met(501, 10_000)
    assert not certify.Bar("", "pass", most=0.0).met(1, 10_000)
    assert not certify.Bar("", "fail", least=0.99).met(9_899, 10_000)


@pytest.fixture
def shipped() -> dict[str, Any]:
    certificate = certify.shipped()
    assert certificate is not None
    return copy.deepcopy(certificate)


def test_the_certificate_that_ships_covers_this_code(shipped: dict[str, Any]) -> None:
    assert certify.objection(shipped, Questions()) is None
    assert shipped["waves"] == 10_000
    assert all(bar["met"] or bar["waived"] for item in shipped["rows"] for bar in item["bars"])


def test_the_docs_show_the_certificates_table(shipped: dict[str, Any], request: pytest.FixtureRequest) -> None:
    text = (request.config.rootpath / "docs" / "judge-certificate.md").read_text(encoding="utf-8")
    assert certify.page(shipped) == text


@pytest.mark.parametrize(
    ("change", "asked", "why"),
    [
        ({"code": "0" * 64}, {}, "other code"),
        ({"certified": False}, {}, "bars were not met"),
        ({"waves": 1000}, {}, "1000 waves"),
        ({}, {"allowed": 0.02}, "allowed"),
        ({}, {"known": 0.3}, "known"),
        ({}, {"icc": 0.03}, "correlations"),
        ({}, {"pass_budget": 0.1}, "pass_budget"),
    ],
)
def test_a_certificate_of_something_else_does_not_count(
    shipped: dict[str, Any], change: dict[str, Any], asked: dict[str, float], why: str
) -> None:
    objection = certify.objection({**shipped, **change}, Questions(**asked))  # type: ignore[arg-type]  # passed through
    assert objection is not None
    assert why in objection


def test_no_certificate_does_not_count() -> None:
    assert "no certificate" in (certify.objection(None, Questions()) or "")


def test_more_waves_are_covered_and_fewer_are_not(shipped: dict[str, Any]) -> None:
    assert certify.objection(shipped, Questions(waves=4)) is None
    shipped["questions"]["waves"] = 3
    assert "more waves" in (certify.objection(shipped, Questions(waves=1)) or "")
