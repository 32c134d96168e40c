"""One row per worker: what it runs against what the inventory and its overrides want. Pure."""

from __future__ import annotations

import typing as t

from ansible_collections.dsv4.fleet.plugins.plugin_utils.compare import short


def row(host: str, inspected: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """The facts of one worker.

    Args:
        inspected: the registered result of ``dsv4.fleet.inspect``; one that failed is drift too, since nothing is known.
    """
    one = inspected.get("dsv4") or {}
    if "wanted" not in one:
        text = str(inspected.get("msg", "not inspected"))
        return {"worker": host, "drift": {"inspection": text}, "state": "unknown"}
    seen, wanted = one["seen"], one["wanted"]
    process = seen["process"]
    live = process["environment"] if process else {}
    drift = dict(one["reasons"])
    for router in seen["routers"]:
        if not router["reachable"]:
            drift["router"] = f"{router['url']} is unreachable from the worker ({router['error']})"
    transaction = seen["transaction"]
    if transaction:
        end = "running" if transaction["running"] else (transaction["result"] or {}).get("end_state", "interrupted")
        drift["transaction"] = f"{transaction['id']} {end} at {transaction['step']}"
    return {
        "worker": host,
        "unit": f"{seen['unit']['name']} {seen['unit']['active']}",
        "state": (process or {}).get("state") or ("hand-made" if process else "stopped"),
        "wanted": wanted["state"],
        "release": live.get("DSV4_FLEET_RELEASE", "none"),
        "flags": {name: (live.get(name, "unset"), "1" if on else "0") for name, on in wanted["expect"]["flags"].items()},
        "instruments": seen["instruments"],
        "overrides": seen["ledger"]["overrides"],
        "health": seen["health"]["status"] or seen["health"]["error"],
        "routers": {r["url"]: "admitted" if r["listed"] and r["healthy"] else "not admitted" for r in seen["routers"]},
        "drift": drift,
        "notes": one["notes"],
    }


def table(rows: t.Sequence[t.Mapping[str, t.Any]]) -> list[str]:
    """The rows as a person reads them."""
    lines = []
    for one in rows:
        if "unit" not in one:
            lines += [f"{one['worker']}: unknown", *(f"    drift: {text}" for text in one["drift"].values())]
            continue
        routers = ", ".join(f"{word} by {url}" for url, word in one["routers"].items()) or "no router declared"
        lines.append(
            f"{one['worker']}: {one['unit']}, state {short(one['state'])}, release {short(one['release'])}, "
            f"health {one['health']}, {routers}"
        )
        flags = (f"{name}={live}" + ("" if live == want else f" (wanted {want})") for name, (live, want) in one["flags"].items())
        lines.append(f"    flags: {' '.join(flags)}")
        lines += [f"    {_instruments(told)}" for told in one["instruments"]]
        for name, held in one["overrides"].items():
            lines.append(f"    override: {name}={int(held['value'])} since {held['since']} by {held['by']} ({held['why']})")
        lines += [f"    note: {note}" for note in one["notes"] if not note.startswith("override kept")]
        lines += [f"    drift: {part}: {text}" for part, text in one["drift"].items()]
    drifted = [one["worker"] for one in rows if one["drift"]]
    lines.append(f"{len(rows)} workers, drift on {len(drifted)}" + (f": {', '.join(drifted)}" if drifted else ""))
    return lines


def _instruments(told: t.Mapping[str, t.Any]) -> str:
    """What the instruments of one process say: which watch, how much they have seen, which went off and why."""
    events = [
        f"{name} {verdict} {count}"
        for name, counts in sorted(told["events"].items())
        for verdict, count in sorted(counts.items())
    ]
    parts = [
        f"{' '.join(told['live']) or 'none'} at work in {told['buckets']} graphs, {told['replays']} replays",
        *([f"events: {', '.join(events)}"] if events else []),
        *(f"{name} disarmed: {reason}" for name, reason in sorted(told["disarmed"].items())),
    ]
    return f"instruments of process {told['pid']} (rank {told['rank']}): {'; '.join(parts)}"
