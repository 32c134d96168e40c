"""The server's own Python: what it is, what is installed for it, what it would import."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import zlib
from typing import Any

from . import files, paths
from .errors import AgentError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # systemd's for its services
MODULES = ("sglang", "dsv4_probe")

_PROBE = """
import importlib.util, json, os, site, sys
sites = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
sites = [path for path in dict.fromkeys(sites) if os.path.isdir(path)]
spec = importlib.util.find_spec("sglang")
where = None
if spec is not None:
    where = spec.origin or next(iter(spec.submodule_search_locations or []), None)
print(json.dumps({"executable": os.path.realpath(sys.executable), "version": "%d.%d.%d" % sys.version_info[:3],
                  "tag": sys.implementation.cache_tag, "sites": sites, "sglang": where}))
"""

_COMPILE = """
import base64, json, sys, warnings, zlib
warnings.simplefilter("ignore")
errors = []
for name, text in json.load(sys.stdin).items():
    try:
        compile(zlib.decompress(base64.b64decode(text)), name, "exec", dont_inherit=True)
    except SyntaxError as error:
        errors.append({"file": name, "line": error.lineno, "error": error.msg})
    except ValueError as error:
        errors.append({"file": name, "line": None, "error": str(error)})
print(json.dumps({"errors": errors, "version": "%d.%d.%d" % sys.version_info[:3]}))
"""


def find(python: str) -> str:
    """The interpreter's path as a service would find it. Raises AgentError."""
    found = shutil.which(python, path=PATH)
    if found is None:
        raise AgentError(
            f"python: found no program {python!r} on {PATH}, expected the server's interpreter. Correct "
            "the worker's python."
        )
    return found


def execute(python: str, arguments: list[str], directory: str, timeout_s: float, stdin: str | None = None) -> str:
    """Run the server's interpreter with a clean environment; its standard output. Raises AgentError."""
    program = find(python)
    try:
        done = subprocess.run(
            [program, *arguments], input=stdin, capture_output=True, text=True, errors="replace", cwd=directory,
            env={"PATH": PATH, "LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}, timeout=timeout_s, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AgentError(
            f"python: {program}: {error}; expected the server's interpreter to answer. Look at it on the host."
        ) from error
    if done.returncode != 0:
        raise AgentError(
            f"python: {program}: found exit status {done.returncode}, expected 0; it said: "
            f"{(done.stderr.strip() or done.stdout.strip())[-1500:]}"
        )
    return done.stdout


def look(python: str) -> dict[str, Any]:
    """executable, version, tag (of bytecode), fingerprint, and where `sglang` would come from in an empty directory."""
    found = json.loads(execute(python, ["-c", _PROBE], empty(), 60.0).splitlines()[-1])
    return {
        "executable": found["executable"],
        "version": found["version"],
        "tag": found["tag"],
        "fingerprint": fingerprint(found["executable"], found["version"], found["sites"]),
        "sglang": found["sglang"],
    }


def empty() -> str:
    """An empty directory that only root can write to."""
    for path in (paths.EMPTY, f"{paths.CACHE}/empty"):
        if os.path.isdir(path) and not os.listdir(path):
            return path
    files.directory(paths.CACHE, 0o700)
    files.directory(f"{paths.CACHE}/empty", 0o700)
    return f"{paths.CACHE}/empty"


def fingerprint(executable: str, version: str, sites: list[str]) -> str:
    """sha256 over the interpreter and what is installed into its site directories."""
    digest = hashlib.sha256(f"{executable}\n{version}\n".encode())
    for site in sites:
        for name in sorted(os.listdir(site)):
            path = f"{site}/{name}"
            if name.endswith(".dist-info"):
                data = files.read(f"{path}/RECORD")
            elif name.endswith((".pth", ".egg-link")):
                data = files.read(path)
            else:
                continue
            digest.update(
                f"{site}/{name} {'-' if data is None else files.sha256(data)}\n".encode(errors="surrogateescape")
            )
    return digest.hexdigest()


def stray(directories: list[str], tree: str) -> list[str]:
    """What would be imported from a working directory in the release's place, though it is neither tree nor release."""
    allowed = [os.path.realpath(tree), os.path.realpath(paths.RELEASES)]
    found: list[str] = []
    for directory in dict.fromkeys(directories):
        for module in MODULES:
            for path in _importable(directory, module):
                real = os.path.realpath(path)
                if not any(real == one or real.startswith(one + "/") for one in allowed) and path not in found:
                    found.append(path)
    return found


def _importable(directory: str, module: str) -> list[str]:
    """A package with or without __init__.py, a source, a bytecode or a native module of that name."""
    try:
        names = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    paths_ = []
    for name in names:
        path = os.path.join(directory, name)
        native = name.startswith(module + ".") and name.endswith(".so")
        if (name == module and os.path.isdir(path)) or name in (f"{module}.py", f"{module}.pyc") or native:
            paths_.append(path)
    return paths_


def compile_sources(python: str, sources: dict[str, str]) -> dict[str, Any]:
    """Compile sources (base64 of zlib) in memory with the server's Python."""
    return dict(
        json.loads(execute(python, ["-I", "-c", _COMPILE], empty(), 300.0, json.dumps(sources)).splitlines()[-1])
    )


def pack(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def unpack(text: str, what: str) -> bytes:
    try:
        return zlib.decompress(base64.b64decode(text, validate=True))
    except (ValueError, zlib.error) as error:
        raise AgentError(
            f"{what}: found something that is not base64 of zlib ({error}), expected a packed file. Send "
            "the request again."
        ) from error
