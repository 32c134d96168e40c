"""A worker's place in its routers: out without losing a request, and in again, seen there.

The router removes a worker within milliseconds, lets running streams finish and then knows nothing more
about them; so the worker itself is asked whether it is idle. An added worker that does not answer is
retried for ever and cannot be cancelled; so only one that answers is ever added.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import engine, http
from .errors import AgentError

POLL_S = 0.25
REQUEST_S = 10.0  # of one call to a router's control interface
IDLE_READS = 2  # a request on its way from router to scheduler is not counted yet
# Removal takes milliseconds (smg: its fixed 5 s).
REMOVE_S = 20.0
_ROLES = {"decode": "decode", "prefill": "prefill", "regular": "unified"}
_TYPES = {role: kind for kind, role in _ROLES.items()}
# What must be there for a request to go through, by role.
_NEEDED = {"decode": ("decode", "prefill"), "prefill": ("decode", "prefill"), "unified": ("unified",)}

Say = Callable[..., None]


class RouterError(AgentError):
    """A router did not do, or does not say, what was asked. `lost`: it did not answer at all."""

    def __init__(self, text: str, lost: bool = False) -> None:
        super().__init__(text)
        self.lost = lost


class DrainRefused(AgentError):
    """The worker was not drained. `restored`: it is in its routers as before."""

    def __init__(self, reason: str, restored: bool) -> None:
        super().__init__(reason)
        self.restored = restored


@dataclass(frozen=True)
class RouterWorker:
    """A worker as a router lists it. `healthy` is the router's last look, up to its interval old."""

    id: str
    url: str
    role: str
    healthy: bool
    bootstrap_port: int | None


@dataclass(frozen=True)
class DrainResult:
    """`removed`: the routers it was taken out of. `dead`: nothing listened, so nothing was running."""

    removed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    dead: bool = False


