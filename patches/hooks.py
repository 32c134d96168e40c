"""The hooks: one-line calls into `dsv4_probe`, spliced into upstream files at anchors.

A hook only ever adds whole lines, each ending in MARK and its name. So a tree that already has
hooks, ours or an older version's, is recognised and cleaned by dropping those lines, and splicing
twice gives the same bytes as splicing once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import libcst as cst
import libcst.matchers as m

from patches.errors import PatchError

MARK = "# dsv4-fleet hook:"

ENVIRON = "sglang/srt/environ.py"
MODEL = "sglang/srt/models/deepseek_v4.py"
INDEXER = "sglang/srt/layers/attention/dsv4/indexer.py"
RUNNER = "sglang/srt/model_executor/runner/decode_cuda_graph_runner.py"

LOGITS_ARGUMENTS = 8
"""q, index-K pages, weights, lengths, page table, schedule metadata, longest length, clean_logits."""


@dataclass(frozen=True)
class Hook:
    """One spliced line.

    `code` goes right after (or before) the only statement in `scope` that looks like `anchor`.
    `scope` names the class and method in which the anchor may stand at any depth; empty for the
    module's own statements. `{0}`, `{1}`, … in `code` are the arguments of the anchor's call.
    """

    name: str
    file: str
    scope: tuple[str, ...]
    anchor: str
    match: m.BaseMatcherNode
    code: str
    before: bool = False


def _expression(call: m.Call) -> m.BaseMatcherNode:
    return m.SimpleStatementLine(body=[m.Expr(value=call)])


def _assignment(name: str, call: m.Call) -> m.BaseMatcherNode:
    return m.SimpleStatementLine(
        body=[m.Assign(targets=[m.AssignTarget(target=m.Name(name))], value=call)]
    ) | m.SimpleStatementLine(body=[m.AnnAssign(target=m.Name(name), value=call)])


def _path(*names: str) -> Any:
    """The expression `a.b.c` as a matcher."""
    node: Any = m.Name(names[0])
    for name in names[1:]:
        node = m.Attribute(value=node, attr=m.Name(name))
    return node


def _probe(call: str) -> str:
    return f"import dsv4_probe.hooks; dsv4_probe.hooks.{call}"


_RECORD = m.Call(func=m.Attribute(attr=m.Name("record_event")))
_PREPARE = ("MQALayer", "_forward_prepare_multi_stream")
_OVERLAP = ("C4IndexerBackendMixin", "_forward_prepare_multi_stream")
_NORMAL = ("C4IndexerBackendMixin", "_forward_prepare_normal")
_COMPRESSOR = _expression(m.Call(func=_path("self", "forward_indexer_compressor")))
_COMPUTE_Q = m.SimpleStatementLine(
    body=[m.Assign(value=m.Call(func=_path("c4_indexer", "compute_q")))],
)
_CAPTURE = _expression(m.Call(func=_path("self", "backend", "capture_one")))
_REPLAY = _assignment("output", m.Call(func=_path("self", "backend", "replay")))

HOOKS: tuple[Hook, ...] = (
    Hook(
        name="passport",
        file=ENVIRON,
        scope=(),
        anchor="the module's call of _handle_deprecated_envs() or _convert_SGL_to_SGLANG()",
        match=_expression(m.Call(func=m.Name("_handle_deprecated_envs") | m.Name("_convert_SGL_to_SGLANG"))),
        code="import dsv4_probe.passport; dsv4_probe.passport.write(globals())",
    ),
    Hook(
        name="qkv-a-made",
        file=MODEL,
        scope=_PREPARE,
        anchor="qkv_a_ready = ….record_event()",
        match=_assignment("qkv_a_ready", _RECORD),
        code=_probe("prepare_made(self, attn_backend, x=x, qkv_a=qkv_a)"),
    ),
    Hook(
        name="q-lora-made",
        file=MODEL,
        scope=_PREPARE,
        anchor="q_lora_ready = ….record_event()",
        match=_assignment("q_lora_ready", _RECORD),
        code=_probe("prepare_made(self, attn_backend, x=x, q_lora=q_lora)"),
    ),
    Hook(
        name="qkv-a-read",
        file=MODEL,
        scope=_PREPARE,
        anchor="self._compute_kv_to_cache(…)",
        match=_expression(m.Call(func=_path("self", "_compute_kv_to_cache"))),
        code=_probe('prepare_read(self, "kv", qkv_a=qkv_a)'),
    ),
    Hook(
        name="x-read",
        file=MODEL,
        scope=_PREPARE,
        anchor="attn_backend.forward_core_compressor(…)",
        match=_expression(m.Call(func=_path("attn_backend", "forward_core_compressor"))),
        code=_probe('prepare_read(self, "compressor", x=x)'),
    ),
    Hook(
        name="overlap-compressed",
        file=INDEXER,
        scope=_OVERLAP,
        anchor="self.forward_indexer_compressor(…)",
        match=_COMPRESSOR,
        code=_probe("indexer_compressed(self, c4_indexer, x)"),
    ),
    Hook(
        name="overlap-q-made",
        file=INDEXER,
        scope=_OVERLAP,
        anchor="… = c4_indexer.compute_q(…)",
        match=_COMPUTE_Q,
        code=_probe("indexer_q_made(self, c4_indexer, x, q_lora, positions, q, weights)"),
    ),
    Hook(
        name="normal-compressed",
        file=INDEXER,
        scope=_NORMAL,
        anchor="self.forward_indexer_compressor(…)",
        match=_COMPRESSOR,
        code=_probe("indexer_compressed(self, c4_indexer, x)"),
    ),
    Hook(
        name="normal-q-made",
        file=INDEXER,
        scope=_NORMAL,
        anchor="… = c4_indexer.compute_q(…)",
        match=_COMPUTE_Q,
        code=_probe("indexer_q_made(self, c4_indexer, x, q_lora, positions, q, weights)"),
    ),
    Hook(
        name="logits",
        file=INDEXER,
        scope=("C4IndexerBackendMixin", "forward_c4_indexer"),
        anchor=f"logits = fn(<{LOGITS_ARGUMENTS} arguments>)",
        match=_assignment("logits", m.Call(func=m.Name("fn"), args=[m.Arg(keyword=None)] * LOGITS_ARGUMENTS)),
        code=_probe("logits_read(self, c4_indexer, fn, logits, {0}, {1}, {2}, {3}, {4}, {5}, {6}, {7})"),
    ),
    Hook(
        name="capture-begins",
        file=RUNNER,
        scope=("DecodeCudaGraphRunner", "capture_one_shape"),
        anchor="self.backend.capture_one(…)",
        match=_CAPTURE,
        code=_probe("capture_begins(self, {0})"),
        before=True,
    ),
    Hook(
        name="capture-ends",
        file=RUNNER,
        scope=("DecodeCudaGraphRunner", "capture_one_shape"),
        anchor="self.backend.capture_one(…)",
        match=_CAPTURE,
        code=_probe("capture_ends(self, {0})"),
    ),
    Hook(
        name="replay-begins",
        file=RUNNER,
        scope=("DecodeCudaGraphRunner", "execute"),
        anchor="output = self.backend.replay(…)",
        match=_REPLAY,
        code=_probe("replay_begins(self, {0}, forward_batch)"),
        before=True,
    ),
    Hook(
        name="replay-ends",
        file=RUNNER,
        scope=("DecodeCudaGraphRunner", "execute"),
        anchor="output = self.backend.replay(…)",
        match=_REPLAY,
        code=_probe("replay_ends(self, {0}, forward_batch)"),
    ),
)

HOOK_FILES: tuple[str, ...] = tuple(sorted({hook.file for hook in HOOKS}))


class _Remove(cst.CSTTransformer):
    """Drops every line that carries MARK."""

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> bool:
        return False  # lines as wholes: what is in them is of no interest, and much

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        comment = original_node.trailing_whitespace.comment
        ours = comment is not None and comment.value.startswith(MARK)
        return cst.RemoveFromParent() if ours else updated_node


class _Insert(cst.CSTTransformer):
    """Puts the hooks' lines around their anchors, in the order of HOOKS; looks only into `scopes`."""

    def __init__(self, scopes: set[str]) -> None:
        self.scopes = scopes
        self.depth = 0
        self.before: dict[cst.CSTNode, list[cst.SimpleStatementLine]] = {}
        self.after: dict[cst.CSTNode, list[cst.SimpleStatementLine]] = {}

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:
        return node.name.value in self.scopes

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        wanted = self.depth > 0 or node.name.value in self.scopes
        self.depth += wanted
        return wanted

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        self.depth -= self.depth > 0 and (self.depth > 1 or original_node.name.value in self.scopes)
        return updated_node

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> bool:
        return False

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.SimpleStatementLine]:
        before, after = self.before.get(original_node, []), self.after.get(original_node, [])
        return cst.FlattenSentinel([*before, updated_node, *after]) if before or after else updated_node


