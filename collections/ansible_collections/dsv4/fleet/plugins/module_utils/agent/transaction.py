"""One change of one worker, from its request to one of the five end states.

The steps are those of docs/agent.md. Before each one begins, its name is on disk, so that `recover` knows how far
a transaction got that died. Until the script is renamed nothing is changed and a failure puts the worker back into
its routers; after that a failure brings the last proved state back, proves it and fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from . import boot_unit, check, evidence, files, gate, paths, proc, python_env, release, router, secrets, states, systemd
from .engine import Worker
from .errors import AgentError
from .journal import Journal, Transaction, collect_garbage, everything, hide
from .ledger import Ledger

STAGE_S = 1800.0  # copying, verifying and compiling a tree on a slow host
SLACK_S = 120.0
CALLS_S = 90.0
RUNTIME_MARGIN_S = 300.0


class NotGone(AgentError):
    """The old process tree, its port or its GPU memory is still there: starting beside it would be worse."""


class NotSwitched(AgentError):
    """The rename failed: the script on disk is the one that was there."""


class Deadline(BaseException):
    """The transaction's own deadline passed. Not an Exception, so that no step can swallow it."""


@dataclasses.dataclass
class Tools:
    """All that reaches beyond this host's files; tests put others in their place."""

    systemd: Any = dataclasses.field(default_factory=systemd.Systemd)
    drain: Callable[..., Any] = router.drain
    admit: Callable[..., Any] = router.admit
    gate: Callable[..., dict[str, Any]] = gate.gate
    collect: Callable[..., list[str]] = evidence.collect
    routers: Callable[..., list[Any]] = router.routers_of
    processes_of: Callable[[str], list[proc.Process]] = proc.processes_of
    process: Callable[[int], proc.Process | None] = proc.process
    listener: Callable[..., list[int]] = proc.listener
    gpu_holders: Callable[[], list[tuple[int, int]]] = proc.gpu_holders
    health: Callable[..., tuple[int | None, str | None]] = lambda worker, key, s: Worker(
        worker["host"], worker["port"], key
    ).health(s)


def forward_s(limits: dict[str, Any]) -> float:
    """Seconds that a transaction may take until its gate is passed or not, and the worker admitted."""
    return STAGE_S + float(limits["drain_s"]) + _restart_s(limits)


def backward_s(limits: dict[str, Any]) -> float:
    """Seconds that bringing the last proved state back may take, and draining the worker if that fails too."""
    return _restart_s(limits) + float(limits["stop_s"]) + 2 * float(limits["gone_s"]) + CALLS_S


def _restart_s(limits: dict[str, Any]) -> float:
    return sum(float(limits[name]) for name in ("stop_s", "gate_s", "router_s")) + 2 * float(limits["gone_s"]) + CALLS_S + SLACK_S


