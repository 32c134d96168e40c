"""The gate: proof that a unit runs the wanted state, or a refusal that says what was found instead.

One wall-clock deadline for everything, one probe in flight at a time. Whatever may still get well is
waited for (a closed port, a 503, a redirect); what never will is refused at once.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import engine, http, passports, paths, proc, redaction, router, states, systemd
from .errors import AgentError

POLL_S = 0.5
LOOK_S = 1.0  # between looks during the soak
SETTLE_S = 10.0  # how long a process may take from its start to its passport once /health is 200
_NOTHING = "nothing yet"
_FLAGS = ("SGLANG_", "SGL_")
_RECORDED = ("SGLANG_", "SGL_", "DSV4_", "PYTHON", "SPT_")

Say = Callable[..., None]
Show = Callable[[str], systemd.Unit]


class GateRefused(AgentError):
    """The unit does not run the wanted state."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Instance:
    """One start of the unit: what must not change from the first good probe to the end of the soak."""

    main_pid: int
    start_time: int
    invocation: str
    restarts: int


def gate(
    worker: dict[str, Any],
    expect: dict[str, Any],
    before: dict[str, Any] | None,
    limits: dict[str, Any],
    generation: dict[str, Any],
    secrets: dict[str, Any],
    say: Say,
    show: Show | None = None,
) -> dict[str, Any]:
    """Prove the unit; the `gate` object of the result. Raises GateRefused.

    `expect` holds `state`, `release`, `flags`, `environment`, `arguments`; or `baseline: true` with the
    recorded `environment` and `arguments` of a hand-made start. `before` is the old process
    (`invocation`, `main_pid`, `start_time`), None if there was none. `show` asks systemd for a unit.
    """
    return _Gate(worker, expect, before, limits, generation, secrets, say, show or systemd.Systemd().show).run()


