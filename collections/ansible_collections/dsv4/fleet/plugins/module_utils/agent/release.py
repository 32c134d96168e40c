"""A release: a copy of the host's tree with files put in, compiled, read-only, under the name of its content."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable
from typing import Any

from . import files, paths, python_env
from .errors import AgentError, explain, free_bytes

_IN_USE = re.compile(rb"/releases/([0-9a-f]{64})(?:/|$)", re.MULTILINE)
_SPARE = 64 << 20  # bytes beyond the tree's own: bytecode and what was put in


def digest_of(manifest: dict[str, Any]) -> str:
    """A release's name: sha256 of its manifest in canonical JSON."""
    return files.sha256(files.canonical(manifest))


def stage(spec: dict[str, Any], tree: str, python: str, say: Callable[..., None]) -> bool:
    """Have the release on disk, complete and checked; whether it was not there before.

    spec: `digest`, `tree` (digest of the base), `manifest`, `files` (path to base64 of zlib). Raises AgentError.
    """
    name, manifest = spec["digest"], spec["manifest"]
    if digest_of(manifest) != name:
        raise AgentError(
            f"release {name}: found digest {digest_of(manifest)} of its manifest, expected its name. The "
            "request is damaged: send it again."
        )
    final = paths.release(name)
    if os.path.isdir(final):
        check(name)
        _compile(final, python, _put_in(manifest), say)
        return False
    content = {path: python_env.unpack(text, f"release file {path}") for path, text in spec["files"].items()}
    _check_files(name, manifest, content)
    files.directory(paths.RELEASES)
    staging = f"{paths.RELEASES}/.staging-{name}"
    _remove(staging)
    _room(tree)
    try:
        os.makedirs(f"{staging}/python")
        found = files.copy_tree(tree, f"{staging}/python")
        if found != spec["tree"]:
            raise AgentError(
                f"release {name}: found base tree {tree} with digest {found}, expected {spec['tree']}. "
                "The tree changed since it was inspected: run again."
            )
        say(f"tree copied and verified: {found[:12]}")
        _put(staging, content)
        _compile(staging, python, _put_in(manifest), say)
        _seal(staging)
        files.replace(f"{staging}/manifest.json", files.canonical(manifest), 0o444)
        content_digest = files.index(f"{staging}/python").digest
        files.replace(f"{staging}/content.json", files.canonical({"format": 1, "digest": content_digest}), 0o444)
        os.chmod(staging, 0o555)
        files.sync_file_system(staging)
        os.rename(staging, final)
        files.sync_directory(paths.RELEASES)
    except OSError as error:
        raise explain(error, "staging the release", final) from error
    finally:
        _remove(staging)
    say(f"release {name[:12]} staged")
    return True


def check(name: str) -> None:
    """See that a release on disk is what its name says. Raises AgentError."""
    path = paths.release(name)
    manifest, content = files.read(f"{path}/manifest.json"), files.read_json(f"{path}/content.json")
    if manifest is None or files.sha256(manifest) != name or not isinstance(content, dict):
        raise AgentError(
            f"release {name}: found no manifest of that digest in {path}, expected one. Move that "
            "directory away and run again, which stages it anew."
        )
    found = files.index(f"{path}/python").digest
    if found != content["digest"]:
        raise AgentError(
            f"release {name}: found its files changed (digest {found}), expected {content['digest']}. "
            f"Somebody wrote into {path}: move it away and run again, which stages it anew."
        )


def _check_files(name: str, manifest: dict[str, Any], content: dict[str, bytes]) -> None:
    wanted = {path: entry["result"] for path, entry in manifest["files"].items()}
    if set(wanted) != set(content):
        raise AgentError(
            f"release {name}: found files {sorted(set(wanted) ^ set(content))} in only one of manifest and"
            " request, expected the same in both."
        )
    for path, data in content.items():
        parts = path.split("/")
        if parts[0] != "python" or len(parts) < 2 or any(part in ("", ".", "..", "__pycache__") for part in parts):
            raise AgentError(f"release {name}: found file path {path!r}, expected one below python/.")
        if files.sha256(data) != wanted[path]:
            raise AgentError(
                f"release {name}: found sha256 {files.sha256(data)} of {path}, expected {wanted[path]}. "
                "The request is damaged: send it again."
            )