def _body(node: cst.CSTNode) -> Sequence[cst.CSTNode]:
    if isinstance(node, cst.Module):
        return node.body
    return node.body.body if isinstance(node, cst.ClassDef | cst.FunctionDef) else ()


def _places(module: cst.Module, hook: Hook) -> list[cst.SimpleStatementLine]:
    """The statements that look like the hook's anchor, inside its class and method."""
    scopes: list[cst.CSTNode] = [module]
    for name in hook.scope:
        scopes = [
            statement
            for scope in scopes
            for statement in _body(scope)
            if isinstance(statement, cst.ClassDef | cst.FunctionDef) and statement.name.value == name
        ]
    if hook.scope:
        found = [place for scope in scopes for place in m.findall(scope, hook.match)]
    else:
        found = [statement for statement in module.body if m.matches(statement, hook.match)]
    return cast("list[cst.SimpleStatementLine]", found)


def splice(
    source: bytes, file: str, version: str, hooks: Sequence[Hook] = HOOKS
) -> tuple[bytes, list[str], bool]:
    """Put the hooks for `file` in; returns the new source, the hooks' names, and whether some were there.

    Raises PatchError unless each anchor matches exactly once.
    """
    try:
        module = cst.parse_module(source)
    except (cst.ParserSyntaxError, UnicodeDecodeError) as error:
        raise PatchError(
            f"{file} of SGLang {version} is not Python that this controller can parse: {error}. "
            "Give the file as it came with its SGLang version, or mend the overlay."
        ) from error
    hooked = MARK.encode() in source
    clean = module.visit(_Remove()) if hooked else module
    insert = _Insert({name for hook in hooks for name in hook.scope})
    names = []
    for hook in hooks:
        if hook.file != file:
            continue
        found = _places(clean, hook)
        if len(found) != 1:
            raise PatchError(
                f"hook {hook.name}: {file} of SGLang {version} has {len(found)} places for the anchor "
                f"({hook.anchor}) in {'.'.join(hook.scope) or 'the module'}, expected exactly 1. This file "
                "is unlike any version from 0.5.14 to 0.5.23: check overlays and tree, or add this form of "
                "the anchor to patches/hooks.py."
            )
        lines = insert.before if hook.before else insert.after
        lines.setdefault(found[0], []).append(_line(hook, found[0], clean))
        names.append(hook.name)
    return clean.visit(insert).bytes, names, hooked


def _line(hook: Hook, anchor: cst.SimpleStatementLine, module: cst.Module) -> cst.SimpleStatementLine:
    code = hook.code
    if "{0}" in code:
        call = cst.ensure_type(getattr(anchor.body[0], "value", None), cst.Call)
        code = code.format(*(_one_line(module, argument.value) for argument in call.args))
    statement = cst.parse_statement(f"{code}  {MARK} {hook.name}\n", config=module.config_for_parsing)
    return cst.ensure_type(statement, cst.SimpleStatementLine)


def _one_line(module: cst.Module, node: cst.CSTNode) -> str:
    """An argument's own text on one line; a comment inside it would swallow the rest, so it is refused."""
    text = module.code_for_node(node)
    if "#" in text:
        raise PatchError(f"the argument {text!r} at an anchor holds a comment; expected a plain expression.")
    return " ".join(text.split())
