"""Files that are either whole or not there."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the file at once: a reader sees the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def write_json(path: Path, value: Any) -> None:
    """As `write_bytes`, readable by people too."""
    write_bytes(path, (json.dumps(value, indent=1) + "\n").encode())


def expect_writable(path: Path) -> None:
    """OSError or ValueError now where the file could not be written later, after hours of work."""
    if path.is_dir():
        raise ValueError(f"found a folder {path}, expected the name of a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def in_words(error: Exception) -> str:
    """An error as an operator reads it; Python's own words for files begin with a number."""
    if isinstance(error, OSError) and error.filename:
        return f"found that {error.filename} can't be used: {error.strerror}"
    return str(error)
