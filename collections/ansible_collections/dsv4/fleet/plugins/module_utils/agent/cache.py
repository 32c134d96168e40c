"""The program with its bytecode, kept in memory: compiling the agent anew costs more than most of what it is asked."""

from __future__ import annotations

import importlib.util
import io
import marshal
import os
import sys
import zipfile

from . import files, paths


def path(digest: str) -> str:
    """Where the compiled form of the program with this sha256 lies, for this Python."""
    return f"{paths.CACHE}/{digest}.{sys.implementation.cache_tag}.pyz"


def remember(program: bytes) -> None:
    """Keep the compiled program, and no other one. Only root can write there."""
    kept = path(files.sha256(program))
    if os.path.exists(kept):
        return
    files.directory(paths.RUN)
    files.directory(paths.CACHE, 0o700)
    for name in os.listdir(paths.CACHE):
        if name.endswith(".pyz"):
            files.remove(f"{paths.CACHE}/{name}")
    files.replace(kept, compiled(program), 0o600)


def compiled(program: bytes) -> bytes:
    """The same archive with a .pyc beside each source. Unchecked: its name is the digest of the sources."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(program)) as source, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as target:
        for entry in source.infolist():
            text = source.read(entry)
            target.writestr(entry, text)
            if entry.filename.startswith("agent/"):
                code = compile(text, entry.filename, "exec", dont_inherit=True)
                head = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + importlib.util.source_hash(text)
                target.writestr(zipfile.ZipInfo(entry.filename + "c", entry.date_time), head + marshal.dumps(code))
    return out.getvalue()
