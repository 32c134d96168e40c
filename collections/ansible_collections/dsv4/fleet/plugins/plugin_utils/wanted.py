"""A worker's wanted state: what its serve script says, what its unit says, and what the gate will ask for."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import re
import typing as t

from ansible_collections.dsv4.fleet.plugins.module_utils.agent import systemd
from ansible_collections.dsv4.fleet.plugins.plugin_utils import script
from ansible_collections.dsv4.fleet.plugins.plugin_utils.flags import Flag, Resolved, SettingError

STATE_DIRECTORY = "/var/lib/dsv4"
EMPTY = f"{STATE_DIRECTORY}/empty"
_DROP_IN_CONFLICTS = re.compile(
    r"^\s*(ExecStart|ExecStartPre|EnvironmentFile|WorkingDirectory|User|KillMode|RuntimeDirectory)\s*=|"
    r"^\s*Environment\s*=.*?\b((?:SGLANG|SGL|DSV4|PYTHON|SPT)_?[A-Z0-9_]*)=",
    re.MULTILINE,
)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """All that one worker's script and unit are made of. Secrets are here by digest only."""

    worker: t.Mapping[str, t.Any]
    table: list[Flag]
    resolved: Resolved
    extra: t.Mapping[str, str]
    command: list[str]
    arguments: list[str]
    secrets_digest: str
    has_secret_env: bool
    has_secret_arguments: bool
    unit: t.Mapping[str, int]


def stem(unit: str) -> str:
    """A unit's name without ``.service``."""
    return unit.removesuffix(".service")


def unit_variables(inputs: Inputs) -> dict[str, t.Any]:
    """What the unit template sees as ``dsv4_unit``."""
    worker = inputs.worker
    named = {"worker": worker["name"], "role": worker["role"], "script": worker["script"], "stem": stem(worker["unit"])}
    return {**named, **inputs.unit}


def script_variables(inputs: Inputs, release: str, unit_digest: str, fingerprint: str) -> dict[str, t.Any]:
    """What the serve script's template sees as ``dsv4_script``."""
    worker = inputs.worker
    flags = {row.env: "1" if inputs.resolved.on(row.short) else "0" for row in inputs.table}
    secrets = f"{STATE_DIRECTORY}/units/{worker['unit']}/secrets/{inputs.secrets_digest}"
    command = [*inputs.command, *inputs.arguments]
    if inputs.has_secret_arguments:
        command += ["--config", f"{secrets}/args.yaml"]
    return {
        "worker": worker["name"],
        "unit": worker["unit"],
        "identity": {
            "DSV4_FLEET_STATE": script.PLACEHOLDER,
            "DSV4_FLEET_RELEASE": release,
            "DSV4_FLEET_UNIT": unit_digest,
            "DSV4_FLEET_SECRETS": inputs.secrets_digest,
            "DSV4_FLEET_PYTHON": fingerprint,
            "DSV4_FLEET_FLAGS": " ".join(flags),
            "DSV4_FLEET_PASSPORTS": f"/run/dsv4/{stem(worker['unit'])}",
        },
        "flags": flags,
        "process": {
            "PYTHONPATH": f"{STATE_DIRECTORY}/releases/{release}/python",
            "PYTHONDONTWRITEBYTECODE": "1",
            "SPT_NOENV": "1",
        },
        "extra": dict(inputs.extra),
        "secrets_file": f"{secrets}/env" if inputs.has_secret_env else "",
        "directory": EMPTY,
        "command": command,
    }


def finish(rendered: str, variables: t.Mapping[str, t.Any], inputs: Inputs) -> dict[str, t.Any]:
    """Seal the rendered script, let bash run it, and say what the gate is to ask for.

    Returns:
        ``state``, ``script`` and ``expect``.

    Raises:
        SettingError: when bash makes anything else of the script than what was wanted.
    """
    text, state = script.seal(rendered)
    identity = {**variables["identity"], "DSV4_FLEET_STATE": state}
    environment = {**identity, **variables["flags"], **variables["process"], **variables["extra"]}
    script.verify(text, environment, variables["command"], variables["directory"], variables["secrets_file"])
    expect = {
        "state": state,
        "release": identity["DSV4_FLEET_RELEASE"],
        "flags": {row.env: inputs.resolved.on(row.short) for row in inputs.table},
        "instruments": [row.env for row in inputs.table if row.instrument],
        "environment": environment,
        "arguments": variables["command"],
    }
    return {"state": state, "script": text, "expect": expect}


def unit_digest(text: str, drop_ins: t.Sequence[t.Mapping[str, str]]) -> str:
    """The digest of a unit with its drop-ins, as the agent computes it."""
    return systemd.unit_digest(text, drop_ins)


def drop_in_conflicts(drop_ins: t.Sequence[t.Mapping[str, str]]) -> list[str]:
    """What drop-ins set that belongs to the serve script or to the unit's template.

    systemd reads an environment file by other rules than a shell, so one fact would stand in two places and mean two
    things.
    """
    found = []
    for one in drop_ins:
        for match in _DROP_IN_CONFLICTS.finditer(one["text"]):
            what = match[1] or f"the variable {match[2]}"
            found.append(
                f"drop-in {one['path']}: found {what}, which the serve script or the unit's template sets; expected it in "
                "one place; move it to the inventory (dsv4_extra_env, sglang_serve_secret_env) and remove it there"
            )
    return found


def keyed_digest(host_key: str, env: t.Mapping[str, str], args: t.Mapping[str, str]) -> str:
    """The secrets' digest under a host's key (hex), as docs/agent.md defines it."""
    if not env and not args:
        return "none"
    canonical = json.dumps({"env": dict(env), "args": dict(args)}, sort_keys=True, separators=(",", ":"))
    return hmac.new(bytes.fromhex(host_key), canonical.encode(), hashlib.sha256).hexdigest()


def refuse_known_corruption(resolved: Resolved, consent: bool, name: str) -> None:
    """Raises SettingError for the combination that is known to corrupt tool calls, unless consented to."""
    if resolved.on("bf16_index_k") and resolved.on("multi_stream_overlap") and not consent:
        raise SettingError(
            f"{name}: found dsv4_flag_bf16_index_k and dsv4_flag_multi_stream_overlap both on, which is known to corrupt "
            "15 to 18 % of tool calls under load; expected one of them off; turn overlap off "
            "(playbooks/rollout-overlap-fix.yml), or set dsv4_allow_known_corruption: true"
        )
