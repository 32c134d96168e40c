"""Files that are whole or not there: atomic replacement, copies of trees, digests of trees.

Policy for what stands at a path that is replaced: a symbolic link is replaced itself and what it points to
is left alone; a mount point is refused; hard links are never shared, since a rename brings a new inode.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from . import paths
from .errors import AgentError, explain

FICLONE = 0x40049409
_CHUNK = 1 << 20
_NAMES = re.compile(rb"(?<![A-Za-z0-9_])(?:SGLANG|SGL)_[A-Za-z0-9_]+")
_CODE = (".py", ".cuh", ".cu", ".h", ".cpp")
_VERSION = re.compile(rb"""^__version__(?:\s*=\s*version)?\s*=\s*["']([^"']+)["']""", re.MULTILINE)
# A file changed within this many seconds may change again without its time stamps showing it.
_SETTLED_S = 2.0


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def canonical(value: Any) -> bytes:
    """JSON with sorted keys, no spaces, ASCII: equal values, equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


# --- one file ---


def kind(path: str) -> str:
    """file, link, missing, mount or other."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    if stat.S_ISLNK(mode):
        return "link"
    if is_mount(path):
        return "mount"
    return "file" if stat.S_ISREG(mode) else "other"


def is_mount(path: str) -> bool:
    """Whether something is mounted exactly here. os.path.ismount misses a file bound from its own file system."""
    path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    with open("/proc/self/mountinfo", "rb") as lines:
        points = {_unescape(line.split(b" ")[4]) for line in lines}
    return os.fsencode(path) in points


def _unescape(raw: bytes) -> bytes:
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match.group(1), 8)]), raw)


def read(path: str) -> bytes | None:
    """The file's bytes, through a link; None where there is none."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_json(path: str) -> Any:
    """The JSON value in the file; None where there is no file."""
    data = read(path)
    if data is None:
        return None
    try:
        return json.loads(data)
    except ValueError as error:
        raise AgentError(
            f"{path}: found no valid JSON ({error}); expected what the agent wrote. "
            "Restore that file from a backup, or move it away and run again."
        ) from error


def sync_directory(path: str) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def prepare(path: str, data: bytes, mode: int, owner: tuple[int, int] = (0, 0), tag: str = "new") -> str:
    """Write what is going to replace `path` beside it, fsynced; returns the temporary path.

    On any failure nothing is left behind. Raises AgentError.
    """
    temporary = temporary_path(path, tag)
    try:
        if kind(path) == "mount":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        discard(temporary)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fchown(handle, *owner)
            os.fchmod(handle, mode)
            os.fsync(handle)
    except OSError as error:
        discard(temporary)
        raise explain(error, "writing", path) from error
    return temporary


def prepare_link(path: str, target: str, tag: str = "new") -> str:
    """Like prepare, for a symbolic link."""
    temporary = temporary_path(path, tag)
    try:
        discard(temporary)
        os.symlink(target, temporary)
    except OSError as error:
        raise explain(error, "writing the link", path) from error
    return temporary


def commit(temporary: str, path: str) -> None:
    """One rename(2): a reader, and a shell that still reads the old file, see the old or the new one whole."""
    try:
        os.rename(temporary, path)
    except OSError as error:
        discard(temporary)
        raise explain(error, "replacing", path) from error
    sync_directory(os.path.dirname(path))


def replace(path: str, data: bytes, mode: int, owner: tuple[int, int] = (0, 0), tag: str = "new") -> None:
    commit(prepare(path, data, mode, owner, tag), path)


def remove(path: str) -> bool:
    """Remove a file or link; False where there was none."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise explain(error, "removing", path) from error
    sync_directory(os.path.dirname(path))
    return True


def temporary_path(path: str, tag: str) -> str:
    return os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.dsv4-{tag}")


def discard(path: str | None) -> None:
    """Remove a temporary file if there is one. A read-only file system has none, and is not asked."""
    if path is not None and os.path.lexists(path):
        os.unlink(path)


def directory(path: str, mode: int = 0o755) -> None:
    """Make the directory and its parents; only its own mode is set."""
    try:
        os.makedirs(path, exist_ok=True)
        if stat.S_IMODE(os.stat(path).st_mode) != mode:
            os.chmod(path, mode)
    except OSError as error:
        raise explain(error, "making the directory", path) from error


def directory_exists(path: str) -> None:
    if not os.path.isdir(path):
        raise AgentError(
            f"{path}: found no directory, expected the one that the file goes into. Make it, or correct the path."
        )


def remove_tree(path: str) -> None:
    """Remove a directory so that a half removed one never bears its name."""
    if not os.path.lexists(path):
        return
    trash = temporary_path(path, "trash")
    if os.path.lexists(trash):
        shutil.rmtree(trash)
    os.rename(path, trash)
    shutil.rmtree(trash)


def sync_file_system(path: str) -> None:
    """syncfs(2) of the file system that holds `path`: one call where a release has thousands of files."""
    handle = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(handle) != 0:
            code = ctypes.get_errno()
            raise explain(OSError(code, os.strerror(code)), "writing to disk", path)
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold the lock file for the length of the block; waits for whoever holds it."""
    directory(os.path.dirname(path))
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- a tree ---


@dataclass(frozen=True)
class Entry:
    """One regular file of a tree, a link to one read through. `path` is relative, in the system's bytes."""

    path: bytes
    source: bytes
    status: os.stat_result


