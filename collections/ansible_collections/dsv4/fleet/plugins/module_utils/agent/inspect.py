"""What one worker is, read without changing anything but a cache under /run."""

from __future__ import annotations

import fnmatch
import os
import platform
import stat
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from . import (
    check,
    engine,
    files,
    journal,
    passports,
    paths,
    proc,
    python_env,
    release,
    router,
    secrets,
    states,
    systemd,
)
from .follow import running_transaction
from .ledger import Ledger

HEALTH_S = 10.0
ROUTER_S = 10.0
_SHOWN = ("SGLANG_", "SGL_", "DSV4_", "PYTHON", "SPT_")


def inspect(request: dict[str, Any], manager: systemd.Systemd | None = None) -> dict[str, Any]:
    """The answer to an `inspect` request, without `format` and `ok`."""
    worker = check.worker(request["worker"])
    known = check.secrets(request["secrets"])
    manager = manager or systemd.Systemd()
    fast = bool(request.get("fast"))
    with ThreadPoolExecutor(max_workers=4 + len(worker["routers"])) as pool:
        slow: dict[str, Future[Any]] = {}
        if not fast:
            # What waits for a disk, an interpreter or a network waits at the same time.
            slow["tree"] = pool.submit(look_at_tree, worker, request.get("tree_files") or [], request.get("known_trees") or [])
            slow["python"] = pool.submit(python_env.look, worker["python"])
            slow["health"] = pool.submit(look_at_health, worker, known)
            slow["routers"] = pool.submit(look_at_routers, worker, known, pool)
        shown = manager.show(worker["unit"])
        process = look_at_process(worker, shown)
        store, ledger = states.Store(worker), Ledger(worker["unit"])
        key = secrets.host_key()
        directories = [
            shown.working_directory or "/",
            *([process["cwd"]] if process and process["cwd"] else []),
            paths.EMPTY,
        ]
        stamps = passports.read(paths.passports(worker["unit"]))
        answer = {
            "host": {
                "boot_id": boot_id(),
                "agent_python": platform.python_version(),
                "now": round(time.time(), 3),
                "needs_host_key": key is None,
            },
            "script": look_at_script(worker),
            "unit": look_at_unit(shown),
            "process": process,
            "passports": stamps,
            "instruments": passports.at_work(paths.passports(worker["unit"]), stamps),
            "secrets_digest": secrets.digest(known, key),
            "stray": python_env.stray(directories, worker["tree"]),
            "ledger": ledger.content(),
            "baseline": store.has_baseline(),
            "states": store.names(),
            "releases": release.listed(),
            "transaction": look_at_transaction(worker["unit"], ledger, manager),
        }
        answer.update({name: future.result() for name, future in slow.items()})
    return answer


def look_at_tree(worker: dict[str, Any], patterns: list[str], known: list[str]) -> dict[str, Any]:
    """Digest and version; for a tree that the controller does not know, also names and the wanted files."""
    found = files.index(worker["tree"])
    answer: dict[str, Any] = {
        "path": worker["tree"],
        "digest": found.digest,
        "version": found.version,
        "files": found.files,
    }
    if found.digest not in known:
        answer["names"] = found.names
        answer["content"] = {
            os.fsdecode(entry.path): python_env.pack(files.read(os.fsdecode(entry.source)) or b"")
            for entry in files.entries(worker["tree"])
            if any(_matches(os.fsdecode(entry.path), pattern) for pattern in patterns)
        }
    return answer


def _matches(path: str, pattern: str) -> bool:
    """A shell pattern, part by part: `*` does not cross a slash."""
    parts, wanted = path.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(fnmatch.fnmatchcase(part, one) for part, one in zip(parts, wanted))


