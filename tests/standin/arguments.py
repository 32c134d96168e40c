"""The command line, read loosely: any `--name [value …]` is taken, unknown names too."""

from __future__ import annotations

import sys
from typing import Any

SECRETS = frozenset({"api_key", "admin_api_key"})
ALIASES = {"model": "model_path", "tp": "tp_size", "dp": "dp_size", "tensor_parallel_size": "tp_size"}
DEFAULTS: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 30000,
    "api_key": None,
    "admin_api_key": None,
    "tp_size": 1,
    "dp_size": 1,
    "pp_size": 1,
    "served_model_name": None,
    "max_running_requests": 256,
    "context_length": 131072,
    "enable_metrics": False,
    "disaggregation_mode": "null",
    "disaggregation_bootstrap_port": 8998,
    "reasoning_parser": None,
    "tool_call_parser": None,
    "load_format": "auto",
    "tokenizer_path": None,
    "skip_server_warmup": False,
}


def parse(argv: list[str]) -> dict[str, Any]:
    """Argument values by name with underscores; those in `--config` come before the command line's.

    Exits with 2 and a message on standard error where the real parser does: no model, not a number,
    a stray positional argument, an unknown disaggregation mode.
    """
    given = _pairs(argv)
    config = given.pop("config", None)
    arguments = {**DEFAULTS, **(_config(str(config)) if config is not None else {}), **given}
    if not arguments.get("model_path"):
        _usage("the following arguments are required: --model-path/--model")
    for name, default in DEFAULTS.items():
        if isinstance(default, int) and not isinstance(default, bool):
            try:
                arguments[name] = int(arguments[name])
            except (TypeError, ValueError):
                _usage(f"argument --{name.replace('_', '-')}: invalid int value: {arguments[name]!r}")
    if arguments["disaggregation_mode"] not in ("null", "prefill", "decode"):
        _usage(f"argument --disaggregation-mode: invalid choice: {arguments['disaggregation_mode']!r}")
    arguments["served_model_name"] = arguments["served_model_name"] or arguments["model_path"]
    arguments["tokenizer_path"] = arguments["tokenizer_path"] or arguments["model_path"]
    return arguments


def _name(text: str) -> str:
    name = text.replace("-", "_")
    return ALIASES.get(name, name)


def _pairs(argv: list[str]) -> dict[str, Any]:
    values: dict[str, list[str]] = {}
    current: str | None = None
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            current = _name(name)
            values[current] = [value] if equals else []
        elif current is None:
            _usage(f"unrecognized arguments: {word}")
        else:
            values[current].append(word)
    return {name: True if not words else words[0] if len(words) == 1 else words for name, words in values.items()}


def _config(path: str) -> dict[str, Any]:
    import yaml  # only here: it costs memory in every process that does not need it

    try:
        with open(path, encoding="utf-8") as stream:
            values = yaml.safe_load(stream)
    except OSError as error:
        _usage(f"argument --config: {error}")
    if not isinstance(values, dict):
        _usage(f"argument --config: found {type(values).__name__} in {path}, expected a mapping")
    return {_name(str(name)): value for name, value in values.items()}


def _usage(message: str) -> Any:
    print(
        f"usage: launch_server.py [--model-path MODEL_PATH] …\nlaunch_server.py: error: {message}",
        file=sys.stderr,
    )
    raise SystemExit(2)