@dataclass
class Index:
    """What a tree holds: see `tree` in docs/agent.md."""

    digest: str
    files: int
    version: str | None
    names: list[str] = field(default_factory=list)


def entries(tree: str) -> list[Entry]:
    """All regular files of the tree outside `__pycache__`, sorted by path. Raises AgentError."""
    root = os.fsencode(tree)
    if not os.path.isdir(root):
        raise AgentError(
            f"tree {tree}: found no directory; expected the directory that holds sglang/. "
            "Correct the worker's tree, or install SGLang's source there."
        )
    found: list[Entry] = []
    _walk(root, b"", [], found)
    return sorted(found, key=lambda entry: entry.path)


def _walk(base: bytes, below: bytes, above: list[tuple[int, int]], found: list[Entry]) -> None:
    status = os.stat(base)
    here = (status.st_dev, status.st_ino)
    if here in above:
        raise AgentError(
            f"tree: {os.fsdecode(base)} is a link to a directory above itself; expected a tree without "
            "loops. "
            "Remove that link."
        )
    with os.scandir(base) as items:
        for item in items:
            relative = below + item.name
            if item.is_dir():
                if item.name != b"__pycache__":
                    _walk(item.path, relative + b"/", [*above, here], found)
            elif item.is_file():
                found.append(Entry(relative, item.path, item.stat()))


def fingerprint(found: list[Entry]) -> str:
    """Changes whenever a file is replaced, written to or touched: path, size, times and inode of each."""
    digest = hashlib.sha256()
    for entry in found:
        status = entry.status
        line = b"%d %d %d %d %d %s\0" % (
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
            entry.path,
        )
        digest.update(line)
    return digest.hexdigest()


def tree_digest(sums: list[tuple[str, bytes]]) -> str:
    """sums: (sha256 in hex, relative path) of every file."""
    lines = sorted(digest.encode() + b"  " + path + b"\n" for digest, path in sums)
    return sha256(b"".join(lines))


def index(tree: str) -> Index:
    """Digest, version and names of a tree, from the cache where no file's fingerprint changed."""
    found = entries(tree)
    now = time.time()
    mark = fingerprint(found)
    cache = f"{paths.CACHE}/{sha256(os.fsencode(tree))}.json"
    stored = read_json(cache)
    if stored is not None and stored["fingerprint"] == mark:
        return Index(**stored["index"])
    sums: list[tuple[str, bytes]] = []
    names: set[bytes] = set()
    version = None
    for entry in found:
        data = read(os.fsdecode(entry.source))
        if data is None:
            raise AgentError(
                f"tree {tree}: {os.fsdecode(entry.path)} vanished while it was read; expected a tree at "
                "rest. "
                "Let whatever changes it finish and run again."
            )
        sums.append((sha256(data), entry.path))
        if entry.path.endswith(tuple(end.encode() for end in _CODE)):
            names.update(_NAMES.findall(data))
        if entry.path in (b"sglang/_version.py", b"sglang/version.py") and version is None:
            match = _VERSION.search(data)
            version = match.group(1).decode() if match else None
    result = Index(tree_digest(sums), len(found), version, sorted(name.decode() for name in names))
    newest = max((max(entry.status.st_ctime, entry.status.st_mtime) for entry in found), default=0.0)
    if newest < now - _SETTLED_S:
        directory(paths.CACHE, 0o700)
        replace(cache, canonical({"fingerprint": mark, "index": result.__dict__}), 0o600)
    return result


def copy_tree(source: str, target: str) -> str:
    """Copy all regular files (no `__pycache__`, links read through) and return the digest of what was copied.

    Clones blocks where the file system can, else copies. Files become 0444 or 0555. Raises AgentError.
    """
    sums: list[tuple[str, bytes]] = []
    base = os.fsencode(target)
    made: set[bytes] = set()
    clone = True
    for entry in entries(source):
        path = base + b"/" + entry.path
        parent = os.path.dirname(path)
        if parent not in made:
            os.makedirs(parent, exist_ok=True)
            made.add(parent)
        try:
            digest, clone = _copy(entry.source, path, clone)
        except OSError as error:
            raise explain(error, "copying the tree", os.fsdecode(path)) from error
        sums.append((digest, entry.path))
    return tree_digest(sums)


def _copy(source: bytes, target: bytes, clone: bool) -> tuple[str, bool]:
    """Copy one file; returns its sha256 and whether cloning is worth trying for the next."""
    digest = hashlib.sha256()
    with open(source, "rb", buffering=0) as reading, open(target, "xb+", buffering=0) as writing:
        if clone:
            try:
                fcntl.ioctl(writing, FICLONE, reading.fileno())
            except OSError as error:
                if error.errno not in (
                    errno.EOPNOTSUPP,
                    errno.EXDEV,
                    errno.ENOTTY,
                    errno.EINVAL,
                    errno.ENOSYS,
                ):
                    raise
                clone = False
        if clone:
            while chunk := writing.read(_CHUNK):
                digest.update(chunk)
        else:
            while chunk := reading.read(_CHUNK):
                digest.update(chunk)
                view = memoryview(chunk)
                while view:
                    view = view[writing.write(view) :]
        os.fchmod(writing.fileno(), 0o555 if os.fstat(reading.fileno()).st_mode & 0o111 else 0o444)
    return digest.hexdigest(), clone
