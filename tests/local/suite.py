"""Every test, one after another, and one plain line at the end: what passed and what failed.

``python -m tests.local.suite [lint | unit | instruments | faults | workers | molecule …]`` runs the named parts; else all.
Tests on containers mostly wait, so of all parts the longest one runs beside the others, on a fleet of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests.local import image, setup
from tests.local.fleet import Fleet
from tests.local.playbook import environment
from tests.local.podman import environment as podman_environment
from tests.local.process import end
from tests.local.settings import CACHE, ROOT, FleetSettings, LocalError

#: The fleets that parts bring up; removed before and after, unless DSV4_KEEP_FLEET is set.
FLEETS = {"faults": "test", "workers": "workers", "molecule": "molecule"}
#: The part that runs beside the others.
BESIDE = "faults"
REPORTS = CACHE / "reports"
#: pytest's exit statuses for "all passed" and "some failed"; any other (no test found, a wrong call) is a failure.
PYTEST_COUNTED = (0, 1)
STEP_S = 3600
MODULE_UTILS = "collections/ansible_collections/dsv4/fleet/plugins/module_utils"


@dataclass
class Count:
    """Tests that passed and tests that failed; an error is a failure."""

    passed: int = 0
    failed: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.passed + other.passed, self.failed + other.failed)

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed"


def run_step(argv: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """Run a program with its output shown, at most STEP_S seconds; its exit status, 124 when it took longer.

    It runs in a process group of its own, which is ended whole: no test outlives its step.
    """
    print(f"\n== {' '.join(argv)}", flush=True)
    process = subprocess.Popen(
        argv, cwd=ROOT, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait(STEP_S)
    except subprocess.TimeoutExpired:
        print(f"found it still running after {STEP_S} s, ended it", flush=True)
        return 124
    finally:
        if process.poll() is None:
            end(process)


def command(name: str, *argv: str) -> Count:
    """One program that passes with exit status 0."""
    rc = run_step(argv)
    print(f"{name}: {'passed' if rc == 0 else f'failed with status {rc}'}", flush=True)
    return Count(passed=1) if rc == 0 else Count(failed=1)


def counted(report: Path) -> Count:
    """What a JUnit report counts. A skipped test is a failure: no test of this repository may be skipped."""
    total = Count()
    for suite in ET.parse(report).getroot().iter("testsuite"):
        tests, bad = (
            int(suite.get("tests", 0)),
            sum(int(suite.get(key, 0)) for key in ("failures", "errors", "skipped")),
        )
        total += Count(tests - bad, bad)
    return total


def pytest_step(name: str, *arguments: str, fleet: str = "") -> Count:
    """One run of pytest, counted by its report; a run without a test, or that breaks off, counts as one failure.

    fleet: the name of the containers' fleet, where one is needed.
    """
    report = REPORTS / f"{name}.xml"
    report.unlink(missing_ok=True)
    env = {"DSV4_LOCAL_FLEET": fleet} if fleet else {}
    rc = run_step([sys.executable, "-m", "pytest", "--durations=10", f"--junitxml={report}", *arguments], env)
    if rc not in PYTEST_COUNTED or not report.exists():
        print(f"{name}: pytest ended with status {rc}, expected 0 or 1 and a report", flush=True)
        return Count(failed=1)
    count = counted(report)
    if count.passed + count.failed == 0 or (rc == 1 and count.failed == 0):
        return count + Count(failed=1)
    return count


def lint() -> Count:
    """The linters over all that git tracks or would track."""
    agent = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/unit/agent*/*.py"))
    shell = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard", ".ci/run", "*.sh"],
        capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    return (
        command("ruff", "ruff", "check", ".")
        + command("mypy", "mypy")
        + command("mypy, the agent's tests", "env", f"MYPYPATH={MODULE_UTILS}", "mypy", *agent)
        + command("yamllint", "yamllint", "--strict", ".")
        + command("ansible-lint", "ansible-lint", "--offline")
        + command("shellcheck", "shellcheck", "--severity=style", *[name for name in shell if name])
    )


def unit() -> Count:
    """Tests that need no container."""
    return pytest_step("unit", "tests", "--ignore=tests/faults", "--ignore=tests/instruments")


def instruments() -> Count:
    """The instruments with real tensors, on the CPU. Only they need torch: it is installed here."""
    try:
        setup.make_torch()
    except LocalError as error:
        print(f"instruments: {error}", flush=True)
        return Count(failed=1)
    return pytest_step("instruments", "tests/instruments")


#: What talks to workers without a playbook between, or hardly one: the agent driven by hand, the stress test.
ON_WORKERS = ("tests/faults/agent", "tests/faults/test_stress.py")


def faults() -> Count:
    """Tests of the playbooks on a fleet of containers."""
    return pytest_step("faults", "tests/faults", *(f"--ignore={path}" for path in ON_WORKERS), fleet=FLEETS["faults"])


def workers() -> Count:
    """The other tests on containers, on a fleet of their own, so that they need not wait for the playbooks'."""
    return pytest_step("workers", *ON_WORKERS, fleet=FLEETS["workers"])


