"""Upstream's own functions, patched or not, in a process that has none of SGLang's dependencies.

`indexer`, `metadata` and `environ` are imported as they are, with stubs for what they import. The
methods of the model and of the runner are taken out of their files and compiled as they stand: their
modules import half of SGLang. Names that such a method does not reach here are stubs that are false.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

INDEXER = "sglang/srt/layers/attention/dsv4/indexer.py"
MODEL = "sglang/srt/models/deepseek_v4.py"
RUNNER = "sglang/srt/model_executor/runner/decode_cuda_graph_runner.py"

STUBS = {
    "0.5.14": (
        "sglang.jit_kernel.dsv4", "sglang.srt.configs.deepseek_v4", "sglang.srt.debug_utils.cuda_coredump",
        "sglang.srt.layers.attention.dsv4.compressor", "sglang.srt.layers.linear",
        "sglang.srt.state_capturer.indexer_topk", "sglang.srt.utils", "sglang.srt.utils.common",
    ),
    "0.5.18": (
        "sglang.srt.configs.deepseek_v4", "sglang.srt.layers.attention.dsv4.compressor",
        "sglang.srt.layers.linear", "sglang.srt.state_capturer.indexer_topk", "sglang.srt.utils",
        "sglang.srt.utils.common", "sglang.kernels.ops.attention.dsv4",
        "sglang.kernels.ops.quantization.fp8_kernel", "sglang.srt.layers.attention.dsa.utils",
        "sglang.srt.model_executor.forward_batch_info",
        "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context",
        "sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph",
        "sglang.srt.runtime_context",
    ),
}  # fmt: skip
STUBS["0.5.19"] = STUBS["0.5.18"]
STUBS["0.5.23"] = (
    *STUBS["0.5.18"],
    "sglang.kernels.ops.attention.dsv4.fp4_indexer_hip",
    "sglang.srt.model_executor.runner_utils.capture_mode",
)


class Nothing:
    """Any attribute, any call, any context: itself. False, so that no option is on."""

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Nothing:
        return self

    def __bool__(self) -> bool:
        return False

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *args: Any) -> None:
        return None


NOTHING = Nothing()


class _Stub(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return NOTHING


class ShapeKey(NamedTuple):
    """Upstream's key of a captured graph."""

    size: int
    stream_idx: Any = None
    variant_label: Any = None


class PPProxyTensors:
    """What a graph returns here: a dict of tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors


def install(version: str, tree: Path) -> None:
    """Make `sglang.srt…` importable from `tree`, with stubs for the rest."""
    sys.path.insert(0, str(tree))
    stubs = set(STUBS[version])
    if version in ("0.5.14",):
        stubs.add("sglang.jit_kernel.dsv4")
    for name in sorted(stubs):
        parts = name.split(".")
        for end in range(1, len(parts)):
            parent = ".".join(parts[:end])
            if parent not in sys.modules:
                package = _Stub(parent)
                package.__path__ = [str(tree.joinpath(*parent.split(".")))]
                sys.modules[parent] = package
        stub = _Stub(name)
        stub.__path__ = []
        sys.modules[name] = stub
    for parent in (
        "sglang.srt.layers.attention.dsv4",
        "sglang.srt.layers.attention.dsa",
        "sglang.srt.layers.attention",
    ):
        if parent not in sys.modules:
            package = _Stub(parent)
            package.__path__ = [str(tree.joinpath(*parent.split(".")))]
            sys.modules[parent] = package
    no, none = (lambda *args, **kwargs: False), (lambda *args, **kwargs: None)
    for module in ("sglang.srt.utils", "sglang.srt.utils.common"):
        for name in ("is_hip", "is_xpu", "is_npu"):
            setattr(sys.modules[module], name, no)
        sys.modules[module].is_cuda = lambda: True  # a stub
        # Up to 0.5.18 the torch logits function of this kind of card is the one that works.
        sys.modules[module].is_sm120_supported = (
            (lambda *args: True) if version in ("0.5.14", "0.5.18") else no
        )
        sys.modules[module].ceil_div = lambda a, b: -(-a // b)
    sys.modules["sglang.srt.state_capturer.indexer_topk"].get_global_indexer_capturer = none
    if "sglang.kernels.ops.quantization.fp8_kernel" in sys.modules:
        sys.modules["sglang.kernels.ops.quantization.fp8_kernel"].is_fp8_fnuz = no


def indexer(tree: Path, name: str) -> Any:
    """The tree's indexer module, as a module of its own name, so that several can be compared."""
    spec = importlib.util.spec_from_file_location(name, tree / INDEXER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def method(
    tree: Path, rel: str, owner: str, name: str, change: Callable[[ast.FunctionDef], None] | None = None
) -> Callable[..., Any]:
    """A method out of a file, compiled as it stands; `change` may plant a fault in it."""
    module = ast.parse((tree / rel).read_text())
    [definition] = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == owner]
    [function] = [node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == name]
    if change is not None:
        change(function)
    future = ast.parse("from __future__ import annotations").body
    code = ast.Module(body=[*future, function], type_ignores=[])
    names: dict[str, Any] = {
        node.id: NOTHING
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and not hasattr(builtins, node.id)
    }
    names |= {
        "torch": torch, "contextlib": contextlib, "dataclasses": dataclasses, "inspect": inspect,
        "PPProxyTensors": PPProxyTensors, "LogitsProcessorOutput": type("LogitsProcessorOutput", (), {}),
    }  # fmt: skip
    for called in ("device_timer_ctx", "forward_context"):
        names[called] = lambda *args, **kwargs: contextlib.nullcontext()
    exec(compile(ast.fix_missing_locations(code), str(tree / rel), "exec"), names)
    return names[name]


def drop_before_join(function: ast.FunctionDef) -> None:
    """Plant the lifetime fault that 0.5.19 mended: `del qkv_a` right after kv's reader was launched."""
    body = function.body
    [delete] = [node for node in body if isinstance(node, ast.Delete)]
    body.remove(delete)
    [reader] = [
        index
        for index, node in enumerate(body)
        if isinstance(node, ast.With) and "_compute_kv_to_cache" in ast.unparse(node)
    ]
    body.insert(reader + 1, delete)