class Change:
    """The life cycle. `run` and `recover` return the result, and always one of the five end states."""

    def __init__(self, transaction: Transaction, known: dict[str, Any], tools: Tools | None = None) -> None:
        request = transaction.request()
        self.transaction, self.request, self.secrets = transaction, request, known
        self.tools = tools or Tools()
        self.worker: dict[str, Any] = check.worker(request["worker"])
        self.limits: dict[str, Any] = request["limits"]
        self.generation: dict[str, Any] = request["generation"]
        self.unit: str = self.worker["unit"]
        self.store, self.ledger = states.Store(self.worker), Ledger(self.unit)
        self.secret_texts = secrets.texts(known)
        self.journal = Journal(transaction, self.secret_texts)
        self.say = self.journal.say
        self.started = time.time()
        self.wanted: str = request["target"]["state"]
        self.changed: list[str] = []
        self.notes: list[str] = []
        self.proof: dict[str, Any] | None = None
        self.healthy_after: float | None = None
        self.state_before: str | None = None
        self.was_listed: list[str] = []
        self.admits = False
        self.evidence: str | None = None

    # --- the way forward ---

    def run(self) -> dict[str, Any]:
        """Carry out the request."""
        try:
            with _deadline(forward_s(self.limits)):
                return self._forward()
        except _Ended as end:
            return end.result

    def _forward(self) -> dict[str, Any]:
        text = f"staging {self._short(self.wanted)} on {self.worker['name']}"
        with self._failing("stage", self._unchanged), self.journal.step("stage", text):
            target = self._stage()
        with self._failing("gate", self._unchanged):
            if self._is_live(target) and self._confirmed(target):
                return self._succeed(target)
        with self._failing("stage", self._unchanged):
            before = self._main()
            temporary = self.store.stage_script(target, self.transaction.id)
        text = "taking the worker out of its routers"
        with self._failing("drain", self._put_back), self.journal.step("drain", text):
            self._drain()
        with self._failing("switch", self._roll_back):
            with self.journal.step("switch", f"switching to {self._short(target.name)}"):
                self._switch(target, temporary)
            self._restart(before)
            self._prove(target, before)
            self._admit()
        return self._succeed(target)

    def _stage(self) -> states.State:
        """Put everything beside the live files; refuse what cannot work before the worker is touched."""
        shown = self.tools.systemd.show(self.unit)
        self._refuse_unit(shown)
        for path in (self.worker["script"], paths.unit_file(self.unit)):
            if files.kind(path) in ("mount", "other"):
                raise AgentError(
                    f"{path}: found a {'mount point' if files.kind(path) == 'mount' else 'special file'}, "
                    "expected a plain file that a rename can replace. Remove it or mount the directory "
                    "above it."
                )
        files.directory(paths.LIB)
        files.directory(paths.EMPTY, 0o555)
        files.directory(paths.WORKERS)
        files.directory(paths.worker(self.unit), 0o700)
        self._first_contact(shown)
        self.state_before = self._live_state(shown)
        target = self._target(shown)
        self._install_recovery()
        return target

    def _refuse_unit(self, shown: systemd.Unit) -> None:
        if shown.load == "masked":
            raise AgentError(
                f"{self.unit}: found it masked, expected a unit that can be started. Unmask it: systemctl unmask {self.unit}."
            )
        if shown.load not in ("loaded", "not-found"):
            raise AgentError(
                f"{self.unit}: found load state {shown.load!r}, expected 'loaded'. Look at 'systemctl status {self.unit}'."
            )
        if shown.load == "loaded" and shown.identity not in ("", self.unit):
            raise AgentError(
                f"{self.unit}: found an alias of {shown.identity}, expected the unit itself. Name "
                f"{shown.identity} as the worker's unit."
            )

    def _first_contact(self, shown: systemd.Unit) -> None:
        """What is there before anything is changed is what a first rollback goes back to."""
        if self.store.has_baseline():
            return
        main = self.tools.process(shown.main_pid) if shown.main_pid else None
        environment = None
        if main is not None:
            prefixes = ("SGLANG_", "SGL_", "DSV4_", "PYTHON", "SPT_")
            environment = {name: value for name, value in main.environ.items() if name.startswith(prefixes)}
        self.store.record_baseline(shown, environment, main.cmdline if main else None)
        self.say("first contact: the script, the unit and the running process are recorded as the baseline")
        if main is not None and self.store.load(states.BASELINE).runnable:
            status, _ = self.tools.health(self.worker, self.secrets.get("api_key"), float(self.limits["probe_s"]))
            if status == 200:
                self.ledger.prove(states.BASELINE, self.transaction.id, time.time(), self.ledger.overrides)
                self.ledger.save()

    def _target(self, shown: systemd.Unit) -> states.State:
        target = self.request["target"]
        if "script" not in target:
            state = self.store.load(self.wanted)
            if not state.runnable:
                raise AgentError(
                    f"state {self.wanted}: found no script and unit in it, expected a state that can run. "
                    "There is nothing to go back to."
                )
            if state.release is not None:
                release.check(state.release)
            if state.secrets != secrets.NONE and not os.path.isdir(secrets.directory(self.unit, state.secrets)):
                raise AgentError(
                    f"state {self.wanted}: found its secrets {state.secrets[:12]} gone, expected them. Deploy that state anew."
                )
            self._same_drop_ins(state, shown)
            different = self._other_python(state.script or b"")
            if different:
                self._note(f"{self._short(self.wanted)} was kept under another Python environment: {different}")
            return state
        script = target["script"].encode()
        if states.state_of(script) != self.wanted or states.exports(script).get("DSV4_FLEET_STATE") != self.wanted:
            raise AgentError(
                f"script: found state {states.state_of(script)}, declared "
                f"{states.exports(script).get('DSV4_FLEET_STATE')}, expected {self.wanted} twice. Render "
                "it again."
            )
        last = [line for line in states.commands(target["script"])][-1:]
        if not last or not last[0].startswith("exec "):
            raise AgentError(
                f"script: found {(last or ['nothing'])[0][:80]!r} as its last command, expected exec: a "
                "shell that stays keeps systemd's signals from the server. End the script in exec."
            )
        if self.worker["script"] not in target["unit"]:
            raise AgentError(
                f"unit: found no {self.worker['script']} in its text, expected that it starts the script that is switched."
            )
        different = self._other_python(script)
        if different:
            raise AgentError(f"python: {different}. What is installed changed since inspect: run again.")
        found = systemd.unit_digest(target["unit"], shown.drop_ins)
        if shown.load == "loaded" and found != target["unit_digest"]:
            raise AgentError(
                f"unit: found digest {found} with the drop-ins on this host, expected "
                f"{target['unit_digest']}. Drop-ins changed since inspect: run again."
            )
        if secrets.write(self.unit, self.secrets, target["secrets"], secrets.ensure_host_key(self.secrets.get("host_key"))):
            self.changed.append("secrets")
        if release.stage(target["release"], self.worker["tree"], self.worker["python"], self.say):
            self.changed.append("release")
        return self.store.keep(self.wanted, script, target["unit"], target["expect"])

    def _other_python(self, script: bytes) -> str | None:
        """How the server's Python environment differs from the one that the script names, in words."""
        named = states.exports(script).get("DSV4_FLEET_PYTHON")
        found = python_env.look(self.worker["python"])["fingerprint"] if named else None
        return None if found == named else f"found fingerprint {found}, expected {named}"

    def _same_drop_ins(self, state: states.State, shown: systemd.Unit) -> None:
        """A kept state names its unit's digest; drop-ins are the operator's and may have changed since."""
        if state.name == states.BASELINE:
            named = state.expect["unit"]["digest"]
        else:
            named = states.exports(state.script or b"").get("DSV4_FLEET_UNIT")
        if systemd.unit_digest(state.unit or "", shown.drop_ins) != named:
            self._note(f"{self.unit} has other drop-ins than when {self._short(state.name)} was kept; they stay as they are")

    def _install_recovery(self) -> None:
        """The boot unit, and a copy of this program for it that no transaction's end removes."""
        boot_unit.install(self.transaction, self.unit, self.tools.systemd, self.say)

    # --- when the wanted state runs already ---

    def _is_live(self, target: states.State) -> bool:
        """Whether the live process was started as the target is: then nothing has to restart."""
        if self.request.get("restart"):
            return False
        shown = self.tools.systemd.show(self.unit)
        return (
            shown.active == "active"
            and not shown.need_daemon_reload
            and self._live_state(shown) == target.name
            and self.store.unit_is(target)
        )

    def _confirmed(self, target: states.State) -> bool:
        """Prove the running process, put a drifted script back, admit. False: it has to be restarted after all."""
        shown = self.tools.systemd.show(self.unit)
        main = self.tools.process(shown.main_pid)
        age = max(0.0, time.time() - _started_at(main)) if main else 0.0
        # A server that is still starting is left the rest of its time; one that should be up is asked twice.
        patience = max(2 * float(self.limits["probe_s"]), float(self.limits["gate_s"]) - age)
        limits = {**self.limits, "consecutive": 1, "soak_s": 0, "gate_s": patience}
        try:
            with self.journal.step("gate", "proving the running process"):
                self.proof = self.tools.gate(
                    self.worker, target.expect, None, limits, self.generation, self._secrets_of(target), self.say
                )
        except Exception as error:
            self._note(f"it ran the wanted state already, but did not prove it ({error}); it is restarted")
            return False
        if not self.store.script_is(target):
            with self.journal.step("switch", "putting the script back"):
                self.store.switch_script(self.store.stage_script(target, self.transaction.id))
            self.changed.append("script")
        self.was_listed = self._listed()
        self.admits = len(self.was_listed) < len(self.worker["routers"])
        self._admit()
        return True

    # --- drain, switch, restart, prove, admit ---

    def _listed(self) -> list[str]:
        """The routers that list the worker now."""
        found = []
        for one in self.tools.routers(self.worker, self.secrets):
            if any(router.same(each.url, self.worker["url"]) for each in one.workers()):
                found.append(one.url)
        return found

    def _drain(self) -> None:
        self.was_listed = self._listed()
        if len(self.was_listed) < len(self.worker["routers"]):
            self.admits = True
        self.say(
            f"listed by {len(self.was_listed)} of {len(self.worker['routers'])} routers",
            listed=self.was_listed,
        )
        try:
            self.tools.drain(self.worker, self._live_secrets(), self.limits, self.say)
        except router.DrainRefused as error:
            # A server that hangs never gets idle and cannot be put back: nothing is saved by leaving it hanging.
            status, said = self.tools.health(self.worker, self.secrets.get("api_key"), float(self.limits["probe_s"]))
            if error.restored or status == 200 or self._listed():
                raise
            self._note(
                f"the old server is not healthy ({said or status}) and is out of its routers; it is "
                f"stopped with what it has: {error}"
            )

    def _switch(self, target: states.State, temporary: str | None) -> None:
        if not self.store.script_is(target):
            self.changed.append("script")
        try:
            self.store.switch_script(temporary)
        except AgentError as error:
            raise NotSwitched(str(error)) from error
        self.say("script renamed into its place")
        self._follow_unit(target)
        self._check_unit(target)

    def _follow_unit(self, state: states.State) -> None:
        """Make the unit file agree with the script on disk, and systemd with the unit file."""
        if self.store.install_unit(state, self.transaction.id):
            self.changed.append("unit")
            self.say(f"unit file {paths.unit_file(self.unit)} installed")
            self.tools.systemd.daemon_reload()
        elif self.tools.systemd.show(self.unit).need_daemon_reload:
            self.tools.systemd.daemon_reload()

    def _check_unit(self, target: states.State) -> None:
        """systemd must now know exactly the unit that the script names, from the file that was installed."""
        shown = self.tools.systemd.show(self.unit)
        self._refuse_unit(shown)
        if shown.load != "loaded" or shown.need_daemon_reload:
            raise AgentError(
                f"{self.unit}: found load state {shown.load!r} after daemon-reload, expected 'loaded' from"
                f" {paths.unit_file(self.unit)}."
            )
        if "script" in self.request["target"] and shown.digest != self.request["target"]["unit_digest"]:
            raise AgentError(
                f"{self.unit}: found digest {shown.digest} of unit and drop-ins, expected "
                f"{self.request['target']['unit_digest']}. {shown.fragment} or a drop-in is not what was "
                "planned."
            )
        if target.name != states.BASELINE and self.worker["script"] not in shown.exec_start:
            raise AgentError(
                f"{self.unit}: found that it starts {shown.exec_start!r}, expected "
                f"{self.worker['script']}. A drop-in replaces ExecStart: remove that."
            )

    def _restart(self, before: dict[str, Any] | None) -> None:
        with self.journal.step("stop", f"stopping {self.unit}"):
            self._stop()
        with self.journal.step("start", f"starting {self.unit}"):
            self.tools.systemd.start(self.unit, CALLS_S)
            if "restart" not in self.changed:
                self.changed.append("restart")

    def _stop(self) -> None:
        """Stop the unit within its time, then see that all of the old one is gone. Raises NotGone."""
        shown = self.tools.systemd.show(self.unit)
        members = self.tools.processes_of(shown.cgroup) if shown.cgroup else []
        old = {(one.pid, one.start_time) for one in members}

        def empty() -> bool:
            return not self._alive(old, shown.cgroup)

        if not self.tools.systemd.stop(self.unit, float(self.limits["stop_s"]), empty):
            self._note(
                f"forced kill: {self.unit} did not stop within {self.limits['stop_s']} s and was sent SIGKILL; "
                "its requests were cut"
            )
            with self._noting(f"killing {self.unit}"):
                self.tools.systemd.kill(self.unit)
        left: list[str] = []

        def gone() -> bool:
            left[:] = self._left_over(old, shown.cgroup)
            return not left

        if not systemd.wait_for(gone, float(self.limits["gone_s"])):
            raise NotGone(
                f"{self.unit} was stopped, but {'; '.join(left)}; expected all of it gone within "
                f"{self.limits['gone_s']} s. It is not started beside that. End what is left by hand, then run again."
            )
        after = self.tools.systemd.show(self.unit)
        if old and after.main_code in ("2", "3") and after.main_status == "9":
            self._note(
                f"forced kill: systemd killed the main process of {self.unit} with SIGKILL when its stop timeout was "
                "over; its requests were cut"
            )

    def _alive(self, old: set[tuple[int, int]], cgroup: str) -> list[proc.Process]:
        """What lives of the old process tree and in the unit's control group. The dead that nobody reaped do not."""
        members = {one.pid: one for one in self.tools.processes_of(cgroup)} if cgroup else {}
        for pid, start_time in old:
            one = self.tools.process(pid)
            if one is not None and one.start_time == start_time:
                members[pid] = one
        return [one for one in members.values() if one.state not in ("Z", "X")]

    def _left_over(self, old: set[tuple[int, int]], cgroup: str) -> list[str]:
        """What is still there of the old process tree, in words."""
        found: list[str] = []
        shown = self.tools.systemd.show(self.unit)
        if shown.active not in ("inactive", "failed"):
            found.append(f"systemd says {shown.active}/{shown.sub}")
        members = {one.pid: one for one in self._alive(old, cgroup)}
        found += [f"process {one.pid} (state {one.state}: {' '.join(one.cmdline)[:80]}) still lives" for one in members.values()]
        found += [
            f"process {pid} listens on port {self.worker['port']}"
            for pid in self.tools.listener(self.worker["port"], self.worker["host"])
        ]
        try:
            holders = self.tools.gpu_holders()
        except proc.GpuUnknown as error:
            return [*found, f"who holds GPU memory is not known: {error}"]
        for pid, size in holders:
            if pid in {number for number, _ in old} or pid in members or self._orphan(pid):
                found.append(f"process {pid} holds {size} MiB of GPU memory")
        return found

    def _orphan(self, pid: int) -> bool:
        """Whether a holder of GPU memory belongs to nobody: its parent is init and no unit is its own."""
        one = self.tools.process(pid)
        if one is None or one.ppid != 1:
            return False
        group = proc.cgroup(pid)
        return not any(part.endswith(".service") for part in group.split("/"))

    def _prove(self, state: states.State, before: dict[str, Any] | None) -> None:
        started = time.monotonic()
        with self.journal.step("gate", f"proving {self._short(state.name)}"):
            self.proof = self.tools.gate(
                self.worker, state.expect, before, self.limits, self.generation, self._secrets_of(state), self.say
            )
        self.healthy_after = round(time.monotonic() - started, 3)

    def _admit(self) -> None:
        with self.journal.step("admit", "putting the worker into its routers"):
            if self._ensure_enabled():
                self.changed.append("unit")
            for note in self.tools.admit(self.worker, self._live_secrets(), self.limits, self.say, self.generation) or []:
                self._note(note)
            if self.admits:
                self.changed.append("admit")

    def _ensure_enabled(self) -> bool:
        """Enable the unit where it can be; whether it had not been."""
        shown = self.tools.systemd.show(self.unit)
        if shown.file_state != "disabled" or "[Install]" not in (shown.text or ""):
            return False
        if self.store.on_disk() == states.BASELINE and self.store.load(states.BASELINE).expect["unit"]["file_state"] != "enabled":
            return False
        self.tools.systemd.enable(self.unit)
        return True

    # --- the ways back ---

    def _put_back(self, step: str, error: BaseException) -> dict[str, Any]:
        """Nothing was switched: the worker goes back into the routers that it was in."""
        self.store.discard_temporary(self.transaction.id)
        if getattr(error, "restored", False) or not self.was_listed:
            return self._unchanged(step, error)
        try:
            self._admit()
        except (Exception, Deadline) as second:
            self._note(f"it runs on as before, but could not be put back into its routers: {second}")
            return self._end("drained", error, step)
        return self._unchanged(step, error)

    def _unchanged(self, step: str, error: BaseException) -> dict[str, Any]:
        self.store.discard_temporary(self.transaction.id)
        return self._end("unchanged", error, step)

    def _roll_back(self, step: str, error: BaseException) -> dict[str, Any]:
        """After the switch: evidence, then the last proved state again, or out of service."""
        if isinstance(error, NotSwitched):
            return self._put_back(step, error)
        step = self.transaction.step() or step
        failed_gate = isinstance(error, gate.GateRefused) or step in ("start", "gate")
        self._collect()
        if failed_gate:
            self.ledger.refuse(self.wanted, self.transaction.id, time.time(), str(hide(str(error), self.secret_texts)))
            self.ledger.save()
        fallback = self._fallback(self.wanted)
        if isinstance(error, NotGone):
            return self._drain_out(step, error, stop=False)
        if self.request.get("preserve") and failed_gate:
            self._note("left running for a look, as asked")
            return self._drain_out(step, error, stop=False)
        if fallback is None or not fallback.runnable:
            self._note("there is no proved state to go back to")
            return self._drain_out(step, error, stop=True)
        if step == "admit" and not self._routers_answer():
            self._note("it passed its gate; its routers do not answer, so going back would not admit it either")
            return self._drain_out(step, error, stop=True)
        try:
            text = f"bringing {self._short(fallback.name)} back"
            with _deadline(backward_s(self.limits)), self.journal.step("rollback", text):
                self._bring_back(fallback)
        except (Exception, Deadline) as second:
            self._note(f"bringing {self._short(fallback.name)} back failed: {second}")
            return self._drain_out(step, error, stop=not isinstance(second, NotGone))
        return self._end("rolled_back", error, step)

    def _bring_back(self, state: states.State) -> None:
        """The state on disk, running, proved and admitted. A process that never stopped running it is left alone."""
        before = self._main()
        self._restore(state)
        shown = self.tools.systemd.show(self.unit)
        if shown.active != "active" or self._live_state(shown) != state.name or shown.need_daemon_reload:
            self._restart(before)
        else:
            before = None
        self._prove(state, before)
        self._admit()

    def _restore(self, state: states.State) -> None:
        if not self.store.script_is(state):
            self.store.switch_script(self.store.stage_script(state, self.transaction.id))
        self._follow_unit(state)

    def _drain_out(self, step: str, error: BaseException, stop: bool) -> dict[str, Any]:
        """Out of service: out of the routers, stopped unless that was tried or is not wanted, disabled."""
        with self.journal.step("rollback", "taking the worker out of service"):
            for one in self._each_router():
                with self._noting(f"removing it from router {one.url}"):
                    one.remove(self.worker["url"])
            if stop:
                with self._noting(f"stopping {self.unit}"):
                    self._stop()
            with self._noting(f"disabling {self.unit}"):
                self.tools.systemd.disable(self.unit)
            with self._noting("putting the last proved script back"):
                resting = self.ledger.proved[-1]["state"] if self.ledger.proved else states.BASELINE
                if resting != states.BASELINE or self.store.has_baseline():
                    self._restore(self.store.load(resting))
        return self._end("drained", error, step)

    def _routers_answer(self) -> bool:
        try:
            self._listed()
        except router.RouterError:
            return False
        return True

    def _each_router(self) -> list[Any]:
        found: list[Any] = []
        with self._noting("finding its routers"):
            found = self.tools.routers(self.worker, self.secrets)
        return found

    @contextlib.contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """The last resort goes on to its end: what fails on the way is said, in the journal and in the result."""
        try:
            yield
        except (Exception, Deadline) as error:
            self._note(f"{what} failed: {error}")

    def _collect(self) -> None:
        """Evidence before anything of it is overwritten."""
        with self._noting("collecting evidence"), self.journal.step("evidence", "collecting evidence"):
            names = self.tools.collect(self.worker, self.transaction.evidence, self.started)
            self.say(f"evidence: {', '.join(names)}")
            self.evidence = self.transaction.evidence

    def _fallback(self, failed: str | None) -> states.State | None:
        """The last proved state, else the baseline. Never the one that failed, nor one older than the last proved."""
        name = self.ledger.last_proved() if self.ledger.proved else states.BASELINE
        if name is None or name == failed or (name == states.BASELINE and not self.store.has_baseline()):
            return None
        return self.store.load(name)

    # --- recovery of a transaction whose agent died ---

    def recover(self) -> dict[str, Any]:
        """While the host is up: the last proved state on disk, running, proved and admitted again."""
        self.was_listed = [url for line in self.transaction.lines() for url in line.get("listed", [])]
        reached = self.transaction.step()
        error = AgentError(
            f"the agent ended in step {reached or 'none'} without a result; expected it to reach an end "
            f"state. Look at 'journalctl -u {paths.AGENT_UNIT}'."
        )
        try:
            text = f"recovering a transaction that died in step {reached or 'none'}"
            with _deadline(backward_s(self.limits)), self.journal.step("rollback", text):
                self.store.discard_temporary(self.transaction.id)
                if self.transaction.began("switch"):
                    self._collect()
                    fallback = self._fallback(None)
                    if fallback is None or not fallback.runnable:
                        raise AgentError("found no proved state to go back to, expected one. Deploy a state anew.")
                    self._bring_back(fallback)
                elif self.transaction.began("drain") and self.was_listed:
                    self._admit()
        except (Exception, Deadline) as second:
            self._note(f"recovering failed: {second}")
            return self._drain_out(reached or "stage", error, stop=not isinstance(second, NotGone))
        return self._end("interrupted", error, reached)

    def restore_files(self) -> dict[str, Any]:
        """Before the worker's unit starts (at boot): the last proved state's files, nothing else."""
        reached = self.transaction.step()
        error = AgentError(
            f"the host went down in step {reached or 'none'} of the transaction; expected it to reach an "
            "end state. Look at the worker, then acknowledge it."
        )
        with self.journal.step("rollback", f"restoring the files of a transaction that died in step {reached or 'none'}"):
            self.restore_only()
        return self._end("interrupted", error, reached)

    def restore_only(self) -> None:
        """The files of the last proved state; the transaction keeps having no result."""
        self.store.discard_temporary(self.transaction.id)
        if self.transaction.began("switch"):
            fallback = self._fallback(None)
            if fallback is not None:
                self._restore(fallback)

    # --- ends ---

    def _succeed(self, target: states.State) -> dict[str, Any]:
        overrides = self.request.get("overrides", self.ledger.overrides)
        if overrides != self.ledger.overrides:
            self.changed.append("overrides")
        self.ledger.overrides = overrides
        self.ledger.prove(target.name, self.transaction.id, time.time(), overrides)
        for text in (self.proof or {}).get("notes", []):
            self._note(text)
        return self._end("applied" if self.changed else "unchanged", None, None)

    def _end(self, end_state: str, error: BaseException | None, step: str | None) -> dict[str, Any]:
        """Decide, write the ledger, give the result. In this order `recover` can tell after a crash between them."""
        failed = error is not None
        if error is not None and not isinstance(error, AgentError):
            self.say(f"{type(error).__name__}: {error}")
        now = None
        with self._noting("asking systemd for the live state"):
            now = self._live_state(self.tools.systemd.show(self.unit))
        result: dict[str, Any] = {
            "format": 1,
            "id": self.transaction.id,
            "end_state": end_state,
            "failed": failed,
            "error": None if error is None else (str(error) or type(error).__name__),
            "failed_step": step if failed else None,
            "state": {"before": self.state_before, "wanted": self.wanted, "now": now},
            "changed": list(dict.fromkeys(self.changed)),
            "timeline": self.journal.timeline,
            "healthy_after_s": self.healthy_after,
            "gate": self.proof,
            "notes": self.notes,
            "evidence": self.evidence,
        }
        result = dict(hide(result, self.secret_texts))
        with self.journal.step("done", f"{end_state}{': ' + result['error'] if failed else ''}"):
            self.ledger.end(self.transaction.id, end_state, failed, self.store.on_disk(), time.time())
            self.transaction.decide(result)
            self.ledger.save()
            self._tidy()
        self.transaction.give()
        secrets.forget(self.transaction.id)
        return result

    def _tidy(self) -> None:
        """Remove what nobody needs; failing at that changes no end state."""
        with self._noting("collecting garbage"):
            tidy(int(self.limits["keep_releases"]), {self.transaction.id})

    # --- small things ---

    def _main(self) -> dict[str, Any] | None:
        """The running main process, in the form that the gate compares with."""
        shown = self.tools.systemd.show(self.unit)
        main = self.tools.process(shown.main_pid) if shown.main_pid else None
        if main is None:
            return None
        return {"invocation": shown.invocation, "main_pid": main.pid, "start_time": main.start_time}

    def _secrets_of(self, state: states.State) -> dict[str, Any]:
        """The request's secrets with the API key of a server of this state."""
        wanted = state.expect.get("environment", {}).get("DSV4_FLEET_SECRETS")
        return {**self.secrets, "api_key": secrets.api_key(self.unit, wanted, self.secrets.get("api_key"))}

    def _live_secrets(self) -> dict[str, Any]:
        """The request's secrets with the API key of the server that runs now."""
        shown = self.tools.systemd.show(self.unit)
        main = self.tools.process(shown.main_pid) if shown.main_pid else None
        wanted = main.environ.get("DSV4_FLEET_SECRETS") if main else None
        return {**self.secrets, "api_key": secrets.api_key(self.unit, wanted, self.secrets.get("api_key"))}

    def _live_state(self, shown: systemd.Unit) -> str | None:
        """The state that the main process was started as; `baseline` for the recorded hand-made one; None for none."""
        main = self.tools.process(shown.main_pid) if shown.main_pid else None
        if main is None:
            return None
        declared = main.environ.get("DSV4_FLEET_STATE")
        if declared or not self.store.has_baseline():
            return declared
        return states.BASELINE if main.cmdline == self.store.load(states.BASELINE).expect["arguments"] else None

    @contextlib.contextmanager
    def _failing(self, step: str, way_back: Callable[[str, BaseException], dict[str, Any]]) -> Iterator[None]:
        """Whatever goes wrong in the block ends the transaction by `way_back`."""
        try:
            yield
        except _Ended:
            raise
        except (Exception, Deadline) as error:
            signal.setitimer(signal.ITIMER_REAL, 0)  # the way back has its own time
            raise _Ended(way_back(step, error)) from error

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            self.say(text)

    def _short(self, state: str) -> str:
        return f"state {state[:12]}"


