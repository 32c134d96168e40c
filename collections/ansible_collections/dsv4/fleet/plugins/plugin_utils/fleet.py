"""Checks of the whole fleet at once, on what inspecting each worker gave. Pure: no host is asked here."""

from __future__ import annotations

import dataclasses
import math
import re
import typing as t

from ansible_collections.dsv4.fleet.plugins.plugin_utils.compare import RESTARTING, short


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a play wants to do: its hosts in order, its waves, and what the operator consented to."""

    target: str
    hosts: t.Sequence[str]
    left_out: t.Sequence[str]
    whole: bool
    waves: t.Sequence[t.Any]
    at_once: t.Any
    min_admitted: int
    acknowledge: t.Sequence[str]
    retry_state: str


def wave_sizes(waves: t.Sequence[t.Any], hosts: int) -> list[int]:
    """Workers in each wave, as Ansible's ``serial`` will cut them: counts or percentages, the last one repeated.

    Raises:
        ValueError: for sizes that are empty, zero, negative or not a size; Ansible takes 0 for the whole fleet at once.
    """
    if not isinstance(waves, (list, tuple)) or not waves:
        raise ValueError(f"waves: found {waves!r}; expected sizes such as [1, '25%', '100%']")
    sizes: list[int] = []
    for wave in waves:
        text = str(wave).strip()
        if isinstance(wave, bool) or not re.fullmatch(r"[0-9]+%?", text) or int(text.rstrip("%")) == 0:
            raise ValueError(f"waves: found the size {wave!r}; expected a count of 1 or more, or a percentage above 0")
        if text.endswith("%") and int(text[:-1]) > 100:
            raise ValueError(f"waves: found the size {wave!r}; expected at most 100%")
        sizes.append(max(1, math.floor(hosts * int(text[:-1]) / 100)) if text.endswith("%") else int(text))
    cut: list[int] = []
    while sum(cut) < hosts:
        size = sizes[min(len(cut), len(sizes) - 1)]
        cut.append(min(size, hosts - sum(cut)))
    return cut


def problems(wanted: Wanted, inspected: t.Mapping[str, t.Mapping[str, t.Any]]) -> list[str]:
    """Every reason why no worker may be touched, in words; empty when the change may begin.

    Args:
        inspected: the ``dsv4`` result of each worker that was inspected, the target's and the others.
    """
    found: list[str] = []
    if not wanted.hosts:
        found.append(
            f"target: found no hosts in {wanted.target!r}; expected at least one worker; correct the group's name in the "
            "inventory or dsv4_target"
        )
    if wanted.whole and wanted.left_out:
        found.append(
            f"target: found --limit leaving out {', '.join(wanted.left_out)}; expected the whole of {wanted.target!r}; run "
            "without --limit, or with -e dsv4_partial=true to leave them as they are knowingly"
        )
    sizes: list[int] = []
    try:
        sizes = wave_sizes(wanted.waves, len(wanted.hosts))
    except ValueError as error:
        found.append(str(error))
    if not re.fullmatch(r"[1-9][0-9]*", str(wanted.at_once)):
        found.append(f"dsv4_at_once: found {wanted.at_once!r}; expected a count of 1 or more")
        sizes = []
    missing = [host for host in wanted.hosts if host not in inspected]
    if missing:
        found.append(f"target: found no inspection of {', '.join(missing)}; expected one of each; read the messages above")
    mine = {host: inspected[host] for host in wanted.hosts if host in inspected}
    for host, one in mine.items():
        found += _worker_problems(host, one, wanted)
    found += _routers(mine)
    found += _agreement(inspected)
    if sizes:
        found += _capacity(mine, min(max(sizes), int(wanted.at_once)), wanted.min_admitted)
    return found


def _worker_problems(host: str, one: t.Mapping[str, t.Any], wanted: Wanted) -> list[str]:
    found = []
    seen, target = one["seen"], one["wanted"]["state"]
    running = seen["transaction"]
    if running and running["running"] and running["target"] != target:
        found.append(
            f"{host}: found the transaction {running['id']} running towards state {short(running['target'])} (step "
            f"{running['step']}), expected none or one towards {short(target)}; wait for its end, then run this again"
        )
    elif running and not running["running"] and host not in wanted.acknowledge:
        end = (running["result"] or {}).get("end_state", "interrupted")
        found.append(
            f"{host}: found the transaction {running['id']} ended {end} (step {running['step']}) and not looked at since; "
            f"expected a person's word; look at {host} (docs/runbook.md), then run again with "
            f'-e \'{{"sglang_worker_acknowledge": ["{host}"]}}\''
        )
    refused = seen["ledger"]["refused"].get(target)
    if refused and not (len(wanted.retry_state) >= 12 and target.startswith(wanted.retry_state)):
        found.append(
            f"{host}: found that state {short(target)} failed its gate here ({refused.get('reason', 'no reason kept')}); "
            f"expected another state; mend the cause, or ask for it by name: -e sglang_worker_retry_state={short(target)}"
        )
    return found


def _routers(mine: t.Mapping[str, t.Mapping[str, t.Any]]) -> list[str]:
    return [
        f"{host}: found the router {router['url']} unreachable from there ({router['error']}); expected every router of the "
        "worker to answer, or it cannot be drained; mend it or take it out of sglang_worker_routers"
        for host, one in mine.items()
        if one["reasons"]
        for router in one["seen"]["routers"]
        if not router["reachable"]
    ]


def _agreement(inspected: t.Mapping[str, t.Mapping[str, t.Any]]) -> list[str]:
    """Prefill and decode workers exchange index-K: SGLang does not notice when one side keeps it in bf16 and one not."""
    sides: dict[bool, list[str]] = {True: [], False: []}
    for host, one in inspected.items():
        flags = one["wanted"].get("flags")
        if flags is not None and one["worker"]["role"] in ("prefill", "decode"):
            sides[flags["bf16_index_k"]].append(host)
    if sides[True] and sides[False]:
        return [
            f"bf16_index_k: found it on for {', '.join(sides[True])} and off for {', '.join(sides[False])}; expected prefill "
            "and decode workers to agree, since they exchange index-K; set dsv4_flag_bf16_index_k alike"
        ]
    return []


def _capacity(mine: t.Mapping[str, t.Mapping[str, t.Any]], away: int, minimum: int) -> list[str]:
    """*away* workers at a time must not leave a role with fewer than the minimum of admitted workers on any router."""
    found = []
    admitted: dict[tuple[str, str], int] = {}
    leaving: dict[tuple[str, str], int] = {}
    for one in mine.values():
        if not RESTARTING & set(one["reasons"]):
            continue
        for router in one["seen"]["routers"]:
            if router["reachable"]:
                role = one["worker"]["role"]
                admitted[router["url"], role] = router["admitted"].get(role, 0)
                # A drained worker, and one whose transaction is under way, is away already: mending it takes nobody out.
                leaving[router["url"], role] = leaving.get((router["url"], role), 0) + (router["listed"] and router["healthy"])
    for (url, role), there in sorted(admitted.items()):
        going = min(away, leaving[url, role])
        if going and there - going < minimum:
            found.append(
                f"{role}: found {there} workers admitted by {url} and {going} away at a time; expected at least {minimum} "
                "to stay; lower dsv4_at_once, or set sglang_worker_min_admitted lower knowingly"
            )
    return found


def plan_lines(wanted: Wanted, inspected: t.Mapping[str, t.Mapping[str, t.Any]]) -> list[str]:
    """One line per worker of the target: what would change, and what a person should know."""
    lines = []
    for host in wanted.hosts:
        one = inspected[host]
        why = "; ".join(f"{name}: {text}" for name, text in one["reasons"].items()) or "as wanted"
        lines.append(f"{host}: {why}")
        lines += [f"{host}: {note}" for note in one["notes"]]
    return lines
