"""The HTTP process: upstream's endpoints, authorisation, start, and graceful stop."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from . import answers, scheduler
from .answers import Prompt
from .arguments import SECRETS, parse
from .scheduler import FAKE_BOOTSTRAP_HOST
from .settings import Faults, Settings
from .tree import Tree

ADMIN_PATHS = ("/flush_cache", "/abort_request")
OPEN_PATHS = ("/health", "/metrics", "/ready", "/ping", "/standin/")
SECTIONS = {"core", "memory", "spec", "lora", "disagg", "queues", "all"}
CAPACITY = 1 << 20  # tokens the pretended cache holds


def main(argv: list[str]) -> None:
    """Start as `python3 -m sglang.launch_server` starts, and never return."""
    born = time.monotonic()
    settings, faults = Settings.load(), Faults()
    skipped = faults.get("no_passport")
    tree = Tree.load(with_environ=not (skipped and skipped["process"] in ("both", "main")))
    arguments = parse(argv)
    if fault := faults.get("crash_at_start"):
        time.sleep(fault["after_s"])
        log("a fault crashes this process at start")
        sys.exit(fault["exit_code"])
    log(f"sglang {tree.version} from {tree.package}, mode {arguments['disaggregation_mode']}")
    asyncio.run(Server(argv, arguments, settings, faults, tree, born).serve())


def log(text: str) -> None:
    """One line in the journal, marked as the stand-in's."""
    print(f"stand-in: {text}", file=sys.stderr, flush=True)


@dataclasses.dataclass
class Reply:
    """What the engine has said to one request and the handler has not yet passed on."""

    pieces: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    finish: str | None = None
    error: dict[str, Any] | None = None
    news: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


