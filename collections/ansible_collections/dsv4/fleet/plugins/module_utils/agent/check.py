"""A request is checked whole before anything is done with it."""

from __future__ import annotations

import ipaddress
import re
from typing import Any

from .errors import AgentError

FORMAT = 1
_UNIT = re.compile(r"[A-Za-z0-9:_.\\@-]{1,200}\.service")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TEXT = {"name", "script", "tree", "python", "host", "url"}
LIMITS = (
    "drain_s",
    "stop_s",
    "gone_s",
    "gate_s",
    "soak_s",
    "consecutive",
    "probe_s",
    "router_s",
    "min_admitted",
    "keep_releases",
)


def request(value: Any, needed: tuple[str, ...]) -> dict[str, Any]:
    """The request's outer form. Raises AgentError."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise AgentError(
            f"request: found format {value.get('format') if isinstance(value, dict) else value!r}, "
            f"expected {FORMAT}. Controller and agent are of different versions."
        )
    missing = [name for name in needed if name not in value]
    if missing:
        raise AgentError(f"request: found no {', '.join(missing)}, expected them in a {value.get('op')!r} request.")
    return value


def worker(value: Any) -> dict[str, Any]:
    """A worker, with a missing bootstrap port as None. Raises AgentError."""
    found = _mapping("worker", value)
    for name in sorted(_TEXT | {"role", "unit", "port", "routers"}):
        if name not in found:
            raise AgentError(f"worker.{name}: found nothing, expected a value.")
    for name in sorted(_TEXT):
        if not isinstance(found[name], str) or not found[name] or "\0" in found[name]:
            raise AgentError(f"worker.{name}: found {found[name]!r}, expected a text.")
    if found["role"] not in ("decode", "prefill", "unified"):
        raise AgentError(f"worker.role: found {found['role']!r}, expected decode, prefill or unified.")
    if not isinstance(found["unit"], str) or not _UNIT.fullmatch(found["unit"]):
        raise AgentError(f"worker.unit: found {found['unit']!r}, expected a unit's name that ends in .service.")
    for name in ("script", "tree"):
        path = found[name]
        if not path.startswith("/") or any(part in (".", "..", "") for part in path.split("/")[1:]):
            raise AgentError(
                f"worker.{name}: found {path!r}, expected an absolute path without '.', '..' and double slashes."
            )
    _port("worker.port", found["port"])
    try:
        ipaddress.ip_address(found["host"].partition("%")[0])
    except ValueError as error:
        raise AgentError(
            f"worker.host: found {found['host']!r}, expected a literal address such as 127.0.0.1: a name "
            "may be another server's."
        ) from error
    bootstrap = found.get("bootstrap_port") or None
    if bootstrap is not None:
        _port("worker.bootstrap_port", bootstrap)
    if not isinstance(found["routers"], list):
        raise AgentError(f"worker.routers: found {found['routers']!r}, expected a list.")
    for number, router in enumerate(found["routers"]):
        if not isinstance(_mapping(f"worker.routers[{number}]", router).get("url"), str):
            raise AgentError(f"worker.routers[{number}].url: found {router.get('url')!r}, expected the router's URL.")
    return {**found, "bootstrap_port": bootstrap}


def secrets(value: Any) -> dict[str, Any]:
    """Secrets with every group present. Says names, never values. Raises AgentError."""
    found = _mapping("secrets", value)
    result: dict[str, Any] = {
        "api_key": found.get("api_key") or None,
        "host_key": found.get("host_key") or None,
    }
    for name in ("api_key", "host_key"):
        if not isinstance(result[name], (str, type(None))):
            raise AgentError(f"secrets.{name}: found a {type(result[name]).__name__}, expected a text or null.")
    for group in ("router_keys", "env", "args"):
        content = found.get(group) or {}
        if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
            raise AgentError(f"secrets.{group}: found a {type(content).__name__}, expected names with their values.")
        result[group] = content
    return result


def limits(value: Any) -> dict[str, Any]:
    """The limits, all of them numbers that are not negative. Raises AgentError."""
    found = _mapping("limits", value)
    for name in LIMITS:
        number = found.get(name)
        if isinstance(number, bool) or not isinstance(number, (int, float)) or number < 0:
            raise AgentError(f"limits.{name}: found {number!r}, expected a number of 0 or more.")
    if found["consecutive"] < 1 or found["gate_s"] <= 0 or found["probe_s"] <= 0 or found["stop_s"] <= 0:
        raise AgentError("limits: found consecutive below 1, or gate_s, probe_s or stop_s of 0; expected more.")
    return found


def generation(value: Any) -> dict[str, Any]:
    found = _mapping("generation", value)
    if (
        not isinstance(found.get("prompt"), str)
        or not isinstance(found.get("expect"), str)
        or not isinstance(found.get("max_tokens"), int)
    ):
        raise AgentError("generation: found no prompt, expect and max_tokens of the right types, expected all three.")
    try:
        re.compile(found["expect"])
    except re.error as error:
        raise AgentError(
            f"generation.expect: found {found['expect']!r}, expected a regular expression: {error}."
        ) from error
    return found


def target(value: Any) -> dict[str, Any]:
    """A target: a state by name alone, or one with all that it is made of. Raises AgentError."""
    found = _mapping("target", value)
    state = found.get("state")
    if state != "baseline":
        digest("target.state", state)
    if set(found) == {"state"}:
        return found
    for name in ("script", "unit", "unit_digest", "release", "secrets", "expect"):
        if name not in found:
            raise AgentError(
                f"target.{name}: found nothing, expected a value, or 'state' alone for a state that the worker keeps."
            )
    for name in ("script", "unit"):
        if not isinstance(found[name], str):
            raise AgentError(f"target.{name}: found a {type(found[name]).__name__}, expected a text.")
    digest("target.unit_digest", found["unit_digest"])
    if found["secrets"] != "none":
        digest("target.secrets", found["secrets"])
    release = _mapping("target.release", found["release"])
    digest("target.release.digest", release.get("digest"))
    digest("target.release.tree", release.get("tree"))
    _mapping("target.release.manifest", release.get("manifest"))
    _mapping("target.release.files", release.get("files"))
    expect = _mapping("target.expect", found["expect"])
    if expect.get("release") != release["digest"]:
        raise AgentError(
            f"target.expect.release: found {expect.get('release')!r}, expected the release's digest "
            f"{release['digest']}."
        )
    for name in ("flags", "environment"):
        _mapping(f"target.expect.{name}", expect.get(name))
    return found


def digest(what: str, value: Any) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise AgentError(f"{what}: found {value!r}, expected a sha256 in 64 hex digits.")
    return value


def _mapping(what: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise AgentError(f"{what}: found a {type(value).__name__}, expected a mapping.")
    return value


def _port(what: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 65536:
        raise AgentError(f"{what}: found {value!r}, expected a port number.")