class _Gate:
    def __init__(
        self,
        worker: dict[str, Any],
        expect: dict[str, Any],
        before: dict[str, Any] | None,
        limits: dict[str, Any],
        generation: dict[str, Any],
        secrets: dict[str, Any],
        say: Say,
        show: Show,
    ) -> None:
        self.worker, self.expect, self.before, self.limits = worker, expect, before, limits
        self.generation, self.secrets, self.say, self.show = generation, secrets, say, show
        self.unit: str = worker["unit"]
        self.port = int(worker["port"])
        self.server = engine.Worker(worker["host"], self.port, secrets.get("api_key"))
        self.baseline = expect.get("baseline") is True
        self.gate_s = float(limits["gate_s"])
        self.started = time.monotonic()
        self.deadline = self.started + self.gate_s
        self.probes = 0
        self.restarts: int | None = None
        self.seen = _NOTHING
        self.was_healthy = False
        self.notes: list[str] = []

    def run(self) -> dict[str, Any]:
        instance = self._healthy()
        self.say(f"/health is 200, process {instance.main_pid}", main_pid=instance.main_pid)
        count = self._proved(instance)
        answer, how = self._generates(instance)
        self._soak(instance)
        stamps = self._passports() if not self.baseline else []
        armed = passports.armed(stamps, self.expect.get("flags") or {})
        # Not every flag has an instrument; where it is not said which have, all are told.
        instruments = self.expect.get("instruments", list(armed))
        self.notes += [
            f"live flag, no instrument: {name} is live, but no instrument of it is in the release"
            for name, what in armed.items()
            if not what and name in instruments
        ]
        told = passports.at_work(paths.passports(self.unit), stamps)
        self.notes += passports.asleep(armed, told)
        return {
            "main_pid": instance.main_pid,
            "start_time": instance.start_time,
            "invocation": instance.invocation,
            "passports": count,
            "probes": self.probes,
            "generation": how,
            "generation_ms": answer.ms if answer is not None else None,
            "armed": armed,
            "instruments": told,
            "seconds": round(time.monotonic() - self.started, 3),
            "notes": self.notes,
        }

    # -- waiting for health

    def _healthy(self) -> Instance:
        """The instance that gave `consecutive` 200s in a row, unchanged meanwhile."""
        streak = 0
        last: Instance | None = None
        told = ""
        while True:
            instance = self._look()
            if instance is None or instance != last:
                streak = 0
            last = instance
            if instance is not None:
                status, error = self._probe()
                if status == 200 and self._look() == instance and self._listens():
                    streak += 1
                    if streak >= int(self.limits["consecutive"]):
                        return instance
                    time.sleep(min(POLL_S, self._left()))
                    continue
                streak = 0
                if status != 200:
                    self._saw(_health_words(status, error), status)
            if self.seen != told:
                self.say(f"waiting: {self.seen}")
                told = self.seen
            self._check_time()
            time.sleep(min(POLL_S, self._left()))

    def _look(self) -> Instance | None:
        """The unit's present instance, None while it has none. Refuses what will not get well."""
        shown = self.show(self.unit)
        self._unit_is_ours(shown)
        restarts = shown.restarts
        if self.restarts is None:
            self.restarts = restarts
        active, sub = shown.active, shown.sub
        end = f"exit {shown.main_code}/{shown.main_status}, result {shown.result}"
        how = "200, then dead; " if self.was_healthy else ""
        if restarts > self.restarts or sub.startswith("auto-restart"):
            raise GateRefused(
                f"{how}crash loop: {self.unit} died and systemd starts it again (NRestarts {self.restarts} → "
                f"{restarts}, now {active}/{sub}, {end}); last seen: {self.seen}; expected one start that stays up; "
                "read its journal"
            )
        if active in ("failed", "inactive", "deactivating"):
            raise GateRefused(
                f"{how}the server died: {self.unit} is {active}/{sub} ({end}); last seen: {self.seen}; expected it "
                "active; read its journal"
            )
        main = proc.process(shown.main_pid) if shown.main_pid else None
        if main is None or main.state in "ZX":
            self.seen = f"{self.unit} is {active}/{sub} without a main process"
            return None
        instance = Instance(main.pid, main.start_time, shown.invocation, restarts)
        self._is_new(instance)
        members = proc.processes_of(shown.cgroup)
        self._no_rival(shown.cgroup)
        if not self.baseline:
            self._no_wrapper(main, members)
            if main.is_python and main.environ:  # no need to wait for a start that cannot be right
                self._environment(main)
            for stamp in self._passports():
                self._agrees(stamp, members)
        return instance

    def _unit_is_ours(self, shown: systemd.Unit) -> None:
        if shown.load != "loaded":
            raise GateRefused(
                f"wrong unit: {self.unit} is {shown.load!r}, expected a loaded unit that runs {self.worker['script']}; "
                "check the worker's unit name"
            )
        if shown.need_daemon_reload:
            raise GateRefused(
                f"{self.unit}: its file {shown.fragment} was changed after systemd read it, expected systemd to run "
                "the file on disk; run systemctl daemon-reload"
            )
        script = self.worker["script"]
        run = _started_by(shown.exec_start)
        if not any(os.path.realpath(word) == os.path.realpath(script) for word in run if word.startswith("/")):
            raise GateRefused(
                f"wrong script: {self.unit} ({shown.fragment}) starts {' '.join(run) or 'nothing'}, expected it to "
                f"start {script}; check the worker's unit and script: what was switched is not what this unit runs"
            )

    def _is_new(self, instance: Instance) -> None:
        """Not the process, nor the start, that ran before."""
        if self.before is None:
            return
        same_process = (instance.main_pid, instance.start_time) == (
            self.before.get("main_pid"), self.before.get("start_time"),
        )  # fmt: skip
        if same_process or (instance.invocation and instance.invocation == self.before.get("invocation")):
            raise GateRefused(
                f"not restarted: {self.unit} still runs process {instance.main_pid} of invocation "
                f"{instance.invocation}, expected a new process and a new InvocationID; stop it and look why it did "
                "not go"
            )

    def _no_rival(self, unit_cgroup: str) -> None:
        """Nobody outside the unit listens on its port: that one, not ours, would answer the probes."""
        for pid in proc.listener(self.port, self.server.host):
            group, rival = proc.cgroup(pid), proc.process(pid)
            if rival is None or proc.in_group(pid, unit_cgroup):
                continue
            units = [part for part in group.split("/") if part.endswith((".service", ".scope"))]
            unit = units[-1] if units else "of no unit"
            raise GateRefused(
                f"another process keeps the port: {self.server.host}:{self.port} is served by {rival} in {group} "
                f"({unit}), expected a process of {self.unit}; it is a left-over of an earlier start or another "
                "unit's server: stop that one"
            )

    def _no_wrapper(self, main: proc.Process, members: list[proc.Process]) -> None:
        """The script must have become the server: a shell that waits keeps systemd's signals to itself."""
        if main.is_shell:
            serving = set(proc.listener(self.port, self.server.host))
            children = [one for one in members if one.pid != main.pid]
            child = next((one for one in children if one.is_engine or one.pid in serving), None)
            again = proc.process(main.pid)  # it may have become the server since it was looked at
            if child is not None and again is not None and again.is_shell:
                raise GateRefused(
                    f"wrapper without exec: the main process of {self.unit} is {main}, and the server is its child "
                    f"{child}; expected the server as main process; end {self.worker['script']} in exec"
                )

    # -- health

    def _probe(self) -> tuple[int | None, str | None]:
        self._check_time()
        self.probes += 1
        status, error = self.server.health(min(float(self.limits["probe_s"]), self._left()))
        self.was_healthy = self.was_healthy or status == 200
        return status, error

    def _listens(self) -> bool:
        """Does the unit itself hold the port? (That nobody else does, _look has seen.)"""
        group = self.show(self.unit).cgroup
        if any(proc.in_group(pid, group) for pid in proc.listener(self.port, self.server.host)):
            return True
        self.seen = f"/health is 200, but no process of {self.unit} listens on {self.server.host}:{self.port}"
        return False

    # -- proof of state

    def _proved(self, instance: Instance) -> int:
        """Refuse unless each process proves the wanted state; the number of passports."""
        if self.baseline:
            self._is_baseline(instance)
            return 0
        since: dict[tuple[int, int], float] = {}
        while True:
            members = proc.processes_of(self.show(self.unit).cgroup)
            stamps = self._passports()
            for stamp in stamps:
                self._agrees(stamp, members)
            without = self._without_passport(instance, members, stamps)
            if not without:
                break
            for one in without:
                # Between fork and exec a child looks like its parent: only one that stays counts.
                if time.monotonic() - since.setdefault((one.pid, one.start_time), time.monotonic()) >= SETTLE_S:
                    raise GateRefused(
                        f"no passport: {one} of {self.unit} wrote none into {paths.passports(self.unit)}, expected one "
                        f"of each engine process ({len(without)} without); the line in its sglang/srt/environ.py did "
                        "not run: either it imported sglang from another tree, or the release lacks the line, or it "
                        "could not write there (see its journal)"
                    )
            self._check_time()
            time.sleep(POLL_S)
        main = next((one for one in members if one.pid == instance.main_pid), None)
        if main is None:
            raise GateRefused(f"the server died: process {instance.main_pid} of {self.unit} is gone; read its journal")
        self._environment(main)
        self._states(instance)
        self._arguments(main)
        return len(stamps)

    def _without_passport(
        self, instance: Instance, members: list[proc.Process], stamps: list[dict[str, Any]]
    ) -> list[proc.Process]:
        """The live engine processes of the unit that wrote no passport."""
        have = {stamp["pid"] for stamp in stamps}
        wanted = (one for one in members if one.is_engine or one.pid == instance.main_pid)
        return [one for one in wanted if one.pid not in have and proc.start_time(one.pid) == one.start_time]

    def _passports(self) -> list[dict[str, Any]]:
        return passports.read(paths.passports(self.unit))

    def _agrees(self, stamp: dict[str, Any], members: list[proc.Process]) -> None:
        wrong = passports.mismatches(stamp, self.expect)
        if not wrong:
            return
        outside = "" if any(one.pid == stamp["pid"] for one in members) else f" (it is not in {self.unit}'s control group)"
        raise GateRefused("; ".join(wrong) + outside)

    def _states(self, instance: Instance) -> None:
        """The wanted state in the environment of each Python process of the unit."""
        state = self.expect["state"]
        for patience in (True, False):
            members = proc.processes_of(self.show(self.unit).cgroup)
            wrong = [one for one in members if one.is_python and one.environ.get("DSV4_FLEET_STATE") != state]
            wrong = [one for one in wrong if proc.start_time(one.pid) == one.start_time]
            if not wrong:
                return
            if patience:  # within an exec a process has no environment for a moment
                time.sleep(POLL_S)
        found = wrong[0].environ.get("DSV4_FLEET_STATE")
        hint = "it was started from another script"
        if found is None:
            hint = (
                "either it was started with a cleared environment, or a process title was written over it and "
                "SPT_NOENV=1 was not in force"
            )
        raise GateRefused(f"state of {wrong[0]}: found DSV4_FLEET_STATE={found}, expected {state}; {hint}")

    def _environment(self, main: proc.Process) -> None:
        """Exactly the wanted variables in the main process, whose environment nothing adds to later."""
        wanted = {**(self.expect.get("environment") or {}), "DSV4_FLEET_STATE": self.expect["state"]}
        wrong = _differences(main.environ, wanted, _FLAGS, self.secrets.get("env") or {})
        if wrong:
            raise GateRefused(
                f"environment of {main}: {'; '.join(wrong)}; look into the unit's Environment=, EnvironmentFile= and "
                "drop-ins, and whether it starts the wanted script"
            )

    def _arguments(self, main: proc.Process) -> None:
        wanted = self.expect.get("arguments")
        if wanted and not _same_command(main.cmdline, wanted):
            raise GateRefused(
                f"arguments: the main process runs {_shown(main.cmdline)!r}, expected {_shown(wanted)!r}; check what "
                f"{self.worker['script']} executes"
            )

    def _is_baseline(self, instance: Instance) -> None:
        """A hand-made start has no passports: its environment and command line must be the recorded ones."""
        main = proc.process(instance.main_pid)
        if main is None:
            raise GateRefused(f"the server died: process {instance.main_pid} of {self.unit} is gone; read its journal")
        recorded, arguments = self.expect.get("environment"), self.expect.get("arguments")
        if recorded is None or arguments is None:
            self.notes.append("baseline: nothing ran at first contact, so there is no process to compare this one with")
            return
        # Secret values were not recorded, so they cannot be compared.
        found = {name: value for name, value in main.environ.items() if not states.secret_name(name)}
        wrong = _differences(found, recorded, _RECORDED, {})
        if main.cmdline != arguments:
            wrong.append(f"found command line {_shown(main.cmdline)!r}, expected {_shown(arguments)!r}")
        if wrong:
            raise GateRefused(
                f"baseline: {main} is not as it was recorded at first contact: {'; '.join(wrong)}; compare the script "
                "and the unit with the baseline that is kept"
            )
        self.notes.append(
            "baseline: proved by environment and command line of its main process; a hand-made start has no passports"
        )

    # -- generation

    def _generates(self, instance: Instance) -> tuple[engine.Generation | None, str]:
        """One real answer with the expected content; (it, how it was had)."""
        peer: dict[str, Any] | None = None
        if self.worker["role"] != "unified":
            peer, why = self._peer()
            if peer is None:
                self.notes.append(
                    f"no end-to-end generation: {why}; a {self.worker['role']} worker cannot answer alone, so only the "
                    "generation within the engine's own /health was seen"
                )
                self.say(self.notes[-1])
                return None, "health"
        told = ""
        while True:
            self._check_time()
            left = min(float(self.limits["probe_s"]), self._left())
            self.probes += 1
            answer = self.server.generate(
                self.generation["prompt"],
                self.generation["expect"],
                int(self.generation["max_tokens"]),
                left,
                peer,
            )
            if self._look() != instance:
                raise GateRefused(
                    f"200, then dead: {self.unit} answered /health, but during the first generation its process "
                    f"{instance.main_pid} went; read its journal"
                )
            if answer.ok:
                return answer, "worker" if peer is None else f"pair with {peer['url']}"
            self._saw(f"generation: {answer.error}" + (f" (with {peer['url']})" if peer else ""), answer.status)
            if answer.final:
                raise GateRefused(f"{self.seen}; look whether the model, its key and the prompt are the right ones")
            if self.seen != told:
                self.say(f"waiting: {self.seen}")
                told = self.seen
            time.sleep(min(POLL_S, self._left()))
            if peer is not None:
                peer = self._peer()[0] or peer

    def _peer(self) -> tuple[dict[str, Any] | None, str]:
        """A healthy worker of the other role from the routers' lists, or why there is none."""
        role = self.worker["role"]
        other = "prefill" if role == "decode" else "decode"
        reasons: list[str] = []
        for one in self.worker["routers"]:
            try:
                found = router.Router(one["url"], (self.secrets.get("router_keys") or {}).get(one["url"])).workers(
                    min(router.REQUEST_S, max(0.5, self._left()))
                )
            except router.RouterError as error:
                reasons.append(str(error))
                continue
            fit = [peer for peer in found if peer.role == other and peer.healthy]
            if not fit:
                reasons.append(f"router {one['url']} has no healthy {other} worker")
                continue
            chosen = fit[self.probes % len(fit)]  # another one at the next try: the peer may be the ill one
            url = re.sub(r"@\d+$", "", chosen.url)
            prefill = url if other == "prefill" else self.worker["url"]
            port = chosen.bootstrap_port if other == "prefill" else self.worker["bootstrap_port"]
            return {
                "url": url, "role": other, "bootstrap_host": http.split(prefill)[0], "bootstrap_port": port,
                "api_key": self.secrets.get("api_key"),
            }, ""  # fmt: skip
        return None, "; ".join(reasons) or "no router is declared, so no other worker is known"

    # -- soak

    def _soak(self, instance: Instance) -> None:
        """Still the same process, healthy and listening, after `soak_s`."""
        soak_s = float(self.limits["soak_s"])
        until = time.monotonic() + soak_s
        while time.monotonic() < until:
            time.sleep(min(LOOK_S, max(0.0, until - time.monotonic())))
            self._check_time()
            if self._look() != instance:
                raise self._died(instance, "another process runs now")
        status, error = None, None
        for _ in range(max(1, int(self.limits["consecutive"]))):
            status, error = self._probe()
            if self._look() != instance:
                raise self._died(instance, "another process runs now")
            if status == 200:
                break
            self._saw(_health_words(status, error), status)
            time.sleep(min(POLL_S, self._left()))
        if status != 200:
            raise self._died(instance, self.seen)
        if not self._listens():
            raise self._died(instance, "it no longer listens")
        self.notes.append(
            f"soak: {soak_s:g} s, {self.probes} probes in all; a server that hangs only after more requests than that "
            "is not seen here"
        )

    def _died(self, instance: Instance, what: str) -> GateRefused:
        return GateRefused(
            f"200, then dead: {self.unit} answered /health from process {instance.main_pid}, and during the soak "
            f"{what}; expected the same process, healthy; read its journal"
        )

    # -- time

    def _saw(self, what: str, status: int | None) -> None:
        """Keep what was seen last, but not that the deadline cut the very last probe short."""
        if status is not None or self._left() > 0 or self.seen == _NOTHING:
            self.seen = what

    def _left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def _check_time(self) -> None:
        if self._left() <= 0:
            raise GateRefused(
                f"deadline: {self.gate_s:g} s went by without proof; last seen: {self.seen}; expected /health 200 and "
                "one generation; look whether the server hangs or only starts slowly, then raise gate_s"
            )


