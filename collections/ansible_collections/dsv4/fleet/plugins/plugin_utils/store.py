"""The controller's cache: trees by digest, and the releases built from them.

Each distinct tree on the fleet is fetched once and patched once. Everything here is named by its content, so the cache
may be removed at any time; it is filled again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import typing as t

from ansible_collections.dsv4.fleet.plugins.plugin_utils import tree as upstream
from ansible_collections.dsv4.fleet.plugins.plugin_utils.flags import SettingError
from ansible_collections.dsv4.fleet.plugins.plugin_utils.remote import unpack_text

ROOT = pathlib.Path(__file__).resolve().parents[6]
"""The repository: `python -m patches` is run here."""

HOOKED_FILES = (
    "sglang/srt/environ.py",
    "sglang/srt/layers/attention/dsv4/indexer.py",
    "sglang/srt/model_executor/runner/decode_cuda_graph_runner.py",
    "sglang/srt/models/deepseek_v4.py",
)


@dataclasses.dataclass(frozen=True)
class Overlay:
    """An operator's own patched file: its path in the tree, its content, the sha256 of the base file or ``new``."""

    file: str
    source: pathlib.Path
    base: str
    digest: str


@dataclasses.dataclass(frozen=True)
class Tree:
    """What is known of one source tree."""

    digest: str
    version: str
    directory: pathlib.Path
    names: frozenset[str]

    def sources(self) -> dict[str, str]:
        """The fetched files' text by path."""
        return {
            str(path.relative_to(self.directory)): path.read_text(encoding="utf-8")
            for path in sorted(self.directory.rglob("*.py"))
        }


def overlays(items: t.Any) -> list[Overlay]:
    """The overlays of ``sglang_release_overlays``: a list of file, source (on the controller), base_sha256.

    Raises:
        SettingError: for entries of another shape and for sources that cannot be read, one line each.
    """
    result: list[Overlay] = []
    problems: list[str] = []
    for number, item in enumerate(items, 1):
        label = f"sglang_release_overlays[{number}]"
        if not isinstance(item, dict) or set(item) != {"file", "source", "base_sha256"}:
            keys = sorted(item) if isinstance(item, dict) else item
            problems.append(f"{label}: found {keys}; expected the keys file, source and base_sha256")
            continue
        source = pathlib.Path(str(item["source"])).expanduser()
        if not source.is_file():
            problems.append(f"{label}: found no file {source}; expected the patched {item['file']} there")
            continue
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        result.append(Overlay(str(item["file"]), source, str(item["base_sha256"]), digest))
    if problems:
        raise SettingError("\n".join(problems))
    return sorted(result, key=lambda overlay: overlay.file)


