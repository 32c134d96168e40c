"""The state that a node is found in: set up by hand, as the project takes it over at first contact."""

from __future__ import annotations

import io
import json
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.local.settings import (
    BOOTSTRAP_PORT,
    MODEL,
    ROUTER_METRICS_PORT,
    ROUTER_PORT,
    WORKER_PORTS,
    role_of,
    worker_url,
)

TREE = "/root/sglang-dsv4/python"
ENGINE = ("python3", "/opt/standin/launch_server.py")
ROUTER_UNIT = "sglang-router.service"
#: Quick to start and to stop; tokens come slowly enough that a stream of 40 lasts about a second.
STANDIN_SETTINGS = {"start_s": 2.0, "sigterm_poll_s": 1.0, "token_ms": 20.0}
#: What an operator set by hand: bf16 index-K with its Triton indexer, and the canary that looks at it.
HAND_MADE_FLAGS = {
    "SGLANG_DSV4_BF16_INDEX_K": "1",
    "SGLANG_DSV4_TRITON_INDEXER": "1",
    "SGLANG_DSV4_IDXK_CANARY": "1",
}


@dataclass(frozen=True)
class File:
    """One file of a node: its text and mode, or the target of a symbolic link."""

    text: str = ""
    mode: int = 0o644
    link: str | None = None


def unit_of(host: str) -> str | None:
    """The name of the unit that serves on a host; None on a light host."""
    role = role_of(host)
    if role == "router":
        return ROUTER_UNIT
    return f"sglang-dsv4-{role}.service" if role in WORKER_PORTS else None


def script_of(host: str) -> str:
    """The path of a worker's serve script."""
    return f"/root/sglang-dsv4/serve_dsv4_{role_of(host)}.sh"


def engine_arguments(host: str) -> list[str]:
    """The hand-made command line of a worker's engine."""
    role = role_of(host)
    arguments = ["--model-path", MODEL, "--trust-remote-code", "--host", "0.0.0.0", "--port", str(WORKER_PORTS[role])]
    arguments += ["--tp-size", "4", "--tool-call-parser", "deepseekv4", "--enable-metrics"]
    arguments += ["--disaggregation-mode", role]
    if role == "prefill":
        arguments += ["--disaggregation-bootstrap-port", str(BOOTSTRAP_PORT)]
    return arguments


def router_arguments(workers: Sequence[str]) -> list[str]:
    """The router's hand-made command line: its workers stand on it. Intervals are short, so that tests are."""
    arguments = ["launch", "--host", "0.0.0.0", "--port", str(ROUTER_PORT), "--pd-disaggregation"]
    arguments += ["--policy", "round_robin"]
    for host in workers:
        if role_of(host) == "prefill":
            arguments += ["--prefill", worker_url(host), str(BOOTSTRAP_PORT)]
        else:
            arguments += ["--decode", worker_url(host)]
    arguments += ["--log-level", "warn", "--health-check-interval-secs", "2", "--worker-startup-check-interval", "1"]
    arguments += ["--prometheus-host", "0.0.0.0", "--prometheus-port", str(ROUTER_METRICS_PORT)]
    return arguments


def files(host: str, workers: Sequence[str]) -> dict[str, File]:
    """The hand-made files of a host by path; ``workers`` are those that a router of the fleet serves."""
    role, unit = role_of(host), unit_of(host)
    found: dict[str, File] = {}
    if unit is None:
        return found
    if role == "router":
        command = shlex.join(["/opt/sglang-router/bin/sglang-router", *router_arguments(workers)])
        what = "SGLang router"
    else:
        command = script_of(host)
        what = f"SGLang {role} worker"
        exports = "".join(f"export {name}={value}\n" for name, value in HAND_MADE_FLAGS.items())
        found[command] = File(
            f"#!/bin/bash\n# {what}\ncd /root/sglang-dsv4\nexport PYTHONPATH={TREE}\n{exports}\n"
            f"exec {shlex.join([*ENGINE, *engine_arguments(host)])}\n",
            0o755,
        )
        found["/etc/dsv4-standin.json"] = File(json.dumps(STANDIN_SETTINGS) + "\n")
    found[f"/etc/systemd/system/{unit}"] = File(
        f"[Unit]\nDescription={what}\nAfter=network.target\n\n"
        f"[Service]\nExecStart={command}\nRestart=always\nRestartSec=2\n\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )
    found[f"/etc/systemd/system/multi-user.target.wants/{unit}"] = File(link=f"/etc/systemd/system/{unit}")
    return found


def archive(contents: Mapping[str, File]) -> bytes:
    """A tar of the files, owned by root, for unpacking at ``/``."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for path, file in contents.items():
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.mode = file.mode
            if file.link is not None:
                entry.type, entry.linkname = tarfile.SYMTYPE, file.link
                tar.addfile(entry)
            else:
                data = file.text.encode()
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return stream.getvalue()
