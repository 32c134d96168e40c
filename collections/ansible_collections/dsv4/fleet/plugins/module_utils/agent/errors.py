"""What the agent says when it will not or cannot do what it was asked."""

from __future__ import annotations

import errno
import os


class AgentError(Exception):
    """One sentence or two: what was found, what was expected, what to do."""


def explain(error: OSError, what: str, path: str) -> AgentError:
    """An AgentError that says in the operator's words what the system refused.

    what: the thing that was being done, such as "writing the serve script".
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return AgentError(
            f"{what}: no space left for {path} ({free_bytes(path)} bytes free); expected room for it. "
            "Free space on that file system and run again; the target was not changed."
        )
    if error.errno == errno.EROFS:
        return AgentError(
            f"{what}: {path} lies on a read-only file system; expected one that can be written. "
            "Remount it read-write and run again; the target was not changed."
        )
    if error.errno == errno.EBUSY:
        return AgentError(
            f"{what}: {path} is a mount point (busy); expected a plain file that a rename can replace. "
            "Remove the bind mount, or mount the directory above it, and run again; the target was not "
            "changed."
        )
    return AgentError(f"{what}: {path}: {error.strerror or error}; expected it to succeed. Mend that and run again.")


def free_bytes(path: str) -> int:
    """Bytes that root may still write to the file system of the nearest directory that exists."""
    while path and not os.path.isdir(path):
        path = os.path.dirname(path)
    status = os.statvfs(path or "/")
    return status.f_bfree * status.f_frsize