def molecule() -> Count:
    """Every scenario of molecule, with one create and one destroy for all of them."""
    if not (ROOT / "molecule").is_dir():
        print("found no molecule/, expected its scenarios", flush=True)
        return Count(failed=1)
    count = command("molecule", "molecule", "test", "--all")
    if count.failed:  # a failed scenario leaves its containers
        command("molecule destroy", "molecule", "destroy", "--all")
    return count


PARTS: dict[str, Callable[[], Count]] = {
    "lint": lint,
    "unit": unit,
    "instruments": instruments,
    "faults": faults,
    "workers": workers,
    "molecule": molecule,
}


def remove_fleets(parts: Sequence[str]) -> None:
    """Remove what an interrupted run of these parts has left."""
    if not os.environ.get("DSV4_KEEP_FLEET") and shutil.which("podman"):
        for part in parts:
            if part in FLEETS:
                Fleet(FleetSettings(name=FLEETS[part])).down(take_over=bool(os.environ.get("CI")))


class Beside:
    """One part in a process of its own, with its output in a file until it has ended."""

    def __init__(self, part: str) -> None:
        self.part, self.log = part, REPORTS / f"{part}.log"
        argv = [sys.executable, "-m", "tests.local.suite", part]
        print(f"== {' '.join(argv)} > {self.log.relative_to(ROOT)}", flush=True)
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def count(self) -> Count:
        """Wait for its end, show what it said, and take the count from its last line."""
        print(f"\n== waiting for {self.part}", flush=True)
        self.process.wait()
        text = self.log.read_text(encoding="utf-8", errors="replace")
        print(text, flush=True)
        last = re.fullmatch(r"(\d+) passed, (\d+) failed", text.strip().rpartition("\n")[2])
        if last is None:
            print(f"{self.part} ended with status {self.process.returncode} and no count", flush=True)
            return Count(failed=1)
        count = Count(int(last[1]), int(last[2]))
        # Its exit status and its count must say the same.
        return count if (self.process.returncode == 0) == (count.failed == 0) else count + Count(failed=1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; exit status 0 if something ran and nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.local.suite", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="which parts (default: all)")
    parser.add_argument("--serial", action="store_true", help="one part after another")
    options = parser.parse_args(arguments)
    parts = options.parts or list(PARTS)
    signal.signal(signal.SIGTERM, _stop)
    # A shell starts its background jobs, as .ci/run starts this one, with SIGINT ignored, and children inherit that:
    # what the tests interrupt would not see it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    REPORTS.mkdir(parents=True, exist_ok=True)
    os.environ.pop("DSV4_LOCAL_FLEET", None)  # an operator's own choice is not the tests'
    os.environ.update({name: value for name, value in environment(FleetSettings()).items() if name in ("PATH", "LC_ALL")})
    # One range for all fleets, if the operator set one: then they cannot be up at once.
    serial = options.serial or bool(os.environ.get("DSV4_LOCAL_SUBNET")) or BESIDE not in parts or len(parts) == 1
    total, times, beside, began = Count(), [], None, time.monotonic()
    try:
        if FLEETS.keys() & set(parts):
            os.environ.update(podman_environment())
            image.ensure()
            remove_fleets(parts)
        if not serial:
            beside = Beside(BESIDE)
        for part in parts:
            if beside is None or part != BESIDE:
                start = time.monotonic()
                count = PARTS[part]()
                times.append(f"{part}: {count} in {time.monotonic() - start:.0f} s")
                total += count
        if beside is not None:
            count = beside.count()
            times.append(f"{beside.part}: {count}")
            total += count
    except LocalError as error:
        print(f"tests: {error}", file=sys.stderr)
        total += Count(failed=1)
    finally:
        if beside is not None and beside.process.poll() is None:
            end(beside.process)
        remove_fleets(parts)
    times.append(f"all in {time.monotonic() - began:.0f} s")
    print("\n" + "\n".join(times))
    print(total, flush=True)
    return 0 if total.failed == 0 and total.passed > 0 else 1


def _stop(*_: object) -> NoReturn:
    """On SIGTERM: end what was started, once."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


if __name__ == "__main__":
    sys.exit(main())
