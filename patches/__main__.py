"""Command line: `python -m patches build …` and `python -m patches matrix …`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from patches.errors import PatchError
from patches.release import NEW, Overlay, build, tree_digest, tree_version
from patches.versions import WHEELS


def _overlay(text: str) -> Overlay:
    """`REL=FILE:SHA256_OF_BASE` or `REL=FILE:new`."""
    rel, equals, rest = text.partition("=")
    file, colon, base = rest.rpartition(":")
    if not equals or not colon:
        raise PatchError(f"--overlay {text!r}: expected REL=FILE:SHA256_OF_BASE or REL=FILE:{NEW}.")
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise PatchError(f"overlay {rel}: cannot read {file}: {error.strerror}.") from error
    return Overlay(rel, content, base)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 (a check failed), 2 (cannot be done)."""
    parser = argparse.ArgumentParser(prog="python -m patches", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("build", help="build one release from a tree's files", allow_abbrev=False)
    one.add_argument("--base", required=True, type=Path, help="directory with the tree's files")
    one.add_argument("--tree-digest", help="sha256 of the whole tree; taken from --base where not given")
    one.add_argument("--version", help="the tree's SGLang version; taken from --base where not given")
    one.add_argument("--overlay", action="append", default=[], metavar="REL=FILE:SHA256_OF_BASE")
    one.add_argument("--out", required=True, type=Path, help="a new directory")
    many = commands.add_parser("matrix", help="build and check against real wheels", allow_abbrev=False)
    many.add_argument("--versions", nargs="+", choices=sorted(WHEELS), default=sorted(WHEELS))
    many.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "dsv4-fleet" / "wheels")
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "matrix":
            from patches.matrix import run

            return run(arguments.versions, arguments.cache)
        overlays = [_overlay(text) for text in arguments.overlay]
        digest = arguments.tree_digest or tree_digest(arguments.base)
        version = arguments.version or tree_version(arguments.base)
        release = build(arguments.base, digest, version, overlays, arguments.out)
    except PatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(release.digest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
