"""Build one release: overlays, hooks, our package, and the manifest whose digest is its name."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from patches.errors import PatchError
from patches.hooks import HOOK_FILES, splice
from patches.version import VERSION

NEW = "new"
"""In place of an overlay's base digest: the base tree has no such file."""

PROBE = Path(__file__).parent / "dsv4_probe"


@dataclass(frozen=True)
class Overlay:
    """An operator's own file. `base` is the sha256 of the file that it was made from, or NEW."""

    rel: str
    content: bytes
    base: str

    def __post_init__(self) -> None:
        path = PurePosixPath(self.rel)
        if path.is_absolute() or ".." in path.parts or str(path) != self.rel or path.parts[:1] != ("sglang",):
            raise PatchError(
                f"overlay {self.rel!r}: expected a plain path inside the tree, such as "
                "'sglang/srt/environ.py', relative and without '..'."
            )
        if self.base != NEW and not re.fullmatch(r"[0-9a-f]{64}", self.base):
            raise PatchError(
                f"overlay {self.rel}: the base is pinned to {self.base!r}; expected the sha256 of the file "
                f"that it was made from (64 hex digits), or {NEW!r} for a file that the tree does not have."
            )


@dataclass(frozen=True)
class Release:
    """A built release. `files` maps paths such as `python/sglang/srt/environ.py` to their bytes."""

    digest: str
    manifest: dict[str, Any]
    files: dict[str, bytes]


def needed_files(overlays: Iterable[Overlay] = ()) -> list[str]:
    """The files of a tree that `build` has to be given, relative to the tree."""
    return sorted({*HOOK_FILES, *(overlay.rel for overlay in overlays)})


def canonical(manifest: Mapping[str, Any]) -> bytes:
    """The manifest's bytes: sorted keys, no spaces, ASCII, no newline at the end."""
    return json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def build(
    base: Path | Mapping[str, bytes],
    tree_digest: str,
    version: str,
    overlays: Sequence[Overlay] = (),
    out: Path | None = None,
) -> Release:
    """Build the release of one tree.

    base: a directory that holds the tree's needed files, or their contents by path.
    tree_digest: sha256 of the whole tree, as the agent computes it.
    out: where manifest.json and files/ go; must not exist yet, or be empty. None writes nothing.
    Raises PatchError.
    """
    if not re.fullmatch(r"[0-9a-f]{64}", tree_digest):
        raise PatchError(
            f"tree digest is {tree_digest!r}; expected a sha256 in 64 hex digits, as inspect reports it."
        )
    by_rel: dict[str, Overlay] = {}
    for overlay in overlays:
        if overlay.rel in by_rel:
            raise PatchError(f"overlay {overlay.rel} is given twice; expected one file for it.")
        by_rel[overlay.rel] = overlay

    files: dict[str, bytes] = {}
    entries: dict[str, dict[str, Any]] = {}
    for rel in needed_files(overlays):
        original = _read(base, rel)
        source, pinned = _overlaid(original, by_rel.get(rel), rel, version)
        names: list[str] = []
        hooked = False
        if rel in HOOK_FILES:
            if source is None:
                raise PatchError(
                    f"{rel} is missing in the tree given as SGLang {version}; hooks go into it. "
                    "Expected a complete tree of a version from 0.5.14 to 0.5.23."
                )
            source, names, hooked = splice(source, rel, version)
        assert source is not None
        _compiles(source, rel, version)
        files[f"python/{rel}"] = source
        entries[f"python/{rel}"] = {
            "base": None if original is None else _sha256(original),
            "base_hooked": hooked,
            "hooks": names,
            "overlay": pinned,
            "result": _sha256(source),
        }
    for path in sorted(PROBE.rglob("*.py")):
        rel = f"python/dsv4_probe/{path.relative_to(PROBE).as_posix()}"
        files[rel] = path.read_bytes()
        entries[rel] = {
            "base": None,
            "base_hooked": False,
            "hooks": [],
            "overlay": None,
            "result": _sha256(files[rel]),
        }

    manifest = {"files": entries, "fleet": VERSION, "format": 1, "tree": tree_digest, "version": version}
    release = Release(_sha256(canonical(manifest)), manifest, dict(sorted(files.items())))
    if out is not None:
        _write(release, out)
    return release


def tree_digest(tree: Path) -> str:
    """The digest of a whole tree, as the agent computes it on a host (docs/agent.md)."""
    lines = [
        f"{_sha256(path.read_bytes())}  {path.relative_to(tree).as_posix()}\n"
        for path in tree.rglob("*")
        if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts
    ]
    return _sha256("".join(sorted(lines)).encode())


def tree_version(tree: Path) -> str:
    """The version that a tree says it is. Raises PatchError where it does not say."""
    path = tree / "sglang" / "_version.py"
    found = (
        re.search(r"""^__version__ = (?:version = )?['"]([^'"]+)""", path.read_text(), re.M)
        if path.is_file()
        else None
    )
    if found is None:
        raise PatchError(f"{path} does not tell the tree's SGLang version; give it with --version.")
    return found[1]


def _overlaid(
    original: bytes | None, overlay: Overlay | None, rel: str, version: str
) -> tuple[bytes | None, str | None]:
    """The file with its overlay, and the overlay's sha256; checks the pin first."""
    if overlay is None:
        return original, None
    found = NEW if original is None else _sha256(original)
    if found != overlay.base:
        what = "has no such file" if original is None else f"has {found}"
        raise PatchError(
            f"overlay {rel}: it was made from {overlay.base}, but the tree (SGLang {version}) {what}. "
            "Make the overlay again from this tree's file and pin that file's sha256"
            + (f", or pin {NEW!r} if it is meant as a new file." if original is None else ".")
        )
    return overlay.content, _sha256(overlay.content)


def _read(base: Path | Mapping[str, bytes], rel: str) -> bytes | None:
    if isinstance(base, Mapping):
        return base.get(rel)
    path = base / rel
    return path.read_bytes() if path.is_file() else None


def _compiles(source: bytes, rel: str, version: str) -> None:
    """A first look with the controller's Python; the host's own judges again at preflight."""
    if not rel.endswith(".py"):
        return
    try:
        ast.parse(source, filename=rel)
    except (SyntaxError, ValueError) as error:
        raise PatchError(
            f"{rel} of SGLang {version}, patched, does not compile: {error}. Mend the overlay."
        ) from error


def _write(release: Release, out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PatchError(
            f"{out} exists and is not an empty directory; expected a new one. Name another or remove it."
        )
    for rel, content in release.files.items():
        path = out / "files" / rel
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (out / "manifest.json").write_bytes(canonical(release.manifest))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