class Router:
    """The control interface of one router. Every method raises RouterError."""

    def __init__(self, url: str, key: str | None) -> None:
        try:
            self.host, self.port, self.prefix = http.split(url)
        except ValueError as error:
            raise RouterError(f"router: {error}") from error
        self.url, self.key = url, key or None

    def workers(self, timeout_s: float = REQUEST_S) -> list[RouterWorker]:
        """The listed workers."""
        body = self._call("GET", "/workers", (200,), timeout_s=timeout_s)
        try:
            return [
                RouterWorker(
                    id=str(one["id"]),
                    url=str(one["url"]),
                    role=_ROLES.get(one["worker_type"], str(one["worker_type"])),
                    healthy=one["is_healthy"] is True,
                    bootstrap_port=one.get("bootstrap_port"),
                )
                for one in body["workers"]
            ]
        except (KeyError, TypeError, AttributeError) as error:
            raise RouterError(
                f"router {self.url}: found no worker list in its answer ({error!r}), expected sglang-router's /workers "
                "with id, url, worker_type and is_healthy; check the router's version"
            ) from error

    def listed(self, url: str) -> list[RouterWorker]:
        """The worker's entries: none, one, or one for each data-parallel rank."""
        return [one for one in self.workers() if same(one.url, url)]

    def remove(self, url: str, timeout_s: float = REMOVE_S) -> None:
        """Take the worker out; returns when the router no longer lists it."""
        deadline = time.monotonic() + timeout_s
        asked: set[str] = set()
        while True:
            listed = self.listed(url)
            if not listed:
                return
            for one in listed:
                if one.id not in asked:
                    self._call("DELETE", f"/workers/{one.id}", (200, 202, 404))
                    asked.add(one.id)
            if time.monotonic() >= deadline:
                raise RouterError(
                    f"router {self.url}: it still lists {url} {timeout_s:.0f} s after DELETE, expected it gone; look "
                    "at the router's log"
                )
            time.sleep(POLL_S)

    def admit(self, url: str, role: str, bootstrap_port: int | None, api_key: str | None, deadline: float) -> None:
        """Add the worker and see it listed and healthy before `deadline` (time.monotonic).

        Only for a worker that answers now: an add that waits for one cannot be cancelled. An entry that
        is unhealthy, or of another role or bootstrap port, is made anew.
        """
        listed = self.listed(url)
        if listed and all(fits(one, role, bootstrap_port) for one in listed):
            return
        if listed:
            self.remove(url)
        body: dict[str, Any] = {"url": url, "worker_type": _TYPES[role]}
        if role == "prefill" and bootstrap_port is not None:
            body["bootstrap_port"] = bootstrap_port
        if api_key:
            body["api_key"] = api_key
        accepted = self._call("POST", "/workers", (200, 201, 202), body=body)
        number = accepted.get("worker_id") or accepted.get("id") if isinstance(accepted, dict) else None
        status: str | None = "not asked yet"
        while True:
            try:
                listed = self.listed(url)
                number = next((one.id for one in listed), number)
                status = self._job(str(number)) if number else "unknown"
            except RouterError as error:
                if not error.lost or time.monotonic() >= deadline:
                    raise
                listed, status = [], str(error)
            if listed and status is None and all(fits(one, role, bootstrap_port) for one in listed):
                return
            if time.monotonic() >= deadline:
                seen = f"listed as {listed[0]}" if listed else "not listed"
                raise RouterError(
                    f"router {self.url}: after adding it, {url} is {seen} (its job: {status}), expected it listed and "
                    f"healthy as {role}; check that the router reaches {url} and that the key fits. The add cannot be "
                    "cancelled: the router may list this worker later"
                )
            time.sleep(POLL_S)

    def models(self) -> list[str]:
        """The ids that GET /v1/models names; clients look there first."""
        body = self._call("GET", "/v1/models", (200,))
        try:
            return [str(one["id"]) for one in body["data"]]
        except (KeyError, TypeError) as error:
            raise RouterError(f"router {self.url}: found no model list in /v1/models ({error!r})") from error

    def _job(self, number: str) -> str | None:
        """The state of an add: None when it is done."""
        answer = self._request("GET", f"/workers/{number}")
        if answer.status == 404:
            return "no such worker yet"
        if answer.status != 200:
            return f"status {answer.status}"
        body = self._json(answer)
        job = body.get("job_status") if isinstance(body, dict) else "unknown"
        if not job:
            return None
        state = str(job.get("status", job)) if isinstance(job, dict) else str(job)
        if "fail" in state.lower():
            raise RouterError(f"router {self.url}: adding the worker failed: {http.excerpt(str(job))}")
        return state

    def _call(
        self,
        method: str,
        path: str,
        wanted: tuple[int, ...],
        *,
        body: Any = None,
        timeout_s: float = REQUEST_S,
    ) -> Any:
        answer = self._request(method, path, body=body, timeout_s=timeout_s)
        if answer.status in (401, 403):
            raise RouterError(
                f"router {self.url}: found status {answer.status} of {method} {path}, expected its key to be accepted; "
                "set the router's control-plane key"
            )
        if answer.status not in wanted:
            raise RouterError(
                f"router {self.url}: found status {answer.status} of {method} {path}: {http.excerpt(answer.body)!r}, "
                f"expected {' or '.join(map(str, wanted))}"
            )
        return self._json(answer) if answer.body.strip() and answer.status != 404 else None

    def _request(self, method: str, path: str, *, body: Any = None, timeout_s: float = REQUEST_S) -> http.Answer:
        try:
            return http.request(
                method, self.host, self.port, self.prefix + path, timeout_s=timeout_s, body=body, key=self.key
            )
        except http.RequestError as error:
            raise RouterError(
                f"router {self.url}: {error}; expected an answer: check that the router runs and is reached from here",
                lost=True,
            ) from error

    def _json(self, answer: http.Answer) -> Any:
        try:
            return answer.json()
        except http.RequestError as error:
            raise RouterError(f"router {self.url}: {error}") from error


def same(listed: str, url: str) -> bool:
    """The same worker? A router that knows data-parallel ranks lists `url@rank`."""
    return re.sub(r"@\d+$", "", listed).rstrip("/") == url.rstrip("/")


def fits(one: RouterWorker, role: str, bootstrap_port: int | None) -> bool:
    """Is the entry what we would add, and in use?"""
    return one.healthy and one.role == role and (role != "prefill" or one.bootstrap_port == bootstrap_port)