class _Ended(Exception):
    """A transaction ended with a result."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__(result["end_state"])
        self.result = result


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise Deadline in the block when its time is over, wherever it hangs."""

    def late(_signal: int, _frame: Any) -> None:
        raise Deadline(f"the transaction's own deadline of {seconds:.0f} s is over, expected its steps to end in their times")

    previous = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _started_at(main: proc.Process) -> float:
    """When the process started, as a Unix time."""
    with open("/proc/stat", encoding="ascii") as file:
        booted = next(int(line.split()[1]) for line in file if line.startswith("btime "))
    return booted + main.start_time / os.sysconf("SC_CLK_TCK")


def tidy(keep_releases: int, keep_transactions: set[str]) -> None:
    """Collect garbage over all workers of this host: a release may be another worker's."""
    needed: set[str] = set()
    stores: list[tuple[states.Store, set[str]]] = []
    units = os.listdir(paths.WORKERS) if os.path.isdir(paths.WORKERS) else []
    for unit in units:
        ledger = Ledger(unit)
        worker = next(
            (one.request()["worker"] for one in reversed(everything()) if one.request()["worker"]["unit"] == unit),
            None,
        )
        store = states.Store(worker or {"unit": unit, "script": ""})
        kept = {one["state"] for one in ledger.proved[-2:]} | {store.on_disk() or ""}
        for state in kept & set(store.names()):
            needed.add(str(store.load(state).release))
        if ledger.last:
            keep_transactions = keep_transactions | {ledger.last["id"]}
        stores.append((store, kept))
    release.collect_garbage(needed, keep_releases)
    for store, kept in stores:
        store.collect_garbage(kept)
    collect_garbage(keep_transactions)
