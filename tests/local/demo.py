"""The demo: canary off and GE_DIFF on, on every decode worker, while clients are being served."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tests.local import handmade
from tests.local.fleet import Fleet
from tests.local.load import Load, Tally
from tests.local.playbook import CHANGE, Event, Outcome, run_playbook
from tests.local.settings import HOSTS, ROUTER_PORT, role_of

PLAYBOOK = "enable-gediff"
#: What the playbook is to bring about in the environment of each decode worker's processes.
WANTED = {"SGLANG_DSV4_GE_DIFF": "1", "SGLANG_DSV4_IDXK_CANARY": "0"}
BUSY_REQUESTS = 8


def demo(fleet: Fleet) -> int:
    """Bring the fleet up as it was found, run the playbook under load, and judge: exit status 0 for PASS, else 1."""
    began = time.monotonic()
    print(
        f"local fleet {fleet.settings.name}: {', '.join(HOSTS)} as containers, with a stand-in for the engine",
        flush=True,
    )
    before = set(fleet.nodes())
    fleet.up(HOSTS, ready=False)
    # Hosts that an earlier demo has changed are made anew: the demo begins where an operator would.
    fleet.reset(*before) if before else fleet.wait_ready(HOSTS)
    workers = [host for host in HOSTS if role_of(host) == "decode"]
    print(f"fleet is up after {time.monotonic() - began:.0f} s; every worker serves, started by its hand-made script\n")
    print(f"running playbooks/{PLAYBOOK}.yml with clients at router1", flush=True)
    with Load(f"http://{fleet.address('router1')}:{ROUTER_PORT}") as load:
        load.wait_served(BUSY_REQUESTS)
        outcome = run_playbook(fleet.settings, PLAYBOOK, on_event=show)
        served = load.tally.served
        load.wait_served(served + BUSY_REQUESTS)  # the changed fleet serves, too
    problems = judge(outcome, load.tally, workers, {host: live_flags(fleet, host) for host in workers})
    if problems:
        if not outcome.ok:
            print(f"\nthe end of what ansible-playbook said:\n{outcome.stdout[-4000:]}")
        print("\ndemo: FAIL " + "; ".join(problems))
        print(f"The fleet is left as it is, to look at: ssh -F {fleet.settings.directory / 'ssh_config'} decode1")
        return 1
    healthy = ", ".join(f"{host} {outcome.dsv4[host]['healthy_after_s']:.1f} s" for host in workers)
    print(
        f"\ndemo: PASS time to healthy: {healthy}; requests served meanwhile: {load.tally.served}, "
        f"requests lost: {load.tally.lost_count}; {time.monotonic() - began:.0f} s in all (`make down` ends it)"
    )
    return 0


def show(event: Event) -> None:
    """Print a worker's change as its result comes in."""
    data = event.get("event_data", {})
    result = (data.get("res") or {}).get("dsv4")
    if data.get("task_action") == CHANGE and event["event"].startswith("runner_on_") and result:
        print(describe(data["host"], result), flush=True)


def describe(host: str, result: Mapping[str, Any]) -> str:
    """What changed on a worker, and how long each step took, from the agent's result."""
    changed = ", ".join(result.get("changed") or []) or "nothing"
    steps = " · ".join(f"{step['step']} {step['seconds']:.1f} s" for step in result.get("timeline") or [])
    lines = [f"{host}: {result['end_state']}; changed: {changed}", f"    {steps}"]
    if result.get("error"):
        lines.append(f"    failed in {result.get('failed_step')}: {result['error']}")
    lines += [f"    note: {note}" for note in result.get("notes") or []]
    return "\n".join(lines)


def live_flags(fleet: Fleet, host: str) -> dict[str, str]:
    """The wanted flags as the worker's main process has them in its environment; missing ones are left out.

    It looks past everything under test: at /proc in the container.
    """
    unit = str(handmade.unit_of(host))
    script = 'pid=$(systemctl show --value --property=MainPID "$1") && tr "\\0" "\\n" < "/proc/$pid/environ"'
    environ = fleet.run(host, ["sh", "-ec", script, "flags", unit], check=False).out
    pairs = dict(line.split("=", 1) for line in environ.splitlines() if "=" in line)
    return {name: pairs[name] for name in WANTED if name in pairs}


def judge(outcome: Outcome, tally: Tally, workers: list[str], flags: Mapping[str, Mapping[str, str]]) -> list[str]:
    """What keeps the demo from passing: nothing, if all went well."""
    problems = []
    if not outcome.ok:
        errors = "; ".join(f"{host}: {message}" for host, message in outcome.errors.items())
        problems.append(f"the playbook ended with status {outcome.rc}{': ' if errors else ''}{errors}")
    for host in workers:
        end = outcome.dsv4.get(host, {}).get("end_state")
        if end != "applied":
            problems.append(f"{host} ended as {end or 'not changed'}, expected applied")
        elif flags[host] != WANTED:
            problems.append(f"{host} runs with {dict(flags[host])}, expected {WANTED}")
    if tally.served == 0:
        problems.append("no request was served")
    if tally.lost_count:
        problems.append(f"requests were lost: {tally}")
    return problems