def others(workers: list[RouterWorker], role: str, url: str) -> int:
    """How many other workers of the role the router uses."""
    return len(
        {
            re.sub(r"@\d+$", "", one.url)
            for one in workers
            if one.role == role and one.healthy and not same(one.url, url)
        }
    )


def routers_of(worker: dict[str, Any], secrets: dict[str, Any]) -> list[Router]:
    """The worker's routers with their keys."""
    keys = secrets.get("router_keys") or {}
    return [Router(one["url"], keys.get(one["url"])) for one in worker["routers"]]


def drain(worker: dict[str, Any], secrets: dict[str, Any], limits: dict[str, Any], say: Say) -> DrainResult:
    """Take the worker out of its routers and wait until it has nothing to do.

    Raises DrainRefused; then the worker is in its routers as before, unless the reason says otherwise.
    """
    started = time.monotonic()
    url, role, least = worker["url"], worker["role"], int(limits["min_admitted"])
    server = engine.Worker(worker["host"], int(worker["port"]), secrets.get("api_key"))
    listing: list[Router] = []
    try:
        for router in routers_of(worker, secrets):
            listed = router.workers()
            if not any(same(one.url, url) for one in listed):
                say(f"router {router.url} does not list {url}")
                continue
            _enough(router, listed, role, url, least)
            listing.append(router)
    except RouterError as error:
        raise DrainRefused(f"{error}. Nothing was changed", restored=True) from error

    removed: list[Router] = []
    try:
        for router in listing:
            removed.append(router)  # before the call: a removal whose answer is lost may have happened
            router.remove(url)
            _enough(router, router.workers(), role, url, least)
            say(f"removed from router {router.url}", router=router.url)
        dead = _idle(server, float(limits["drain_s"]), float(limits["probe_s"]), say)
    except (RouterError, _Busy) as error:
        raise _restore(str(error), removed, server, worker, secrets, limits, say) from error
    return DrainResult([router.url for router in removed], round(time.monotonic() - started, 3), dead)


def admit(
    worker: dict[str, Any],
    secrets: dict[str, Any],
    limits: dict[str, Any],
    say: Say,
    generation: dict[str, Any] | None = None,
) -> list[str]:
    """Put the worker into all its routers, see it healthy there, and see a request go through each.

    Returns notes: what could not be shown. Raises RouterError; then the worker is in none of the routers
    that this call added it to. `generation` (`prompt`, `expect`, `max_tokens`) is the request; without it
    any complete answer will do.
    """
    url, role = worker["url"], worker["role"]
    server = engine.Worker(worker["host"], int(worker["port"]), secrets.get("api_key"))
    notes: list[str] = []
    added: list[Router] = []
    try:
        for router in routers_of(worker, secrets):
            deadline = time.monotonic() + float(limits["router_s"])
            listed = _reached(router, url, deadline, say)
            if listed and all(fits(one, role, worker["bootstrap_port"]) for one in listed):
                say(f"router {router.url} has it, healthy", router=router.url)
            else:
                status, error = server.health(float(limits["probe_s"]))
                if status != 200:
                    raise RouterError(
                        f"found status {status} of the worker's /health ({error}), expected 200; it was not added to "
                        f"router {router.url}, which would go on trying for ever"
                    )
                added.append(router)
                router.admit(url, role, worker["bootstrap_port"], secrets.get("api_key"), deadline)
                say(f"admitted to router {router.url}", router=router.url)
            notes += _through(router, role, secrets, deadline, float(limits["probe_s"]), generation)
    except RouterError as error:
        left = _withdraw(added, url)
        raise RouterError(f"{error}{left}") from error
    for note in notes:
        say(note)
    return notes


class _Busy(Exception):
    """The worker did not become idle."""


def _enough(router: Router, listed: list[RouterWorker], role: str, url: str, least: int) -> None:
    found = others(listed, role, url)
    if found < least:
        raise RouterError(
            f"router {router.url}: without {url} it has {found} healthy {role} worker(s), expected at least {least} "
            "(min_admitted); admit another one first, or lower min_admitted"
        )


