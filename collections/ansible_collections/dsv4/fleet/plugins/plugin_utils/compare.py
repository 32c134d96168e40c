"""What a worker lacks of its wanted state, and the difference as a person reads it."""

from __future__ import annotations

import hashlib
import typing as t

from ansible_collections.dsv4.fleet.plugins.module_utils.agent import passports

RESTARTING = frozenset({"unit", "restart"})
"""Reasons after which the server restarts. A script alone that differs, while the process runs the wanted state, is put back
without a restart."""


def reasons(wanted: t.Mapping[str, t.Any], seen: t.Mapping[str, t.Any]) -> dict[str, str]:
    """Each part that differs, with what was found; empty where the worker is as it should be.

    The live process is compared with the script on disk and with the wanted state: a run that died between write and
    restart leaves a difference that this finds.
    """
    found: dict[str, str] = {}
    script, unit, process = seen["script"], seen["unit"], seen["process"]
    if script["kind"] != "file" or script["text"] is None:
        found["script"] = f"found {script['kind']} at {script['path']}"
    elif hashlib.sha256(wanted["script"].encode()).hexdigest() != script["sha256"]:
        found["script"] = f"found state {short(script['declared'] or 'hand-made')}, expected {short(wanted['state'])}"
    elif script["mode"] != "0755":
        found["script"] = f"found mode {script['mode']}, expected 0755"
    if wanted["release"]["digest"] not in seen["releases"]:
        found["release"] = f"release {short(wanted['release']['digest'])} is not on the host"
    if unit["digest"] != wanted["unit_digest"]:
        found["unit"] = "unit file or drop-ins differ"
    elif unit["need_daemon_reload"]:
        found["unit"] = "systemd has not read the unit file on disk"
    elif unit["file_state"] != "enabled":
        found["unit"] = f"found the unit {unit['file_state'] or 'unknown'}, expected enabled"
    if unit["active"] != "active" or process is None:
        found["restart"] = f"found the unit {unit['active']}"
    elif process["state"] != wanted["state"]:
        live = f"state {short(process['state'])}" if process["state"] else "a hand-made state"
        found["restart"] = f"the live process runs {live}"
    else:
        wrong = [text for one in seen["passports"] for text in passports.mismatches(one, wanted["expect"])]
        if not seen["passports"]:
            found["restart"] = "no live process has a passport"
        elif wrong:
            found["restart"] = f"passports disagree: {'; '.join(wrong[:3])}"
        elif seen["health"]["status"] != 200:
            found["restart"] = f"found health {seen['health']['status'] or seen['health']['error']}"
    out = [one["url"] for one in seen["routers"] if one["reachable"] and not (one["listed"] and one["healthy"])]
    if out:
        found["admit"] = f"not admitted by {', '.join(out)}"
    if wanted["overrides"] != seen["ledger"]["overrides"]:
        found["overrides"] = "overrides change"
    return found


def short(digest: str) -> str:
    """A digest as people say it: its first twelve characters."""
    return digest[:12]


def difference(wanted: t.Mapping[str, t.Any], seen: t.Mapping[str, t.Any], found: t.Collection[str]) -> list[dict[str, str]]:
    """Entries for Ansible's ``--diff``: the script, the unit, and the files of the release."""
    entries = []
    if "script" in found:
        entries.append(
            {
                "before_header": seen["script"]["path"],
                "after_header": f"{seen['script']['path']} (state {short(wanted['state'])})",
                "before": seen["script"]["text"] or "",
                "after": wanted["script"],
            }
        )
    if "unit" in found:
        entries.append(
            {
                "before_header": seen["unit"]["fragment"] or seen["unit"]["name"],
                "after_header": seen["unit"]["name"],
                "before": seen["unit"]["text"] or "",
                "after": wanted["unit"],
            }
        )
    if "release" in found:
        digest = wanted["release"]["digest"]
        entries.append(
            {
                "before_header": f"tree {seen['tree']['path']} ({seen['tree']['version']})",
                "after_header": f"release {short(digest)}",
                "before": "".join(f"{row['file']} {row['base']}\n" for row in wanted["release"]["changes"] if row["base"]),
                "after": "".join(f"{row['file']} {row['result']}\n" for row in wanted["release"]["changes"]),
            }
        )
    return entries