class EngineError(Exception):
    """The engine refused or lost a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """One server: its scheduler process, its requests in flight, its routes."""

    def __init__(
        self,
        argv: list[str],
        arguments: dict[str, Any],
        settings: Settings,
        faults: Faults,
        tree: Tree,
        born: float,
    ) -> None:
        self.argv, self.arguments = argv, arguments
        self.settings, self.faults, self.tree, self.born = settings, faults, tree, born
        self.mode: str = arguments["disaggregation_mode"]
        self.status = "Starting"  # Starting, Up or UnHealthy, as upstream names them
        self.exiting = False  # SIGTERM came
        self.stopped = False  # the scheduler was told to end
        self.up_at: float | None = None
        self.health_answers = 0
        self.last_receive = 0.0
        self.replies: dict[str, Reply] = {}
        self.loads: dict[str, int] = {}
        self.truth: list[dict[str, Any]] = []
        self.rooms: dict[int, asyncio.Future[str]] = {}
        self.ready = asyncio.Event()
        self.writer: asyncio.StreamWriter
        self.process: multiprocessing.process.BaseProcess
        self.tasks: set[asyncio.Task[None]] = set()

    # ---- start and stop

    async def serve(self) -> None:
        """Start the scheduler, open the port, warm up, serve until the graceful stop is over."""
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=scheduler.run, args=(theirs, self.arguments, self.settings))
        self.process.start()
        theirs.close()
        reader, self.writer = await asyncio.open_connection(sock=ours, limit=scheduler.LINE_LIMIT)
        self._spawn(self._receive(reader))
        await self.ready.wait()
        start_s = fault["seconds"] if (fault := self.faults.get("start_s")) else self.settings.start_s
        listen_s = start_s / 2 if self.settings.listen_s is None else self.settings.listen_s
        await self._sleep_until(self.born + listen_s)
        await self._listen()
        if self.faults.get("start_never"):
            log("a fault keeps this server starting for ever")
            await asyncio.Event().wait()
        await self._sleep_until(self.born + start_s)
        self._handle_signals()
        await self._warm_up()
        self.status, self.up_at = "Up", time.monotonic()
        log("The server is fired up and ready to roll!")
        if (fault := self.faults.get("dies")) and fault["after_s"] is not None:
            self._spawn(self._die_later(fault["after_s"], fault["exit_code"]))
        await self._until_drained()
        await self._stop()

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            sys.excepthook(type(error), error, error.__traceback__)
            self._die("a task of the HTTP process failed")

    @staticmethod
    async def _sleep_until(moment: float) -> None:
        await asyncio.sleep(max(0.0, moment - time.monotonic()))

    async def _listen(self) -> None:
        app = web.Application(middlewares=[self._authorise], client_max_size=64 << 20)
        app.add_routes(self._routes())
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        host = self.arguments["host"]
        if fault := self.faults.get("listen"):
            host = fault["host"]
        listener = self._bind(host, self.arguments["port"])
        if fault := self.faults.get("orphan"):
            self._leave_orphan(listener, fault)
        await web.SockSite(runner, listener, backlog=2048).start()
        if self.mode == "prefill":
            bootstrap = self._bind(host, self.arguments["disaggregation_bootstrap_port"])
            await web.SockSite(runner, bootstrap, backlog=2048).start()

    @staticmethod
    def _bind(host: str, port: int) -> socket.socket:
        """A bound socket; where the address is taken the process ends with 1, as upstream's does."""
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            listener.bind(address)
            listener.listen(2048)
        except OSError as error:
            log(f"[Errno {error.errno}] error while attempting to bind on address {address}: {error.strerror}")
            os._exit(1)
        return listener

    def _leave_orphan(self, listener: socket.socket, fault: dict[str, Any]) -> None:
        """Start the process that keeps the port when this one has gone."""
        program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "orphan.py")
        command = [sys.executable, program, str(listener.fileno()), str(fault["seconds"])]
        child = subprocess.Popen(
            command + (["escape"] if fault["escape_cgroup"] else []),
            pass_fds=[listener.fileno()],
            start_new_session=True,
            stdout=subprocess.PIPE,
        )
        if child.stdout is None or not child.stdout.readline():
            self._die("the left-over of the orphan fault did not start")
        log(f"a fault leaves process {child.pid} behind on the port")

    def _handle_signals(self) -> None:
        def on_term() -> None:
            log("SIGTERM received. Draining requests and shutting down...")
            self.exiting = True

        loop = asyncio.get_running_loop()
        if self.faults.get("ignore_sigterm"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            loop.add_signal_handler(signal.SIGTERM, on_term)

    async def _warm_up(self) -> None:
        prompt = answers.from_generate({"input_ids": [10, 11], "sampling_params": {"max_new_tokens": 2}}, 2)
        async for _ in self._generate(prompt, self._fake_bootstrap(), internal=True):
            pass

    def _fake_bootstrap(self) -> dict[str, Any] | None:
        return None if self.mode == "null" else {"host": FAKE_BOOTSTRAP_HOST, "port": None, "room": 0}

    async def _until_drained(self) -> None:
        """Upstream's watchdog: looks every few seconds, without a deadline."""
        poll = self.settings.sigterm_poll_s
        while not self.exiting:
            await asyncio.sleep(poll)
        while True:
            if self.status == "UnHealthy":
                log("Signal SIGTERM received while health check failed. Force exiting.")
                return
            log(f"Gracefully exiting... Remaining number of requests {len(self.replies)}.")
            if not self.replies:
                return
            await asyncio.sleep(poll)

    async def _stop(self) -> None:
        self.stopped = True
        self._send({"op": "shutdown"})
        await asyncio.to_thread(self.process.join, self.settings.scheduler_exit_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        log("stopped")
        if self.settings.exit_by_kill:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)

    def _die(self, why: str) -> None:
        """Upstream kills its own process tree when a child has failed."""
        log(f"{why}; killing the whole server")
        if self.process.pid and self.process.is_alive():
            self.process.kill()
        os.kill(os.getpid(), signal.SIGKILL)

    async def _die_later(self, seconds: float, code: int) -> None:
        await asyncio.sleep(seconds)
        self._exit_by_fault(code)

    def _exit_by_fault(self, code: int) -> None:
        log("a fault ends this server")
        if self.process.is_alive():
            self.process.kill()
        os._exit(code)

    # ---- the engine

    def _send(self, message: dict[str, Any]) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            message = json.loads(line)
            if "ready" in message:
                self.ready.set()
                continue
            self.loads = message["loads"]
            self.truth.extend(message["truth"])
            for rid, update in message["out"].items():
                self.last_receive = time.monotonic()
                if reply := self.replies.get(rid):
                    reply.pieces.extend(update["pieces"])
                    reply.finish = update["finish"] or reply.finish
                    reply.error = update["error"] or reply.error
                    reply.news.set()
            for rid, room in message["prefilled"].items():
                future = self._room(room)
                if not future.done():
                    future.set_result(rid)
        if not self.stopped:
            self._die(f"scheduler process {self.process.pid} died")

    def _room(self, room: int) -> asyncio.Future[str]:
        """Resolved with the request's id when the prefill's half of that room is ready."""
        if room not in self.rooms:
            self.rooms[room] = asyncio.get_running_loop().create_future()
        return self.rooms[room]

    async def _generate(
        self,
        prompt: Prompt,
        bootstrap: dict[str, Any] | None,
        internal: bool = False,
        rid: str | None = None,
        request: web.Request | None = None,
    ) -> AsyncGenerator[Reply, None]:
        """The engine's answer as it comes; each Reply holds what is new. EngineError where it gives none.

        The request counts as in flight until this is exhausted or closed; a client that has gone aborts it.
        """
        rid = rid or uuid.uuid4().hex
        reply = self.replies[rid] = Reply()
        message = {"op": "generate", "rid": rid, "prompt": dataclasses.asdict(prompt)}
        self._send({**message, "internal": internal, "bootstrap": bootstrap})
        deadline = time.monotonic() + self.settings.pd_timeout_s if self.mode == "prefill" else None
        done = False
        try:
            while not done:
                try:
                    await asyncio.wait_for(reply.news.wait(), timeout=1.0)
                except TimeoutError:
                    if request is not None and (request.transport is None or request.transport.is_closing()):
                        return
                    if deadline and time.monotonic() > deadline:
                        raise EngineError(500, f"Prefill transfer failed: room {bootstrap} was not fetched") from None
                    continue
                reply.news.clear()
                if reply.error:
                    done = True
                    raise EngineError(reply.error["status"], reply.error["message"])
                done = reply.finish is not None
                pieces, reply.pieces = reply.pieces, []
                yield Reply(pieces=pieces, finish=reply.finish)
        finally:
            self.replies.pop(rid, None)
            if bootstrap and self.mode == "prefill":
                self.rooms.pop(bootstrap["room"], None)
            if not done:
                self._send({"op": "abort", "rid": rid})

    # ---- routes

    def _routes(self) -> list[web.RouteDef]:
        get, post = web.get, web.post
        return [
            get("/health", self.health),
            get("/health_generate", self.health),
            get("/ping", self.health),
            get("/ready", self.is_ready),
            get("/server_info", self.server_info),
            get("/get_server_info", self.server_info),
            get("/model_info", self.model_info),
            get("/get_model_info", self.model_info),
            get("/v1/models", self.models),
            get("/v1/loads", self.get_loads),
            get("/metrics", self.metrics),
            get("/flush_cache", self.flush_cache),
            post("/flush_cache", self.flush_cache),
            post("/abort_request", self.abort_request),
            post("/generate", self.generate),
            post("/v1/chat/completions", self.chat),
            get("/standin/kv", self.kv),
            get("/standin/page", self.page),
            get("/standin/truth", self.get_truth),
        ]

    @web.middleware
    async def _authorise(self, request: web.Request, handler: Any) -> web.StreamResponse:
        api_key, admin_key = self.arguments["api_key"], self.arguments["admin_api_key"]
        wanted = admin_key or api_key if request.path in ADMIN_PATHS else api_key
        if wanted and not request.path.startswith(OPEN_PATHS):
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), str(wanted).encode()):
                return web.json_response({"error": "Unauthorized"}, status=401)
        response: web.StreamResponse = await handler(request)
        return response

    async def health(self, request: web.Request) -> web.Response:
        """Upstream's health probe: one token through the scheduler, 503 where none comes in time."""
        if fault := self.faults.get("health_redirect"):
            return web.Response(status=302, headers={"Location": fault["location"]})
        if self.faults.get("health_silent"):
            await asyncio.Event().wait()
        if self.exiting:
            return web.Response(status=503)
        if self.faults.get("health_early"):
            return web.Response(status=200)
        if self.status == "Starting":
            return web.Response(status=503)
        if (fault := self.faults.get("health_503")) and time.monotonic() < (self.up_at or 0) + fault["seconds"]:
            return web.Response(status=503)
        if not self.faults.get("hung_engine") and not await self._alive():
            log(f"Health check failed. No response from the scheduler for {self.settings.health_timeout_s} seconds.")
            self.status = "UnHealthy"
            return web.Response(status=503)
        self.status = "Up"
        self.health_answers += 1
        if (fault := self.faults.get("dies")) and self.health_answers == fault["after_health"]:
            self._spawn(self._die_later(0.05, fault["exit_code"]))
        return web.Response(status=200)

    async def _alive(self) -> bool:
        prompt = answers.from_generate({"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}, 1)
        asked = time.monotonic()

        async def probe() -> None:
            rid = f"HEALTH_CHECK_{uuid.uuid4().hex}"
            async with aclosing(self._generate(prompt, self._fake_bootstrap(), internal=True, rid=rid)) as replies:
                async for _ in replies:
                    return

        task = asyncio.create_task(probe())
        try:
            while time.monotonic() < asked + self.settings.health_timeout_s:
                await asyncio.sleep(min(self.settings.health_min_s, self.settings.health_timeout_s))
                if self.last_receive > asked:
                    return True
            return False
        finally:
            task.cancel()

    async def is_ready(self, request: web.Request) -> web.Response:
        """Only from 0.5.20 on."""
        if self._version() < (0, 5, 20):
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.Response(status=200 if self.status == "Up" and not self.exiting else 503)

    def _version(self) -> tuple[int, ...]:
        return tuple(int(part) for part in self.tree.version.split(".")[:3] if part.isdigit())

    async def server_info(self, request: web.Request) -> web.Response:
        """Arguments without their secrets, and the scheduler's state."""
        shown = {name: value for name, value in self.arguments.items() if name not in SECRETS}
        state: dict[str, Any] = {
            "last_gen_throughput": 0.0,
            "effective_max_running_requests_per_dp": self.arguments["max_running_requests"],
        }
        environ = self.tree.environ
        if environ is not None and self._version() >= (0, 5, 19) and self.tree.flag("SGLANG_EXPOSE_OWN_ENV_VARS"):
            declared = [name for name in os.environ if hasattr(type(environ.envs), name)]
            state["env_vars"] = {name: os.environ[name] for name in declared}
        info = {
            **shown,
            "max_total_num_tokens": CAPACITY,
            "max_req_input_len": self.arguments["context_length"],
            "startup_time": time.monotonic() - self.born,
            "internal_states": [state],
            "version": self.tree.version,
            "kv_events": None,
            "standin": True,
        }
        if self._version() >= (0, 5, 20):
            info["launch_command"] = self._launch_command()
        return web.json_response(info)

    def _launch_command(self) -> str:
        words, hide = ["python3", "-m", "sglang.launch_server"], False
        for word in self.argv:
            name, equals, _ = word.partition("=")
            secret = name.startswith("--") and name[2:].replace("-", "_") in SECRETS
            words.append("***" if hide else f"{name}=***" if secret and equals else word)
            hide = secret and not equals
        return " ".join(words)

    async def model_info(self, request: web.Request) -> web.Response:
        """What the router asks for at registration."""
        names = (
            "model_path",
            "served_model_name",
            "tokenizer_path",
            "load_format",
            "reasoning_parser",
            "tool_call_parser",
        )
        fixed = {
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": "deepseek_v4",
            "architectures": ["DeepseekV4ForCausalLM"],
        }
        return web.json_response({name: self.arguments[name] for name in names} | fixed)

    async def models(self, request: web.Request) -> web.Response:
        """The served model's card."""
        if self.faults.get("models_500"):
            return web.Response(status=500, text="Internal Server Error")
        name = self.arguments["served_model_name"]
        card = {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "sglang",
            "root": name,
            "parent": None,
            "max_model_len": self.arguments["context_length"],
        }
        return web.json_response({"object": "list", "data": [card]})

    def _queues(self) -> tuple[int, int, dict[str, Any]]:
        """Running and waiting requests as upstream counts them, and the disaggregation section.

        A prefill's requests that wait to be fetched are in neither number, upstream either.
        """
        loads = self.loads
        transferring = loads.get("transferring", 0)
        section = {
            "mode": self.mode,
            "prefill_bootstrap_queue_reqs": 0,
            "prefill_inflight_queue_reqs": loads.get("inflight", 0),
            "decode_prealloc_queue_reqs": 0,
            "decode_transfer_queue_reqs": transferring,
            "decode_retracted_queue_reqs": 0,
            "kv_transfer_speed_gb_s": 0.0,
            "kv_transfer_latency_ms": 0.0,
        }
        return loads.get("running", 0), loads.get("waiting", 0) + transferring, section

    async def get_loads(self, request: web.Request) -> web.Response:
        """`/v1/loads`, sections as upstream names them."""
        include = {part.strip() for part in request.query.get("include", "all").split(",")}
        if include - SECTIONS:
            detail = f"Invalid include sections: {include - SECTIONS}. Valid options: {sorted(SECTIONS)}"
            return web.json_response({"detail": detail}, status=400)
        running, waiting, disaggregation = self._queues()
        load: dict[str, Any] = {
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_waiting_uncached_tokens": 0,
            "num_used_tokens": running * 100,
            "num_total_tokens": (running + waiting) * 100,
            "num_active_tokens": running * 100,
            "max_total_num_tokens": CAPACITY,
            "max_running_requests": self.arguments["max_running_requests"],
            "token_usage": round(running * 100 / CAPACITY, 4),
            "gen_throughput": 0.0,
            "cache_hit_rate": 0.0,
            "utilization": round(running / self.arguments["max_running_requests"], 4),
            "total_prefill_uncached_tokens": 0,
            "total_prefill_busy_us": 0,
            "decode_moments": None,
        }
        if include & {"all", "disagg"}:
            load["disaggregation"] = disaggregation
        if include & {"all", "queues"}:
            load["queues"] = {
                "waiting": self.loads.get("waiting", 0),
                "grammar": 0,
                "paused": 0,
                "retracted": 0,
                "prealloc_ready": 0,
            }
        if request.query.get("format") == "prometheus":
            return web.Response(text=_prometheus(load))
        body = {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": self.tree.version,
            "accelerator": None,
            "num_accelerators": self.arguments["tp_size"],
            "loads": [load],
        }
        return web.json_response(body)

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus metrics, only with --enable-metrics."""
        if not self.arguments["enable_metrics"]:
            return web.json_response({"detail": "Not Found"}, status=404)
        running, waiting, disaggregation = self._queues()
        values = {
            "num_running_reqs": ("gauge", running),
            "num_queue_reqs": ("gauge", waiting),
            "token_usage": ("gauge", running * 100 / CAPACITY),
            "gen_throughput": ("gauge", 0.0),
            "is_cuda_graph": ("gauge", int(self.mode != "prefill")),
            "cuda_graph_passes_total": ("counter", self.loads.get("tokens", 0)),
            "num_retracted_reqs": ("gauge", 0),
            "num_aborted_requests_total": ("counter", 0),
            "num_requests_total": ("counter", self.loads.get("requests", 0)),
            "generation_tokens_total": ("counter", self.loads.get("tokens", 0)),
        }
        for name in ("prefill_bootstrap", "prefill_inflight", "decode_prealloc", "decode_transfer"):
            values[f"num_{name}_queue_reqs"] = ("gauge", disaggregation[f"{name}_queue_reqs"])
        engine = {"null": "unified"}.get(self.mode, self.mode)
        model = self.arguments["served_model_name"]
        labels = f'model_name="{model}",engine_type="{engine}",tp_rank="0",pp_rank="0"'
        lines = []
        for name, (kind, value) in values.items():
            lines += [f"# TYPE sglang:{name} {kind}", f"sglang:{name}{{{labels}}} {float(value)}"]
        return web.Response(text="\n".join(lines) + "\n")

    async def flush_cache(self, request: web.Request) -> web.Response:
        """200 when idle, 400 with requests pending."""
        running, waiting, _ = self._queues()
        if running or waiting:
            return web.Response(status=400, text=f"Cache not flushed: {running} running, {waiting} waiting.\n")
        return web.Response(text="Cache flushed.\n")

    async def abort_request(self, request: web.Request) -> web.Response:
        """Of one request by its `rid`, or of all."""
        body = await _body(request)
        wanted = list(self.replies) if body.get("abort_all") else [str(body.get("rid", ""))]
        for rid in wanted:
            if not rid.startswith("HEALTH_CHECK"):
                self._send({"op": "abort", "rid": rid})
        return web.Response(status=200)

    async def page(self, request: web.Request) -> web.Response:
        """Where the redirect fault leads."""
        return web.Response(text="stand-in: some page that answers 200\n")

    async def get_truth(self, request: web.Request) -> web.Response:
        """Which answers were spoilt on purpose: what a counter of corrupted answers should have found."""
        return web.json_response(self.truth)

    async def kv(self, request: web.Request) -> web.Response:
        """The prefill's half for a decode worker, when it is ready. 404 where this is no prefill."""
        if self.mode != "prefill":
            return web.Response(status=404)
        room = int(request.query["room"])
        future = self._room(room)
        try:
            rid = await asyncio.wait_for(asyncio.shield(future), self.settings.pd_timeout_s)
        except TimeoutError:
            self.rooms.pop(room, None)
            return web.Response(status=504, text=f"no request for room {room} in time\n")
        self._send({"op": "transferred", "rid": rid})
        return web.Response(text="stand-in: transferred\n")

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """`/generate`: cumulative text in each chunk of a stream."""
        try:
            body = await _body(request)
            prompt = answers.from_generate(body, self.settings.default_tokens)
        except (ValueError, TypeError) as error:
            return _error(400, str(error))
        await self._wait_for_generation()
        rid = str(body.get("rid") or uuid.uuid4().hex)
        began, text, count = time.monotonic(), "", 0

        def chunk(finish: str | None) -> dict[str, Any]:
            kind = {
                "stop": {"type": "stop", "matched": None},
                "length": {"type": "length", "length": count},
                "abort": {"type": "abort", "message": "Abort in the engine"},
            }
            meta = {
                "id": rid,
                "finish_reason": kind[finish] if finish else None,
                "prompt_tokens": _tokens(prompt),
                "completion_tokens": count,
                "cached_tokens": 0,
                "weight_version": "default",
                "e2e_latency": time.monotonic() - began,
            }
            return {"text": text, "output_ids": list(range(count)), "meta_info": meta}

        async def parts() -> AsyncGenerator[dict[str, Any], None]:
            nonlocal text, count
            async for reply in self._generate(prompt, self._bootstrap(body), rid=rid, request=request):
                text += "".join(piece["c"] for piece in reply.pieces)
                count += len(reply.pieces)
                yield chunk(reply.finish)

        if body.get("stream"):
            return await self._stream(request, parts())
        last: dict[str, Any] | None = None
        try:
            async for part in parts():
                last = part
        except EngineError as error:
            return _error(error.status, str(error))
        return web.json_response(last)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """`/v1/chat/completions`, streamed or not."""
        try:
            body = await _body(request)
            prompt = answers.from_chat(body, self.settings.default_tokens)
        except (ValueError, TypeError, AttributeError) as error:
            return _error(400, str(error))
        await self._wait_for_generation()
        if body.get("stream"):
            return await self._stream(request, self._chat_chunks(body, prompt, request))
        text, finish, count = "", "stop", 0
        calls: dict[int, dict[str, Any]] = {}
        try:
            async for reply in self._generate(prompt, self._bootstrap(body), request=request):
                count += len(reply.pieces)
                finish = reply.finish or finish
                for piece in reply.pieces:
                    if "c" in piece:
                        text += piece["c"]
                    else:
                        _collect(calls, piece["t"])
        except EngineError as error:
            return _error(error.status, str(error))
        message = {
            "role": "assistant",
            "content": text or None,
            "reasoning_content": None,
            "tool_calls": list(calls.values()) or None,
        }
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": finish,
            "matched_stop": None,
        }
        return web.json_response(
            {
                "id": uuid.uuid4().hex,
                "object": "chat.completion",
                "created": int(time.time()),
                "model": self._model(body),
                "choices": [choice],
                "usage": _usage(prompt, count),
                "metadata": None,
            }
        )

    def _model(self, body: dict[str, Any]) -> str:
        return str(body.get("model") or self.arguments["served_model_name"])

    async def _chat_chunks(
        self, body: dict[str, Any], prompt: Prompt, request: web.Request
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Role first, then text or tool call fragments, the finish reason, and the usage if wanted."""
        base = {
            "id": uuid.uuid4().hex,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": self._model(body),
        }

        def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
            full = {"role": None, "content": None, "reasoning_content": None, "tool_calls": None, **delta}
            choice = {
                "index": 0,
                "delta": full,
                "logprobs": None,
                "finish_reason": finish,
                "matched_stop": None,
            }
            return {**base, "choices": [choice], "usage": None}

        first, count, finish = True, 0, "stop"
        async for reply in self._generate(prompt, self._bootstrap(body), request=request):
            if first:
                yield chunk({"role": "assistant", "content": ""})
                first = False
            count += len(reply.pieces)
            finish = reply.finish or finish
            # Text that came together goes out together, as upstream's does when it lags behind its scheduler.
            text = "".join(piece["c"] for piece in reply.pieces if "c" in piece)
            if text:
                yield chunk({"content": text})
            for piece in reply.pieces:
                if "t" in piece:
                    yield chunk({"tool_calls": [_call(piece["t"])]})
        yield chunk({}, finish)
        if (body.get("stream_options") or {}).get("include_usage"):
            yield {**base, "choices": [], "usage": _usage(prompt, count)}

    async def _stream(self, request: web.Request, chunks: AsyncGenerator[dict[str, Any], None]) -> web.StreamResponse:
        """Server-sent events; an error before the first chunk is a plain response."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        broken, sent = self.faults.get("stream_error"), 0
        try:
            async for chunk in chunks:
                if not response.prepared:
                    await response.prepare(request)
                if self.faults.get("stream_no_choices") and _is_last(chunk):
                    continue
                await response.write(b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n")
                sent += 1
                if broken and sent >= broken["after_chunks"]:
                    raise EngineError(500, "a fault broke this stream")
        except EngineError as error:
            if not response.prepared:
                return _error(error.status, str(error))
            await response.write(b"data: " + json.dumps(_error_object(error.status, str(error))).encode() + b"\n\n")
        finally:
            await chunks.aclose()
        if not response.prepared:
            raise ConnectionResetError("the client went away before the first token")
        if not self.faults.get("stream_no_done"):
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _wait_for_generation(self) -> None:
        """The fault in which health is green before the engine can generate."""
        if fault := self.faults.get("health_early"):
            await self._sleep_until(self.born + fault["generation_after_s"])

    @staticmethod
    def _bootstrap(body: dict[str, Any]) -> dict[str, Any] | None:
        if body.get("bootstrap_room") is None:
            return None
        return {
            "host": body.get("bootstrap_host"),
            "port": body.get("bootstrap_port"),
            "room": body["bootstrap_room"],
        }


async def _body(request: web.Request) -> dict[str, Any]:
    value = await request.json()
    if not isinstance(value, dict):
        raise ValueError(f"found {type(value).__name__}, expected a JSON object")
    return value


def _error_object(status: int, message: str) -> dict[str, Any]:
    kind = "BadRequestError" if status == 400 else "InternalServerError"
    return {"error": {"object": "error", "message": message, "type": kind, "param": None, "code": status}}


def _error(status: int, message: str) -> web.Response:
    log(f"answers {status}: {message}")
    return web.json_response(_error_object(status, message), status=status)


def _tokens(prompt: Prompt) -> int:
    return max(1, len(prompt.text) // 4)


def _usage(prompt: Prompt, count: int) -> dict[str, Any]:
    tokens = _tokens(prompt)
    return {
        "prompt_tokens": tokens,
        "total_tokens": tokens + count,
        "completion_tokens": count,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
    }


def _call(delta: dict[str, Any]) -> dict[str, Any]:
    function = {"name": delta.get("name"), "arguments": delta["arguments"]}
    return {"id": delta.get("id"), "index": delta["index"], "type": "function", "function": function}


def _collect(calls: dict[int, dict[str, Any]], delta: dict[str, Any]) -> None:
    if delta["index"] not in calls:
        calls[delta["index"]] = _call(delta)
    else:
        calls[delta["index"]]["function"]["arguments"] += delta["arguments"]


def _is_last(chunk: dict[str, Any]) -> bool:
    return any(choice["finish_reason"] for choice in chunk.get("choices", []))


def _prometheus(load: dict[str, Any]) -> str:
    prefixes = {"disaggregation": "disagg_"}
    lines = []
    for key, value in load.items():
        section = value if isinstance(value, dict) else {key: value}
        prefix = prefixes.get(key, f"{key}_") if isinstance(value, dict) else ""
        for name, number in section.items():
            if isinstance(number, int | float) and name != "dp_rank":
                lines += [
                    f"# TYPE sglang_{prefix}{name} gauge",
                    f'sglang_{prefix}{name}{{dp_rank="0"}} {number}',
                ]
    return "\n".join(lines) + "\n"