def _idle(server: engine.Worker, drain_s: float, probe_s: float, say: Say) -> bool:
    """Wait until nothing runs or waits; True if nothing even listens. Raises _Busy."""
    deadline = time.monotonic() + drain_s
    idle = dead = 0
    told: str | None = None
    while True:
        try:
            left = max(0.5, min(probe_s, deadline - time.monotonic()))
            count = server.loads(left)
            state = f"{count} request(s) running or waiting"
            idle, dead = (idle + 1 if count == 0 else 0), 0
        except engine.ProbeError as error:
            state = str(error)
            idle, dead = 0, (dead + 1 if error.kind == "refused" else 0)
        if idle >= IDLE_READS or dead >= IDLE_READS:
            return dead >= IDLE_READS
        if state != told:
            say(state)
            told = state
        if time.monotonic() >= deadline:
            raise _Busy(
                f"the worker was not idle {drain_s:.0f} s after it left its routers: {state}; expected nothing running "
                "or waiting; look for clients that bypass the router, or raise drain_s"
            )
        time.sleep(POLL_S)


def _restore(
    reason: str,
    removed: list[Router],
    server: engine.Worker,
    worker: dict[str, Any],
    secrets: dict[str, Any],
    limits: dict[str, Any],
    say: Say,
) -> DrainRefused:
    """Put the worker back where it was taken out, and say whether that worked."""
    failed: list[str] = []
    for router in removed:
        try:
            deadline = time.monotonic() + float(limits["router_s"])
            if not _reached(router, worker["url"], deadline, say):
                status, error = server.health(float(limits["probe_s"]))
                if status != 200:
                    failed.append(f"{router.url}: the worker's /health gives {error or status}")
                    continue
                router.admit(worker["url"], worker["role"], worker["bootstrap_port"], secrets.get("api_key"), deadline)
            say(f"put back into router {router.url}", router=router.url)
        except RouterError as error:
            failed.append(str(error))
    if failed:
        return DrainRefused(f"{reason}. It could not be put back: {'; '.join(failed)}", restored=False)
    return DrainRefused(f"{reason}. The worker is back in its routers", restored=True)


def _reached(router: Router, url: str, deadline: float, say: Say) -> list[RouterWorker]:
    """What the router lists of the worker; one that is just restarting is waited for."""
    told = False
    while True:
        try:
            return router.listed(url)
        except RouterError as error:
            if not error.lost or time.monotonic() >= deadline:
                raise
            if not told:
                say(f"waiting: {error}")
                told = True
        time.sleep(POLL_S)


def _withdraw(added: list[Router], url: str) -> str:
    """Remove what a failed admission added; what to append to its reason."""
    left: list[str] = []
    for router in added:
        try:
            router.remove(url)
        except RouterError as error:
            left.append(str(error))
    return f". Removing it again failed: {'; '.join(left)}" if left else ""


def _through(
    router: Router,
    role: str,
    secrets: dict[str, Any],
    deadline: float,
    probe_s: float,
    generation: dict[str, Any] | None,
) -> list[str]:
    """One chat request through the router, on a fresh connection, and its model list."""
    models = router.models()
    healthy = {one.role for one in router.workers() if one.healthy}
    missing = [one for one in _NEEDED[role] if one not in healthy]
    if missing:
        return [
            f"no request was sent through router {router.url}: it has no healthy {' and no healthy '.join(missing)} "
            "worker"
        ]
    prompt = generation or {"prompt": "Say hello.", "expect": "", "max_tokens": 8}
    body = engine.chat(prompt["prompt"], int(prompt["max_tokens"]), models[0] if models else "default")
    # A router with keys of its own for /workers wants another one for inference; which, we may not know.
    keys = list(dict.fromkeys([secrets.get("api_key") or None, router.key]))
    answer: engine.Generation | None = None
    while True:
        for key in keys:
            left = max(0.5, min(probe_s, deadline - time.monotonic()))
            answer = engine.ask(router.host, router.port, router.prefix, key, body, prompt["expect"], left)
            if answer.status not in (401, 403):
                break
        assert answer is not None
        if answer.ok:
            return []
        if answer.status in (401, 403):
            return [f"no request went through router {router.url}: it wants an inference key that is not known here"]
        if answer.final or time.monotonic() >= deadline:
            raise RouterError(
                f"router {router.url}: a request through it failed: {answer.error}; expected an answer: check each "
                "worker that it lists, and whether prefill and decode reach one another"
            )
        time.sleep(POLL_S)
