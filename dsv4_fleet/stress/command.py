"""`dsv4-fleet stress`: the command line."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from dsv4_fleet import facts
from dsv4_fleet.files import expect_writable, in_words, write_json
from dsv4_fleet.judge import plan as plans
from dsv4_fleet.judge.decide import Rules, Shape
from dsv4_fleet.stress.client import API_KEY, Client, Prefill, Target
from dsv4_fleet.stress.run import Enough, Options, Stress, never


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "stress", help="run tool-call conversations and count corrupted ones", description=__doc__
    )
    defaults = Options()
    target = parser.add_argument_group("what to send to, each repeatable")
    target.add_argument(
        "--worker", action="append", default=[], metavar="NAME=URL", help="a worker of the treatment arm"
    )
    target.add_argument(
        "--control", action="append", default=[], metavar="NAME=URL", help="a worker with the old state"
    )
    target.add_argument(
        "--reference",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a worker that is known to be clean, for the rate of honest soft errors",
    )
    target.add_argument("--router", metavar="URL", help="a router instead: which worker answered is then unknown")
    target.add_argument("--watch", action="append", default=[], metavar="URL", help="a worker behind the router")
    target.add_argument(
        "--prefill",
        action="append",
        default=[],
        metavar="URL,BOOTSTRAP_PORT",
        help="a prefill worker; the workers named above are then decode workers",
    )
    parser.add_argument("--sessions", type=int, default=defaults.sessions, help="on each worker (default %(default)s)")
    parser.add_argument(
        "--concurrency",
        type=int,
        default=defaults.concurrency,
        help="sessions open together on each worker (default %(default)s)",
    )
    parser.add_argument(
        "--turns", type=int, default=defaults.turns, help="tool calls in a session (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of every script (default %(default)s)")
    parser.add_argument("--timeout", type=float, default=defaults.timeout_s, metavar="SECONDS", help="of one request")
    parser.add_argument("--only", type=int, metavar="INDEX", help="run this one session alone, with its own nonces")
    parser.add_argument(
        "--plan", type=Path, metavar="FILE", help="the judge's plan: its sessions, concurrency and seed"
    )
    parser.add_argument("--facts", type=Path, metavar="PATH", help="what the hosts say of the workers, before the run")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="where the result goes")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0 for a complete run, 1 for one that was interrupted, 2 where it could not be made."""
    try:
        targets, options = _targets(arguments), _options(arguments)
        expect_writable(arguments.output)
        enough = _early_fail(arguments.plan, targets) if arguments.plan else never
        result = asyncio.run(_run(targets, options, enough))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"dsv4-fleet stress: {in_words(error)}", file=sys.stderr)
        return 2
    write_json(arguments.output, result)
    print(summary(result))
    return 1 if result["interrupted"] else 0


def _early_fail(path: Path, targets: list[Target]) -> Enough:
    """Whether the plan makes the counts a FAIL already: then more sessions would only corrupt more conversations."""
    plan = plans.read(path)
    if not (treated := sum(target.arm == "treatment" for target in targets)):
        return never
    return Rules(plan.questions, Shape((plan.exposure.sessions,) * treated), plan.exposure.sessions).fails


async def _run(targets: list[Target], options: Options, enough: Enough) -> dict[str, Any]:
    sessions = len(targets) * (options.sessions if options.only is None else 1)
    # No bar where nobody looks: a log gets the summary alone.
    client = Client(os.environ.get(API_KEY), options.timeout_s)
    with tqdm(total=sessions, unit="session", disable=None, smoothing=0.05) as bar:
        try:
            return await Stress(targets, options, client, bar, enough).run()
        finally:
            await client.close()


