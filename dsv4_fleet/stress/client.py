"""HTTP to the servers under test: one request to one worker, a prefill and decode pair, or a router."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from dsv4_fleet.stress.answer import Answer, Assembler

API_KEY = "DSV4_API_KEY"  # environment variable with the workers' key
VOLATILE = (
    "internal_states",
    "timestamp",
    "startup_time",
)  # of /server_info: what changes while nothing changes


@dataclass(frozen=True)
class Prefill:
    """A prefill worker that a decode worker's requests go to as well."""

    url: str
    bootstrap_port: int

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""


@dataclass
class Target:
    """What sessions are sent to, and what was seen of it. Without `direct` it is a router: its workers are unknown."""

    name: str
    url: str
    arm: str = "treatment"  # treatment, control or reference
    direct: bool = True
    prefills: tuple[Prefill, ...] = ()
    watched: tuple[str, ...] = ()  # a router's workers, whose load is watched and whose cache is flushed
    open_sessions: int = 0
    open_requests: int = 0
    sent: int = 0
    peak_sessions: int = 0
    peak_requests: int = 0
    peak_running: int | None = None  # as the worker itself says; of a router's workers the largest
    peak_waiting: int | None = None
    samples: int = 0
    flushed: bool | None = None
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)

    @property
    def servers(self) -> tuple[str, ...]:
        """The workers behind it that can be asked about themselves."""
        return (self.url,) if self.direct else self.watched

    @property
    def caches(self) -> tuple[str, ...]:
        return (*self.servers, *(prefill.url for prefill in self.prefills))


class HttpStatus(Exception):
    """An answer with another status than 200."""


class Client:
    """An HTTP client that ignores proxy variables and follows no redirect.

    aiohttp, not httpx: with 80 streams httpx spends most of a core on its connection pool (docs/stress.md).
    """

    def __init__(self, api_key: str | None, timeout_s: float) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=10)
        self.http = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        self.timeout_s = timeout_s
        self.rooms = random.SystemRandom()

    async def close(self) -> None:
        await self.http.close()

    async def ask(self, target: Target, body: dict[str, Any]) -> Answer:
        """The whole answer to one chat completion request; whatever goes wrong is in `failed`."""
        assembler = Assembler(bool(body["stream"]))
        target.open_requests += 1
        target.sent += 1
        target.peak_requests = max(target.peak_requests, target.open_requests)
        beside: asyncio.Task[None] | None = None
        try:
            if target.prefills:
                prefill = target.prefills[target.sent % len(target.prefills)]
                body = {
                    **body,
                    "bootstrap_host": prefill.host,
                    "bootstrap_port": prefill.bootstrap_port,
                    "bootstrap_room": self.rooms.getrandbits(62),
                }
                beside = asyncio.create_task(self._post(f"{prefill.url}/v1/chat/completions", body, None))
            await self._post(f"{target.url}/v1/chat/completions", body, assembler)
            if beside:
                await beside
            return assembler.close()
        except TimeoutError:
            return assembler.close(f"no answer in {self.timeout_s:g} s")
        except HttpStatus as error:
            return assembler.close(str(error))
        except (aiohttp.ClientError, OSError) as error:
            return assembler.close(type(error).__name__)
        finally:
            target.open_requests -= 1
            if beside and not beside.done():
                beside.cancel()
            if beside:
                await asyncio.gather(beside, return_exceptions=True)

    async def _post(self, url: str, body: dict[str, Any], assembler: Assembler | None) -> None:
        async with self.http.post(url, json=body, allow_redirects=False) as response:
            if response.status != 200:
                raise HttpStatus(f"HTTP {response.status}")
            async for data in response.content.iter_any():
                if assembler:
                    assembler.feed(data)

    async def _small(self, method: str, url: str) -> tuple[int, bytes] | None:
        """Status and body; None where the server does not answer, which is for the caller to judge."""
        limit = aiohttp.ClientTimeout(total=30)
        try:
            async with self.http.request(method, url, allow_redirects=False, timeout=limit) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    async def _json(self, url: str) -> Any:
        """The JSON object of a 200 answer, else None."""
        found = await self._small("GET", url)
        if not found or found[0] != 200:
            return None
        try:
            value = json.loads(found[1])
        except ValueError:
            return None
        return value if isinstance(value, dict) else None

    async def model(self, target: Target) -> str:
        """The name of the served model; RuntimeError where it cannot be had."""
        models = await self._json(f"{target.url}/v1/models")
        if not models or not models.get("data"):
            raise RuntimeError(
                f"found no answer with 200 from {target.url}/v1/models, expected the served model; "
                f"see whether {target.name} is up and {API_KEY} is its key"
            )
        return str(models["data"][0]["id"])

    async def flush(self, target: Target) -> bool:
        """Empty every cache behind the target; whether all of them said that they did."""
        done = []
        for url in target.caches:
            found = None
            for _ in range(20):  # a worker refuses while its last request is still being put away
                found = await self._small("POST", f"{url}/flush_cache")
                if found is None or found[0] != 400:
                    break
                await asyncio.sleep(0.25)
            done.append(found is not None and found[0] == 200)
        return bool(done) and all(done)

    async def load(self, url: str) -> tuple[int, int] | None:
        """Requests running and waiting, as the worker says; None where it does not say."""
        value = await self._json(f"{url}/v1/loads?include=core")
        if not value or not isinstance(loads := value.get("loads"), list):
            return None
        return sum(load["num_running_reqs"] for load in loads), sum(load["num_waiting_reqs"] for load in loads)

    async def identity(self, target: Target) -> dict[str, Any]:
        """What tells a changed or restarted server: digest of its settings, version, requests since it started."""
        found: dict[str, Any] = {"settings": None, "version": None, "requests": None}
        if not target.direct:
            return found
        if value := await self._json(f"{target.url}/server_info"):
            info = {name: item for name, item in value.items() if name not in VOLATILE}
            found["settings"] = hashlib.sha256(json.dumps(info, sort_keys=True).encode()).hexdigest()
            found["version"] = info.get("version")
        metrics = await self._small("GET", f"{target.url}/metrics")
        if metrics and metrics[0] == 200:
            counters = [
                float(line.rpartition(b" ")[2])
                for line in metrics[1].splitlines()
                if line.startswith(b"sglang:num_requests_total")
            ]
            found["requests"] = int(sum(counters)) if counters else None
        return found