def look_at_health(worker: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    status, error = engine.Worker(worker["host"], worker["port"], known["api_key"]).health(HEALTH_S)
    return {"status": status, "error": error}


def look_at_routers(worker: dict[str, Any], known: dict[str, Any], pool: ThreadPoolExecutor) -> list[dict[str, Any]]:
    """Each router's view, in the order of the worker's routers."""
    asked = [pool.submit(_look_at_router, worker, one["url"], known) for one in worker["routers"]]
    return [future.result() for future in asked]


def _look_at_router(worker: dict[str, Any], url: str, known: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "url": url,
        "reachable": True,
        "error": None,
        "listed": False,
        "healthy": False,
        "admitted": {},
    }
    try:
        workers = router.Router(url, known["router_keys"].get(url)).workers(ROUTER_S)
    except router.RouterError as error:
        return {**answer, "reachable": False, "error": str(error)}
    own = [one for one in workers if router.same(one.url, worker["url"])]
    for role in ("decode", "prefill", "unified"):
        count = router.others(workers, role, "")
        if count:
            answer["admitted"][role] = count
    answer["listed"] = bool(own)
    answer["healthy"] = bool(own) and all(one.healthy for one in own)
    return answer


def look_at_script(worker: dict[str, Any]) -> dict[str, Any]:
    path = worker["script"]
    kind = files.kind(path)
    data = files.read(path) if kind in ("file", "link", "mount") else None
    return {
        "path": path,
        "kind": kind,
        "link": os.readlink(path) if kind == "link" else None,
        "mode": None if data is None else f"{stat.S_IMODE(os.stat(path).st_mode):04o}",
        "sha256": None if data is None else files.sha256(data),
        "state": None if data is None else states.state_of(data),
        "declared": None if data is None else states.exports(data).get("DSV4_FLEET_STATE"),
        "text": None if data is None else data.decode(errors="replace"),
    }


def look_at_unit(shown: systemd.Unit) -> dict[str, Any]:
    return {
        "name": shown.name,
        "load": shown.load,
        "active": shown.active,
        "sub": shown.sub,
        "file_state": shown.file_state,
        "fragment": shown.fragment,
        "text": shown.text,
        "drop_ins": shown.drop_ins,
        "digest": shown.digest,
        "need_daemon_reload": shown.need_daemon_reload,
        "main_pid": shown.main_pid,
        "invocation": shown.invocation,
        "restarts": shown.restarts,
        "exec_start": shown.exec_start,
        "user": shown.user,
        "environment": visible(shown.environment),
        "environment_files": shown.environment_files,
    }


def look_at_process(worker: dict[str, Any], shown: systemd.Unit) -> dict[str, Any] | None:
    """The unit's main process; None where there is none."""
    main = proc.process(shown.main_pid) if shown.main_pid else None
    if main is None:
        return None
    members = proc.processes_of(shown.cgroup)
    listening = proc.listener(worker["port"], worker["host"])
    return {
        "pid": main.pid,
        "start_time": main.start_time,
        "cmdline": visible_arguments(main.cmdline),
        "cwd": _link(f"/proc/{main.pid}/cwd"),
        "state": main.environ.get("DSV4_FLEET_STATE"),
        "environment": visible({name: value for name, value in main.environ.items() if name.startswith(_SHOWN)}),
        "listening": any(pid in {one.pid for one in members} for pid in listening),
        "processes": len(members),
    }


def visible(environment: dict[str, str]) -> dict[str, str]:
    """The environment with values that look secret replaced."""
    return {name: "(secret)" if states.secret_name(name) else value for name, value in environment.items()}


def visible_arguments(arguments: list[str]) -> list[str]:
    """A command line with the values of options that look secret replaced."""
    shown: list[str] = []
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        before = shown[-1] if shown else ""
        if before.startswith("--") and "=" not in before and states.secret_name(before) and not argument.startswith("--"):
            shown.append("(secret)")
        elif equals and name.startswith("--") and states.secret_name(name):
            shown.append(f"{name}=(secret)")
        else:
            shown.append(argument)
    return shown


def look_at_transaction(unit: str, ledger: Ledger, manager: systemd.Systemd) -> dict[str, Any] | None:
    """The transaction that runs on this host; else one of this worker without a result, or that needs a person."""
    running = running_transaction(manager)
    for one in reversed(journal.unfinished()):
        request = one.request()
        if one.id == running or (running is None and request["worker"]["unit"] == unit):
            return {
                "id": one.id,
                "running": one.id == running,
                "unit": request["worker"]["unit"],
                "target": request["target"]["state"],
                "step": one.step(),
                "result": None,
            }
    if not ledger.needs_person or ledger.last is None:
        return None
    one = journal.Transaction(ledger.last["id"])
    target = one.request()["target"]["state"] if one.exists() else None
    result = one.result() or {
        "id": one.id,
        "end_state": ledger.last["end_state"],
        "failed": True,
        "error": "its directory is gone",
    }
    return {
        "id": one.id,
        "running": False,
        "unit": unit,
        "target": target,
        "step": one.step(),
        "result": result,
    }


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None