class Store:
    """The cache in one directory, safe for Ansible's forks."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = pathlib.Path(directory).resolve()
        for name in ("trees", "releases"):
            (self._directory / name).mkdir(parents=True, exist_ok=True)

    def known_trees(self, needed: t.Collection[str]) -> list[str]:
        """Digests of the trees that are here with all *needed* files looked for."""
        return [
            path.parent.name
            for path in sorted((self._directory / "trees").glob("*/tree.json"))
            if set(needed) <= set(json.loads(path.read_text())["looked_for"])
        ]

    def tree(self, seen: t.Mapping[str, t.Any], needed: t.Collection[str]) -> Tree:
        """The tree that a host answered with, kept; or the one kept before, where the answer left its content out."""
        directory = self._directory / "trees" / seen["digest"]
        with self._lock(f"tree-{seen['digest']}"):
            if seen.get("content") is not None:
                fresh = pathlib.Path(tempfile.mkdtemp(dir=self._directory))
                for rel, text in seen["content"].items():
                    path = fresh / "files" / rel
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(unpack_text(text))
                facts = {"version": seen["version"], "names": seen["names"], "looked_for": sorted(needed)}
                (fresh / "tree.json").write_text(json.dumps(facts))
                if directory.exists():
                    shutil.rmtree(directory)
                fresh.rename(directory)
            facts = json.loads((directory / "tree.json").read_text())
        return Tree(seen["digest"], facts["version"], directory / "files", frozenset(facts["names"]))

    def facts(self, tree: Tree) -> tuple[dict[str, upstream.EnvVar], dict[str, upstream.Argument]]:
        """The variables and launch arguments that the tree's own sources declare; parsed once for each tree."""
        path = tree.directory.parent / f"facts-{_digest_of(pathlib.Path(upstream.__file__))}.json"
        if not path.exists():
            sources = tree.sources()
            try:
                declared = upstream.declared_env(sources[upstream.ENVIRON_FILE])
                arguments = upstream.launch_arguments(sources)
            except (KeyError, upstream.TreeError) as error:
                raise SettingError(f"tree {tree.digest[:12]} ({tree.version}): {error}") from error
            facts = [{k: dataclasses.asdict(v) for k, v in part.items()} for part in (declared, arguments)]
            _write(path, json.dumps(facts))
        first, second = json.loads(path.read_text())
        return (
            {name: upstream.EnvVar(**fields) for name, fields in first.items()},
            {name: upstream.Argument(**{**f, "choices": f["choices"] and tuple(f["choices"])}) for name, f in second.items()},
        )

    def release(self, tree: Tree, chosen: t.Sequence[Overlay]) -> dict[str, t.Any]:
        """The release of *tree* with the overlays, built by the patcher unless it is here.

        Returns:
            ``digest``, ``tree``, ``manifest`` and ``directory`` (its files on the controller).

        Raises:
            SettingError: with the patcher's own words.
        """
        patcher = [_digest_of(path) for path in sorted((ROOT / "patches").rglob("*.py"))]
        recipe = json.dumps([tree.digest, tree.version, [(o.file, o.base, o.digest) for o in chosen], patcher])
        key = hashlib.sha256(recipe.encode()).hexdigest()
        directory = self._directory / "releases" / key
        with self._lock(f"release-{key}"):
            if not (directory / "manifest.json").exists():
                self._build(tree, chosen, directory)
        manifest = (directory / "manifest.json").read_bytes()
        return {
            "digest": hashlib.sha256(manifest).hexdigest(),
            "tree": tree.digest,
            "manifest": json.loads(manifest),
            "directory": str(directory / "files"),
        }

    def _build(self, tree: Tree, chosen: t.Sequence[Overlay], directory: pathlib.Path) -> None:
        with tempfile.TemporaryDirectory(dir=self._directory) as scratch:
            out = pathlib.Path(scratch) / "release"
            argv = [
                sys.executable,
                "-m",
                "patches",
                "build",
                "--base",
                str(tree.directory),
                "--tree-digest",
                tree.digest,
            ]
            argv += ["--version", tree.version, "--out", str(out)]
            for overlay in chosen:
                argv += ["--overlay", f"{overlay.file}={overlay.source}:{overlay.base}"]
            done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300)
            if done.returncode != 0:
                raise SettingError(f"release: {done.stderr.strip() or done.stdout.strip()}")
            out.rename(directory)

    @contextlib.contextmanager
    def _lock(self, name: str) -> t.Iterator[None]:
        with open(self._directory / f".lock-{name[:24]}", "w", encoding="utf-8") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield


def release_files(release: t.Mapping[str, t.Any]) -> dict[str, bytes]:
    """The files that a release puts over its tree, by path in the release."""
    directory = pathlib.Path(release["directory"])
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def names_read(tree: Tree, files: t.Mapping[str, bytes]) -> frozenset[str]:
    """Every SGLANG_* and SGL_* name in the tree and in what a release puts over it: overlays, hooks, instruments."""
    return tree.names.union(*(upstream.names_in(data.decode(errors="replace")) for data in files.values()))


def _digest_of(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _write(path: pathlib.Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as handle:
        handle.write(text)
    os.replace(handle.name, path)
