"""The agent as one program, and how it is started on a host with a request."""

from __future__ import annotations

import functools
import io
import json
import os
import zipfile
from typing import Any

from . import files, paths

# Runs on whatever Python 3 is there, before anything is known to be whole: plain syntax, no imports of ours.
LOADER = r"""
import hashlib, json, os, sys
def refuse(text):
    print(json.dumps({"format": 1, "ok": False, "error": text}), flush=True)
    sys.exit(65)
if sys.version_info < (3, 9):
    refuse("agent: found Python %d.%d, expected 3.9 or newer. Set ansible_python_interpreter." % sys.version_info[:2])
sizes = [int(sys.argv[1]), int(sys.argv[3])]
data = sys.stdin.buffer.read()
if len(data) != sum(sizes):
    text = "agent: found %d bytes on standard input, expected %d. The connection broke: run again."
    refuse(text % (len(data), sum(sizes)))
program, request = data[:sizes[0]], data[sizes[0]:]
for name, part, wanted in (("program", program, sys.argv[2]), ("request", request, sys.argv[4])):
    found = hashlib.sha256(part).hexdigest()
    if found != wanted:
        text = "agent: found sha256 %s of the %s, expected %s. It was damaged on its way: run again."
        refuse(text % (found, name, wanted))
path = "CACHE/%s.%s.pyz" % (sys.argv[2], sys.implementation.cache_tag)
if not os.path.exists(path):
    handle = os.memfd_create("dsv4-agent")
    with open(handle, "wb", closefd=False) as file:
        file.write(program)
    path = "/proc/self/fd/%d" % handle
sys.dont_write_bytecode = True
sys.path.insert(0, path)
from agent.__main__ import answer
sys.exit(answer(request, program))
""".replace("CACHE", paths.CACHE)

# The stored program likewise takes its compiled form where that is kept (cache.py).
_MAIN = r"""
import hashlib, os, sys
with open(sys.argv[0], "rb") as file:
    digest = hashlib.sha256(file.read()).hexdigest()
path = "CACHE/%s.%s.pyz" % (digest, sys.implementation.cache_tag)
if os.path.exists(path):
    sys.path.insert(0, path)
from agent.__main__ import main
sys.exit(main(sys.argv[1:]))
""".replace("CACHE", paths.CACHE).encode()
_TIME = (1980, 1, 1, 0, 0, 0)


@functools.lru_cache(maxsize=1)
def program() -> bytes:
    """The package as a zip that Python can run: same source, same bytes."""
    directory = os.path.dirname(os.path.abspath(__file__))
    content = {"__main__.py": _MAIN}
    for name in sorted(os.listdir(directory)):
        if name.endswith(".py"):
            with open(os.path.join(directory, name), "rb") as file:
                content[f"agent/{name}"] = file.read()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, data in sorted(content.items()):
            entry = zipfile.ZipInfo(name, _TIME)
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data)
    return out.getvalue()


def command(request: dict[str, Any], python: str = "python3") -> tuple[list[str], bytes]:
    """(arguments, standard input) that carry out the request on a host. No secret is in the arguments."""
    body = json.dumps(request, separators=(",", ":")).encode()
    code = program()
    argv = [
        python,
        "-I",
        "-c",
        LOADER,
        str(len(code)),
        files.sha256(code),
        str(len(body)),
        files.sha256(body),
    ]
    return argv, code + body