def _started_by(exec_start: str) -> list[str]:
    """The words of the command in systemd's property ExecStart."""
    found = re.search(r"argv\[\]=(.*?) ; ", exec_start)
    path = re.search(r"path=(\S+)", exec_start)
    return ([path[1]] if path else []) + (found[1].split()[1:] if found else [])


def _health_words(status: int | None, error: str | None) -> str:
    if status is None:
        return f"/health: {error}"
    if 300 <= status < 400:
        return f"/health answers {status}: a redirect, which is not followed; is something else listening there?"
    if status == 503:
        return "/health answers 503: starting, busy or stopping"
    return f"/health answers {status}"


def _differences(found: dict[str, str], wanted: dict[str, str], prefixes: tuple[str, ...], secret: dict[str, str]) -> list[str]:
    """How an environment differs: wanted names by value, and extra ones that begin with a prefix.

    Values of secret names are compared, never shown.
    """
    wrong: list[str] = []
    shown = redaction.environment({**found})
    for name, value in sorted(wanted.items()):
        if name not in secret and found.get(name) != value:
            hidden = redaction.environment({name: value})[name]
            wrong.append(f"found {name}={shown.get(name, '(absent)')}, expected {hidden!r}")
    for name, value in sorted(secret.items()):
        if found.get(name) != value:
            wrong.append(f"found another value of the secret {name} than the one that was sent")
    for name in sorted(found):
        if name.startswith(prefixes) and name not in wanted and name not in secret:
            wrong.append(f"found {name}={shown[name]}, which nobody asked for")
    return wrong


def _shown(cmdline: list[str]) -> str:
    return " ".join(redaction.arguments(cmdline))


def _same_command(found: list[str], wanted: list[str]) -> bool:
    """The same command, whatever an exec chain put before it: an interpreter, or a wrapper that is gone."""
    size = min(len(found), len(wanted))
    here, there = found[-size:], wanted[-size:]
    return size > 0 and os.path.basename(here[0]) == os.path.basename(there[0]) and here[1:] == there[1:]
