"""The patcher and the tree's readers against real SGLang wheels, fetched by version and checked by sha256."""

from __future__ import annotations

import ast
import fnmatch
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from patches.errors import PatchError
from patches.hooks import HOOKS, MARK
from patches.release import build
from patches.versions import WHEELS


def fetch(version: str, cache: Path) -> Path:
    """The wheel of one version, from `cache` or downloaded into it; its sha256 is as pinned."""
    cache.mkdir(parents=True, exist_ok=True)
    wheel = next(cache.glob(f"sglang-{version}-*.whl"), None)
    if wheel is None:
        with tempfile.TemporaryDirectory(dir=cache) as directory:
            command = [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
                *("--python-version=3.11", "--implementation=cp", "--platform=manylinux_2_34_x86_64"),
                *("--dest", directory, f"sglang=={version}"),
            ]
            result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
            found = sorted(Path(directory).glob("*.whl"))
            if result.returncode or not found:
                raise PatchError(f"pip could not download sglang=={version}: {result.stderr.strip()}")
            wheel = found[0].rename(cache / found[0].name)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEELS[version]:
        raise PatchError(f"{wheel} has sha256 {digest}, expected {WHEELS[version]}. Remove it and try again.")
    return wheel


def read(version: str, cache: Path, patterns: Sequence[str]) -> dict[str, bytes]:
    """Files of a wheel whose path relative to the tree matches one of the patterns."""
    with zipfile.ZipFile(fetch(version, cache)) as archive:
        return {
            name: archive.read(name)
            for name in archive.namelist()
            if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
        }


def check(version: str, base: dict[str, bytes]) -> list[str]:
    """Build a release of one version and look at it; returns what was found, one line a hook.

    Raises PatchError where the result is not as it should be.
    """
    digest = hashlib.sha256(version.encode()).hexdigest()
    release = build(base, digest, version)
    again = build({rel: release.files[f"python/{rel}"] for rel in base}, digest, version)
    if again.files != release.files:
        raise PatchError(f"SGLang {version}: patching the patched tree gives other bytes than patching once.")
    lines = []
    for hook in HOOKS:
        before = base[hook.file].decode().splitlines()
        after = release.files[f"python/{hook.file}"].decode().splitlines()
        ast.parse("\n".join(after))
        added = [
            (number, line)
            for number, line in enumerate(after, 1)
            if line.rstrip().endswith(f"{MARK} {hook.name}")
        ]
        if [line for line in after if MARK not in line] != before:
            raise PatchError(
                f"SGLang {version}: {hook.file} differs from its base by more than the hooks' lines."
            )
        if len(added) != 1:
            raise PatchError(
                f"SGLang {version}: {hook.file} has {len(added)} lines of hook {hook.name}, expected 1."
            )
        lines.append(f"{version:<12} {hook.name:<28} {hook.file}:{added[0][0]}")
    return lines


def run(versions: Sequence[str], cache: Path) -> int:
    """Print the table over versions; returns 0, or 1 when a version failed."""
    failed = 0
    for version in versions:
        try:
            print("\n".join(check(version, read(version, cache, [hook.file for hook in HOOKS]))), flush=True)
        except PatchError as error:
            failed += 1
            print(f"{version:<12} FAILED: {error}", flush=True)
    print(f"{len(versions) - failed} of {len(versions)} versions patched, {failed} failed")
    return 1 if failed else 0
