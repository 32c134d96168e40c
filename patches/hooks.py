"""The hooks: one-line calls into `dsv4_probe`, spliced into upstream files at anchors.

A hook only ever adds whole lines, each ending in MARK and its name. So a tree that already has
hooks, ours or an older version's, is recognised and cleaned by dropping those lines, and splicing
twice gives the same bytes as splicing once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import libcst as cst

from patches.errors import PatchError

MARK = "# dsv4-fleet hook:"


@dataclass(frozen=True)
class Hook:
    """One spliced line: `code` goes right after the only statement that `find` yields in `file`."""

    name: str
    file: str
    anchor: str
    find: Callable[[cst.Module], Iterator[cst.BaseStatement]]
    code: str


def _called_names(statement: cst.BaseStatement) -> Iterator[str]:
    """Names of plain functions that a statement of the form `name(...)` calls."""
    if not isinstance(statement, cst.SimpleStatementLine):
        return
    for small in statement.body:
        call = small.value if isinstance(small, cst.Expr) else None
        if isinstance(call, cst.Call) and isinstance(call.func, cst.Name):
            yield call.func.value


def _deprecated_names_handled(module: cst.Module) -> Iterator[cst.BaseStatement]:
    """The module's own call that renames deprecated variables: after it, every flag reads as it will."""
    for statement in module.body:
        if set(_called_names(statement)) & {"_handle_deprecated_envs", "_convert_SGL_to_SGLANG"}:
            yield statement


HOOKS: tuple[Hook, ...] = (
    Hook(
        name="passport",
        file="sglang/srt/environ.py",
        anchor="the module's call of _handle_deprecated_envs() or _convert_SGL_to_SGLANG()",
        find=_deprecated_names_handled,
        code="import dsv4_probe.passport; dsv4_probe.passport.write(globals())",
    ),
)

HOOK_FILES: tuple[str, ...] = tuple(sorted({hook.file for hook in HOOKS}))


class _Remove(cst.CSTTransformer):
    """Drops every line that carries MARK, and counts them."""

    def __init__(self) -> None:
        self.removed = 0

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        comment = original_node.trailing_whitespace.comment
        if comment is not None and comment.value.startswith(MARK):
            self.removed += 1
            return cst.RemoveFromParent()
        return updated_node


class _Insert(cst.CSTTransformer):
    """Puts the hooks' lines after their anchors, in the order of HOOKS."""

    def __init__(self, after: dict[cst.BaseStatement, list[cst.SimpleStatementLine]]) -> None:
        self.after = after

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        if isinstance(original_node, cst.BaseStatement) and original_node in self.after:
            return cst.FlattenSentinel([updated_node, *self.after[original_node]])
        return updated_node


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
    cleaner = _Remove()
    clean = module.visit(cleaner)
    after: dict[cst.BaseStatement, list[cst.SimpleStatementLine]] = {}
    names = []
    for hook in hooks:
        if hook.file != file:
            continue
        found = list(hook.find(clean))
        if len(found) != 1:
            raise PatchError(
                f"hook {hook.name}: {file} of SGLang {version} has {len(found)} places for the anchor "
                f"({hook.anchor}), expected exactly 1. This file is unlike any version from 0.5.14 to "
                "0.5.23: check overlays and tree, or add this form of the anchor to patches/hooks.py."
            )
        after.setdefault(found[0], []).append(_line(hook, clean))
        names.append(hook.name)
    return clean.visit(_Insert(after)).bytes, names, cleaner.removed > 0


def _line(hook: Hook, module: cst.Module) -> cst.SimpleStatementLine:
    statement = cst.parse_statement(f"{hook.code}  {MARK} {hook.name}\n", config=module.config_for_parsing)
    assert isinstance(statement, cst.SimpleStatementLine)
    return statement
