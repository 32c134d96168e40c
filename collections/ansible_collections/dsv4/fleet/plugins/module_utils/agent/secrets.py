"""The worker's secrets: the host's key, their digest, and the files that the serve script names."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
from typing import Any

from . import files, paths
from .errors import AgentError

NONE = "none"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEY = re.compile(r"[0-9a-f]{64}")


def host_key() -> str | None:
    """The host's key in hex, None before first contact."""
    data = files.read(paths.HOST_KEY)
    return None if data is None else data.decode().strip()


def ensure_host_key(offered: str | None) -> str | None:
    """The host's key; one that is offered is stored only where there is none."""
    found = host_key()
    if found is not None or offered is None:
        return found
    if not _KEY.fullmatch(offered):
        raise AgentError("secrets.host_key: found something else than 64 hex digits, expected 32 random bytes in hex.")
    files.directory(paths.LIB)
    files.replace(paths.HOST_KEY, offered.encode() + b"\n", 0o600)
    return offered


def digest(secrets: dict[str, Any], key: str | None) -> str | None:
    """HMAC-SHA256 in hex of what goes into the files; `none` where nothing does; None without a key."""
    content = {"env": secrets.get("env") or {}, "args": secrets.get("args") or {}}
    if not content["env"] and not content["args"]:
        return NONE
    if key is None:
        return None
    return hmac.new(bytes.fromhex(key), files.canonical(content), hashlib.sha256).hexdigest()


def write(unit: str, secrets: dict[str, Any], wanted: str, key: str | None) -> bool:
    """Write the files of these secrets under their digest; whether they were not there before.

    Raises AgentError where the digest is not the one that the script names.
    """
    found = digest(secrets, key)
    if found != wanted:
        raise AgentError(
            f"secrets: found digest {found}, expected {wanted} as the script names it. The secrets changed"
            " between "
            "inspect and change, or the host has another key: run again."
        )
    if wanted == NONE:
        return False
    path = directory(unit, wanted)
    content = {
        "env": env_file(secrets.get("env") or {}).encode(errors="surrogateescape"),
        "args.yaml": args_file(secrets.get("args") or {}).encode(),
    }
    if os.path.isdir(path) and all(files.read(f"{path}/{name}") == data for name, data in content.items()):
        return False
    files.directory(paths.worker(unit), 0o700)
    files.directory(os.path.dirname(path), 0o700)
    staging = files.temporary_path(path, "staging")
    files.remove_tree(staging)
    files.directory(staging, 0o700)
    try:
        for name, data in content.items():
            files.replace(f"{staging}/{name}", data, 0o600)
        files.remove_tree(path)
        os.rename(staging, path)
    finally:
        files.remove_tree(staging)
    files.sync_directory(os.path.dirname(path))
    return True


def directory(unit: str, wanted: str) -> str:
    return f"{paths.worker(unit)}/secrets/{wanted}"


def env_file(env: dict[str, Any]) -> str:
    """Assignments that sh reads back to the same bytes, whatever they hold."""
    lines = []
    for name, value in sorted(env.items()):
        if not _NAME.fullmatch(name) or not isinstance(value, str) or "\0" in value:
            raise AgentError(
                f"secrets.env: found {name!r} with a value of type {type(value).__name__}, expected a "
                "variable's name and text without NUL."
            )
        lines.append(f"{name}='" + value.replace("'", "'\\''") + "'\n")
    return "".join(lines)


def args_file(args: dict[str, Any]) -> str:
    """YAML for SGLang's --config: every text in double quotes, escaped as YAML and JSON agree on it."""
    lines = []
    for name, value in sorted(args.items()):
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name) or not isinstance(value, (str, int, float, bool)):
            raise AgentError(
                f"secrets.args: found {name!r} with a value of type {type(value).__name__}, expected an "
                "argument's name without dashes, and a plain value."
            )
        text = json.dumps(value, ensure_ascii=False)
        # YAML wants these escaped, JSON lets them stand.
        text = re.sub("[\x7f-\x9f\u2028\u2029\ufeff]", lambda match: f"\\u{ord(match.group()):04x}", text)
        lines.append(f"{name}: {text}\n")
    return "".join(lines)


def api_key(unit: str, wanted: str | None, otherwise: str | None) -> str | None:
    """The key that a server started with the secrets *wanted* asks for; *otherwise* where they name none.

    A change of the key has two servers with two keys: the one that is drained and the one that is proved.
    """
    text = files.read(f"{directory(unit, wanted)}/args.yaml") if wanted and wanted != NONE else None
    found = re.search(r'^api-key: (".*")$', text.decode(), re.MULTILINE) if text else None
    return json.loads(found[1]) if found else otherwise


def texts(secrets: dict[str, Any]) -> list[str]:
    """Every secret text, longest first: what must never stand in a journal, an answer or a log."""
    found = [secrets.get("api_key"), secrets.get("host_key")]
    for group in ("router_keys", "env", "args"):
        found += list((secrets.get(group) or {}).values())
    # Hiding one of fewer than four characters would only garble what is said.
    return sorted({one for one in found if isinstance(one, str) and len(one) >= 4}, key=len, reverse=True)


def store(identity: str, secrets: dict[str, Any]) -> None:
    """Keep the request's secrets in memory (/run) for the transaction's length."""
    files.directory(paths.RUN)
    files.directory(paths.SECRETS, 0o700)
    files.replace(paths.secrets(identity), files.canonical(secrets), 0o600)


def load(identity: str) -> dict[str, Any]:
    """The transaction's secrets; after a reboot there are none."""
    found = files.read_json(paths.secrets(identity))
    return found if isinstance(found, dict) else {}


def forget(identity: str) -> None:
    if os.path.isdir(paths.SECRETS):
        files.remove(paths.secrets(identity))