def _room(tree: str) -> None:
    """Refuse before anything is written where it cannot fit."""
    needed = sum(entry.status.st_size for entry in files.entries(tree)) + _SPARE
    free = free_bytes(paths.RELEASES)
    if free < needed:
        raise AgentError(
            f"staging the release: found {free} bytes free for {paths.RELEASES}, expected {needed}. Free "
            "space (no space left is certain) and run again; nothing was changed."
        )


def _put(staging: str, content: dict[str, bytes]) -> None:
    for path, data in content.items():
        target = f"{staging}/{path}"
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.lexists(target):
            os.unlink(target)
        with open(target, "xb") as file:
            file.write(data)
        os.chmod(target, 0o444)


def _put_in(manifest: dict[str, Any]) -> list[str]:
    return [path for path in manifest["files"] if path.endswith(".py")]


def _compile(release: str, python: str, put_in: list[str], say: Callable[..., None]) -> None:
    """Bytecode checked against its source's hash, by the server's own Python, with all cores.

    A file of the base that does not compile is the base's affair; one that was put in must compile.
    """
    tag = python_env.look(python)["tag"]
    cached = [_bytecode(f"{release}/{path}", tag) for path in put_in]
    if cached and all(os.path.exists(path) for path in cached):
        return
    call = ["-m", "compileall", "-q", "-j", "0", "--invalidation-mode", "checked-hash", f"{release}/python"]
    said = ""
    try:
        python_env.execute(python, call, python_env.empty(), 1200.0)
    except AgentError as error:
        said = str(error)
    missing = [path for path, code in zip(put_in, cached) if not os.path.exists(code)]
    if missing:
        raise AgentError(
            f"release: {', '.join(missing)} do not compile with the server's Python, expected that they do. {said}"
        )
    if said:
        say("files of the base tree do not compile with the server's Python; they stay as they are")
    _seal(release)


def _bytecode(source: str, tag: str) -> str:
    directory, name = os.path.split(source)
    return f"{directory}/__pycache__/{name[:-3]}.{tag}.pyc"


def _seal(release: str) -> None:
    """Root's, and read-only."""
    for directory, _, names in os.walk(f"{release}/python"):
        os.chown(directory, 0, 0)
        os.chmod(directory, 0o555)
        for name in names:
            path = f"{directory}/{name}"
            os.chown(path, 0, 0)
            os.chmod(path, 0o555 if os.stat(path).st_mode & 0o111 else 0o444)


def listed() -> list[str]:
    """Digests of the releases on disk, newest last."""
    try:
        names = [name for name in os.listdir(paths.RELEASES) if not name.startswith(".")]
    except FileNotFoundError:
        return []
    return sorted(names, key=lambda name: os.stat(paths.release(name)).st_ctime_ns)


def in_use() -> set[str]:
    """Releases that a live process names in its environment or its command line."""
    found: set[str] = set()
    for pid in (name for name in os.listdir("/proc") if name.isdigit()):
        for part in ("environ", "cmdline"):
            try:
                with open(f"/proc/{pid}/{part}", "rb") as file:
                    data = file.read().replace(b"\0", b"\n")
            except OSError:  # it ended meanwhile, or is the kernel's
                continue
            found.update(match.decode() for match in _IN_USE.findall(data.replace(b":", b"\n")))
    return found


def collect_garbage(needed: set[str], keep: int) -> list[str]:
    """Remove releases that nobody needs beyond the newest `keep`, and leftovers; returns what was removed.

    needed: of states on disk, of the last proved ones and the ones before. Those in use are added here.
    """
    names = listed()
    kept = needed | in_use() | set(names[max(0, len(names) - keep) :] if keep > 0 else [])
    removed = [name for name in names if name not in kept]
    for name in removed:
        files.remove_tree(paths.release(name))
    if os.path.isdir(paths.RELEASES):
        for name in os.listdir(paths.RELEASES):
            if name.startswith("."):
                _remove(f"{paths.RELEASES}/{name}")
    return removed


def _remove(path: str) -> None:
    if os.path.isdir(path) and not stat.S_ISLNK(os.lstat(path).st_mode):
        shutil.rmtree(path)