def _options(arguments: argparse.Namespace) -> Options:
    options = Options(
        sessions=arguments.sessions,
        concurrency=arguments.concurrency,
        turns=arguments.turns,
        seed=arguments.seed,
        timeout_s=arguments.timeout,
        only=arguments.only,
    )
    if arguments.plan:
        if arguments.output.exists():
            raise ValueError(
                f"found {arguments.output}, expected no such file: workers are measured once under one plan, or they "
                "would be measured until they look well; make a new plan, in a new folder, to measure again"
            )
        plan = plans.read(arguments.plan)
        options = dataclasses.replace(
            options,
            sessions=plan.exposure.sessions,
            concurrency=plan.exposure.concurrency,
            turns=plan.exposure.turns,
            seed=plan.seed,
            plan=plan.hash,
        )
    if arguments.facts:
        options = dataclasses.replace(options, facts=facts.load(arguments.facts))
    for name in ("sessions", "concurrency", "turns"):
        if getattr(options, name) < 1:
            raise ValueError(f"found {name} {getattr(options, name)}, expected at least 1")
    return options


def _targets(arguments: argparse.Namespace) -> list[Target]:
    prefills = tuple(_prefill(text) for text in arguments.prefill)
    named = [
        (arm, text)
        for arm, texts in (
            ("treatment", arguments.worker),
            ("control", arguments.control),
            ("reference", arguments.reference),
        )
        for text in texts
    ]
    if bool(named) == bool(arguments.router):
        raise ValueError("found both workers and a router, or neither; expected one: name --worker, or --router")
    for text in (*([arguments.router] if arguments.router else []), *arguments.watch):
        if not _is_url(text):
            raise ValueError(f"found {text!r}, expected a URL such as http://192.0.2.1:8000")
    if arguments.router:
        return [Target("router", arguments.router.rstrip("/"), direct=False, watched=tuple(arguments.watch))]
    targets = []
    for arm, text in named:
        name, equals, url = text.partition("=")
        if not equals or not name or not _is_url(url):
            raise ValueError(f"found {text!r}, expected NAME=URL such as decode1=http://192.0.2.1:30002")
        targets.append(Target(name, url.rstrip("/"), arm, prefills=prefills))
    if len({target.name for target in targets}) < len(targets):
        raise ValueError(f"found a name twice in {[target.name for target in targets]}, expected each worker once")
    return targets


def _is_url(text: str) -> bool:
    """Whether it is an address that requests can be sent to; a path or a query would end up inside each of them."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not parts.query
    except ValueError:  # a port that is no number, brackets that do not match
        return False


def _prefill(text: str) -> Prefill:
    url, comma, port = text.rpartition(",")
    if not comma or not port.isdigit() or not _is_url(url):
        raise ValueError(f"found {text!r}, expected URL,BOOTSTRAP_PORT such as http://192.0.2.1:30001,8998")
    return Prefill(url.rstrip("/"), int(port))


def summary(result: dict[str, Any]) -> str:
    """The result in a few lines."""
    lines = []
    for name, worker in result["workers"].items():
        levels = [session["class"] for session in result["sessions"] if session["worker"] == name]
        kinds = ", ".join(f"{level} {levels.count(level)}" for level in ("hard", "soft", "model", "failed"))
        rate = f"{levels.count('hard') / len(levels):.1%}" if levels else "no session"
        peak = worker["peak"]
        lines.append(
            f"{name} ({worker['arm']}): {rate} corrupted of {len(levels)} sessions; {kinds}; at once: "
            f"{peak['client_sessions']} sessions here, {peak['running']} requests there"
        )
    found = Counter(turn["kind"] for session in result["sessions"] for turn in session["turns"] if turn["kind"])
    if found:
        lines.append("turns with: " + ", ".join(f"{kind} {count}" for kind, count in found.most_common()))
    if per_million := result["rates"]["hard_per_million_tokens"]:
        lines.append(f"{per_million:.3g} corrupted sessions per million tokens")
    if result["interrupted"]:
        lines.append(f"interrupted: {result['cut_sessions']} open sessions were cut and do not count")
    if result["stopped_early"]:
        lines.append(f"stopped early: a FAIL by the plan; {result['cut_sessions']} open sessions were cut")
    return "\n".join(lines)
