"""`dsv4-fleet judge`: make a plan, give a verdict, or prove the gate.

Exit code: 0 PASS, 1 FAIL, 2 INCONCLUSIVE, which a judge that crashes says too. A wrong command line exits with 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import fastjsonschema
from tqdm import tqdm

from dsv4_fleet import facts
from dsv4_fleet.files import in_words, write_bytes, write_json
from dsv4_fleet.judge import certify, evidence, picture, report
from dsv4_fleet.judge import plan as plans
from dsv4_fleet.judge.decide import Questions

CODES: Final = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 2}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "judge",
        help="turn counts into PASS, FAIL or INCONCLUSIVE",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--make-plan", type=Path, metavar="FILE", help="write down what is asked, before the data")
    what.add_argument("--plan", type=Path, metavar="FILE", help="judge the results by this plan")
    what.add_argument("--certify", action="store_true", help="simulate the gate and hold it against its bars")
    _plan_arguments(parser.add_argument_group("with --make-plan"))
    group = parser.add_argument_group("with --plan")
    group.add_argument(
        "--result", type=Path, action="append", default=[], metavar="FILE", help="of this wave, repeatable"
    )
    group.add_argument(
        "--earlier",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="of an earlier wave of this rollout with its result.json, after/ and verdict.json; repeatable, in order",
    )
    group.add_argument("--after", type=Path, metavar="PATH", help="what the hosts say of the workers, after the run")
    group.add_argument("--certificate", type=Path, metavar="FILE", help="instead of the one in the package")
    group.add_argument("--report", type=Path, metavar="FILE", help="the verdict as JSON")
    group.add_argument("--picture", type=Path, metavar="FILE", help="the rates as PNG")
    group = parser.add_argument_group("with --certify")
    group.add_argument("--waves", type=int, default=certify.WAVES, help="simulated of each kind (default %(default)s)")
    group.add_argument("--simulation-seed", type=int, default=5, help="(default %(default)s)")
    group.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="(default %(default)s)")
    group.add_argument("--for-plan", type=Path, metavar="FILE", help="the questions of this plan, not the default ones")
    group.add_argument("--output", type=Path, metavar="FILE", help="the certificate as JSON")
    group.add_argument("--table", type=Path, metavar="FILE", help="the certificate as a page of Markdown")
    parser.set_defaults(run=run)


def _plan_arguments(group: argparse._ArgumentGroup) -> None:
    asked = Questions()
    group.add_argument("--wave-sizes", type=int, nargs="+", default=[1], metavar="N", help="workers of each wave")
    for name, text in (
        ("allowed", "rate of corrupted sessions that is allowed"),
        ("known", "rate of the known fault"),
        ("pass-budget", "probability of any wrong PASS in the rollout"),
        ("fail-budget", "probability of any wrong FAIL in the rollout"),
        ("icc", "correlation of two sessions of one worker"),
    ):
        group.add_argument(
            f"--{name}",
            type=float,
            default=getattr(asked, name.replace("-", "_")),
            help=f"{text} (default %(default)s)",
        )
    group.add_argument("--sessions", type=int, help="on each worker (default: the fewest that can earn a PASS)")
    for item in dataclasses.fields(plans.Exposure):
        if item.name != "sessions":
            group.add_argument(
                f"--{item.name.replace('_', '-')}",
                type=int,
                default=item.default,
                help="exposure, see docs/judge.md (default %(default)s)",
            )
    group.add_argument(
        "--control-rule", choices=plans.CONTROL_RULES, default="concurrent", help="(default %(default)s)"
    )
    group.add_argument("--control-worker", metavar="NAME", help="the one that is held back")
    group.add_argument(
        "--diagnostics", action="append", default=[], metavar="ARM:FLAG", help="an instrument that may be on"
    )
    group.add_argument(
        "--expect", action="append", default=[], metavar="ARM:FLAG=0|1", help="a flag each worker must have"
    )
    group.add_argument("--seed", type=int, default=1, help="of the session scripts (default %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """The exit code; 1 is a FAIL, so whatever cannot be read or written ends with 2."""
    work = _certify if arguments.certify else _make_plan if arguments.make_plan else _judge
    try:
        return work(arguments)
    except (ValueError, OSError) as error:
        print(f"dsv4-fleet judge: {in_words(error)}", file=sys.stderr)
        return 2


def _make_plan(arguments: argparse.Namespace) -> int:
    plan = _plan_of(arguments)
    if arguments.make_plan.exists():
        raise ValueError(
            f"found {arguments.make_plan}, expected no such file: a plan is not changed after it was made; name another"
        )
    write_json(arguments.make_plan, plan.to_json())
    print("\n".join([*plan.outlook(), f"plan {plan.hash}"]))
    return 0


def _plan_of(arguments: argparse.Namespace) -> plans.Plan:
    questions = Questions(
        allowed=arguments.allowed,
        known=arguments.known,
        pass_budget=arguments.pass_budget,
        fail_budget=arguments.fail_budget,
        icc=arguments.icc,
        waves=len(arguments.wave_sizes),
    )
    exposure = {
        item.name: getattr(arguments, item.name)
        for item in dataclasses.fields(plans.Exposure)
        if item.name != "sessions"
    }
    diagnostics: dict[str, list[str]] = {}
    for text in arguments.diagnostics:
        arm, flag = _split(text, ":")
        diagnostics.setdefault(arm, []).append(flag)
    expect: dict[str, dict[str, bool]] = {}
    for text in arguments.expect:
        arm, rest = _split(text, ":")
        flag, value = _split(rest, "=")
        if value not in ("0", "1"):
            raise ValueError(f"found {text!r}, expected 0 or 1 after =")
        expect.setdefault(arm, {})[flag] = value == "1"
    return plans.make(
        questions,
        tuple(arguments.wave_sizes),
        arguments.sessions,
        plans.Control(arguments.control_rule, arguments.control_worker),
        exposure,
        diagnostics=diagnostics,
        expect=expect,
        seed=arguments.seed,
    )


def _split(text: str, at: str) -> tuple[str, str]:
    left, found, right = text.partition(at)
    if not (left and found and right):
        raise ValueError(f"found {text!r}, expected two parts with {at!r} between them")
    return left, right


def _judge(arguments: argparse.Namespace) -> int:
    verdict = no_verdict("judge_crashed", "found no end of the judge, expected one: it still runs or was killed")
    if arguments.report:
        write_json(arguments.report, verdict)  # so that no older verdict is read should this process be killed
    try:
        verdict = _verdict(arguments)
        if arguments.picture:
            write_bytes(arguments.picture, picture.draw(verdict, _verdicts(arguments.earlier)))
    except (OSError, ValueError) as error:
        verdict = no_verdict("unusable_input", in_words(error))
    except Exception as error:  # a judge that crashes is INCONCLUSIVE, whatever the fault
        verdict = no_verdict("judge_crashed", f"{type(error).__name__}: {error}")
        sys.excepthook(type(error), error, error.__traceback__)
    if arguments.report:
        write_json(arguments.report, verdict)
    print(report.words(verdict))
    return CODES[verdict["verdict"]]


def _verdict(arguments: argparse.Namespace) -> dict[str, Any]:
    plan = plans.read(arguments.plan)
    after = facts.load(arguments.after) if arguments.after else {}
    runs = [evidence.Run(_result(path), after) for path in arguments.result]
    past = [evidence.Run(_result(path / "result.json"), facts.load(path / "after")) for path in arguments.earlier]
    certificate = (
        json.loads(arguments.certificate.read_text(encoding="utf-8")) if arguments.certificate else certify.shipped()
    )
    case = evidence.gather(plan, runs, past)
    return report.judge(case, certify.objection(certificate, plan.questions))


def _result(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        evidence.check()(value)
    except (ValueError, fastjsonschema.JsonSchemaException) as error:
        raise ValueError(f"found {path} wrong ({error}), expected a result of dsv4-fleet stress") from error
    return value


def _verdicts(waves: list[Path]) -> list[dict[str, Any]]:
    """What was said of earlier waves, for the picture; a judge that crashed there left nothing to draw."""
    files = [path / "verdict.json" for path in waves]
    values = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    return [value for value in values if "wave" in value]


def no_verdict(code: str, text: str) -> dict[str, Any]:
    """What a judge says that did not come to a verdict."""
    return {
        "format": report.FORMAT,
        "kind": report.KIND,
        "verdict": "INCONCLUSIVE",
        "reasons": [{"code": code, "text": text, "void": True}],
    }


def _certify(arguments: argparse.Namespace) -> int:
    questions = plans.read(arguments.for_plan).questions if arguments.for_plan else Questions()
    total = sum(1 for _ in certify.cells(questions, arguments.waves, 0))
    with tqdm(total=total, unit="cell", disable=None) as bar:
        certificate = certify.certify(
            questions,
            arguments.waves,
            arguments.simulation_seed,
            arguments.processes,
            lambda row: bar.update(),
        )
    table = certify.table(certificate)
    if arguments.output:
        write_json(arguments.output, certificate)
    if arguments.table:
        write_bytes(arguments.table, certify.page(certificate).encode())
    print(table, end="")
    missed = [row for row in certificate["rows"] if any(not (bar["met"] or bar["waived"]) for bar in row["bars"])]
    print(
        f"certified: {len(certificate['rows'])} kinds of waves, {arguments.waves} of each"
        if certificate["certified"]
        else f"not certified: {len(missed)} of {len(certificate['rows'])} kinds of waves missed a bar"
    )
    return 0 if certificate["certified"] else 1
