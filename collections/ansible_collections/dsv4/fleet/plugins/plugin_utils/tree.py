# Copyright: the dsv4-fleet authors
# Apache-2.0
"""What an SGLang tree itself declares: environment variables and launch arguments.

Everything is read from source text with `ast`; nothing of SGLang is imported or run. A form that is
not understood is a TreeError that names file and line, never a guess: a check against half a list
would refuse good arguments, or let bad ones through.
"""

from __future__ import annotations

import ast
import difflib
import fnmatch
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ENVIRON_FILE = "sglang/srt/environ.py"

ARGUMENT_FILES: tuple[str, ...] = (
    "sglang/srt/server_args.py",
    "sglang/srt/arg_groups/*.py",
    "sglang/srt/arg_groups/fields/*.py",
)
"""The files, as patterns relative to the tree, that together declare every launch argument."""

_NAME = re.compile(r"\b(?:SGLANG|SGL)_[A-Z0-9_]+\b")


class TreeError(Exception):
    """The tree's own declarations cannot be read; names file and line."""


@dataclass(frozen=True)
class EnvVar:
    """A variable that environ.py declares. `default` is None where it is computed at run time."""

    type: str
    default: Any
    computed: bool = False


@dataclass(frozen=True)
class Argument:
    """One launch argument under one of its spellings.

    takes: "none", "one", "optional" (0 or 1), "any" (0 or more), "many" (1 or more), or a count as text.
    kind: "bool", "int", "float", "str", or "other" where the tree parses the value by a function.
    choices: allowed values, or None; `open_choices` means that plugins may add to them.
    deprecated: None, or what to use instead.
    dest: the setting; two spellings of one setting share it.
    """

    takes: str
    kind: str
    dest: str
    choices: tuple[str, ...] | None = None
    open_choices: bool = False
    deprecated: str | None = None
    required: bool = False

    @property
    def takes_value(self) -> bool:
        """Whether at least one value must follow."""
        return self.takes not in ("none", "optional", "any")


@dataclass(frozen=True)
class Problem:
    """Something wrong with what is to be set. `severity` is "error" or "warning"."""

    severity: str
    name: str
    text: str


def names_in(source: str) -> set[str]:
    """Every identifier SGLANG_* or SGL_* in a file's text."""
    return set(_NAME.findall(source))


# ---------------------------------------------------------------------------------------------
# What environ.py declares


def declared_env(source: str, file: str = ENVIRON_FILE) -> dict[str, EnvVar]:
    """Variables that the class `Envs` of environ.py declares, by name."""
    module = _parse(source, file)
    classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
    if "Envs" not in classes:
        raise TreeError(f"{file} has no class Envs, which declares SGLang's environment variables.")
    declared: dict[str, EnvVar] = {}
    for node in classes["Envs"].body:
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        if not isinstance(node, ast.Assign) or not isinstance(target, ast.Name):
            continue
        if not isinstance(node.value, ast.Call) or not isinstance(node.value.func, ast.Name):
            continue
        kind = _env_type(node.value.func.id, classes)
        if kind is None:
            continue
        default = node.value.args[0] if node.value.args else _keyword(node.value, "default")
        try:
            declared[target.id] = EnvVar(kind, ast.literal_eval(default) if default is not None else None)
        except ValueError:
            declared[target.id] = EnvVar(kind, None, computed=True)
    if not declared:
        raise TreeError(f"{file}: the class Envs declares no variable in a form that is known here.")
    return declared


def _env_type(name: str, classes: Mapping[str, ast.ClassDef]) -> str | None:
    """`EnvBoolWithAlias` -> "bool": the nearest ancestor that itself derives from EnvField."""
    if name not in classes:
        return None
    bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name)]
    if "EnvField" in bases:
        return name.removeprefix("Env").lower()
    return next((kind for base in bases if (kind := _env_type(base, classes)) is not None), None)


# ---------------------------------------------------------------------------------------------
# What the parser declares


def launch_arguments(files: Mapping[str, str]) -> dict[str, Argument]:
    """Every spelling of every launch argument, with its two dashes.

    files: contents by path relative to the tree, at least those that match ARGUMENT_FILES.
    """
    modules = {
        rel: _parse(text, rel)
        for rel, text in sorted(files.items())
        if any(fnmatch.fnmatch(rel, pattern) for pattern in ARGUMENT_FILES)
    }
    if ARGUMENT_FILES[0] not in modules:
        raise TreeError(f"{ARGUMENT_FILES[0]} is missing; it declares the launch arguments.")
    reader = _Reader(modules)
    arguments: dict[str, Argument] = {"-h": _HELP, "--help": _HELP}
    for rel, module in modules.items():
        for node in module.body:
            if isinstance(node, ast.ClassDef) and _is_record(node):
                for spelling, argument in reader.fields(rel, node):
                    _add(arguments, spelling, argument, rel, node.lineno)
    for rel, function in reader.registrations():
        for spelling, argument in reader.calls(rel, function):
            _add(arguments, spelling, argument, rel, function.lineno)
    if len(arguments) == 2:
        raise TreeError(f"{', '.join(modules)} declare no launch argument in a form that is known here.")
    return arguments


_HELP = Argument("none", "bool", "help")


def _add(arguments: dict[str, Argument], spelling: str, argument: Argument, rel: str, line: int) -> None:
    if spelling in arguments:
        raise TreeError(f"{rel}:{line}: {spelling} is declared twice; argparse would refuse it.")
    arguments[spelling] = argument


def _is_record(node: ast.ClassDef) -> bool:
    """ServerArgs itself, or a namespace class that ServerArgs is put together from."""
    return node.name == "ServerArgs" or any(
        isinstance(item, ast.Assign)
        and isinstance(item.targets[0], ast.Name)
        and item.targets[0].id == "_NS_PATH"
        for item in node.body
    )


@dataclass
class _Reader:
    """Reads declarations, resolving names of constants over all given modules."""

    modules: dict[str, ast.Module]
    constants: dict[str, ast.expr] = field(default_factory=dict)
    actions: dict[str, ast.ClassDef] = field(default_factory=dict)
    extended: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for module in self.modules.values():
            for node in module.body:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    self.constants.setdefault(node.targets[0].id, node.value)
                elif isinstance(node, ast.ClassDef):
                    self.actions.setdefault(node.name, node)
            for call in ast.walk(module):
                method = call.func if isinstance(call, ast.Call) else None
                if isinstance(method, ast.Attribute) and method.attr in ("extend", "append"):
                    self.extended.add(ast.unparse(method.value))

    # Fields: name: A[type, "help"] or A[type, Arg(...)]

    def fields(self, rel: str, record: ast.ClassDef) -> Iterator[tuple[str, Argument]]:
        """Spellings that a record class's annotated fields declare."""
        # A field written twice is one field of the class; the later line wins (0.5.15 does it).
        found = {
            node.target.id: node
            for node in record.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        for name, node in found.items():
            annotation = node.annotation
            if not isinstance(annotation, ast.Subscript) or _last_name(annotation.value) not in (
                "A",
                "Annotated",
            ):
                continue
            if not isinstance(annotation.slice, ast.Tuple):
                continue
            kind, *metadata = annotation.slice.elts
            yield from self._field(rel, name, kind, metadata, node.value is None)

    def _field(
        self, rel: str, name: str, kind: ast.expr, metadata: Sequence[ast.expr], mandatory: bool
    ) -> Iterator[tuple[str, Argument]]:
        arg: ast.Call | None = None
        for item in metadata:
            if isinstance(item, ast.Call) and _last_name(item.func) == "Arg":
                arg = item
                break
            if _is_text(item):
                break
        else:
            return
        spellings = [f"--{name.replace('_', '-')}"]
        if arg is not None:
            if self._literal(rel, _keyword(arg, "no_cli"), False):
                return
            spellings[0] = self._literal(rel, _keyword(arg, "cli_name"), None) or spellings[0]
            spellings += self._literal(rel, _keyword(arg, "aliases"), None) or []
        inner = _without_none(kind)
        action = _keyword(arg, "action") if arg is not None else None
        if action is not None and arg is not None:
            extra = _keyword(arg, "action_kwargs")
            pairs = zip(extra.keys, extra.values, strict=True) if isinstance(extra, ast.Dict) else ()
            keywords = {self._literal(rel, key, ""): value for key, value in pairs}
            yield from self._with_action(rel, action, spellings, name, keywords, None)
            return
        parser = _keyword(arg, "type_parser") if arg is not None else None
        choices_node = _keyword(arg, "choices") if arg is not None else None
        nargs = self._literal(rel, _keyword(arg, "nargs"), None) if arg is not None else None
        required = mandatory
        if arg is not None and _keyword(arg, "required") is not None:
            required = bool(self._literal(rel, _keyword(arg, "required"), False))
        text, takes = _kind_of(inner), _takes(nargs)
        if isinstance(inner, ast.Subscript) and _last_name(inner.value) == "Literal":
            values = inner.slice.elts if isinstance(inner.slice, ast.Tuple) else [inner.slice]
            choices_node = choices_node or ast.List(elts=values)
            first = values[0].value if isinstance(values[0], ast.Constant) else ""
            text = type(first).__name__
            takes, required = "one", False
        elif (
            isinstance(inner, ast.Subscript)
            and _last_name(inner.value) in ("list", "List")
            and parser is None
        ):
            text = _kind_of(inner.slice)
            takes, required = _takes(nargs or "+"), False
        elif text == "bool":
            takes, required, choices_node = "none", False, None
        if parser is not None:
            text = "other"
        choices, open_choices = self._choices(choices_node)
        argument = Argument(takes, text, name, choices, open_choices, required=required)
        for spelling in spellings:
            yield spelling, argument

    # Calls: parser.add_argument(...) in ServerArgs.add_cli_args

    def registrations(self) -> Iterator[tuple[str, ast.FunctionDef]]:
        """Methods `add_cli_args` of the given modules' record classes."""
        for rel, module in self.modules.items():
            for node in ast.walk(module):
                if isinstance(node, ast.ClassDef) and _is_record(node):
                    for item in node.body:
                        if isinstance(item, ast.FunctionDef) and item.name == "add_cli_args":
                            yield rel, item

    def calls(self, rel: str, function: ast.FunctionDef) -> Iterator[tuple[str, Argument]]:
        """Spellings that explicit add_argument calls declare."""
        for node in ast.walk(function):
            if not isinstance(node, ast.Call) or _last_name(node.func) != "add_argument":
                continue
            spellings = [text for item in node.args if (text := _text(item)) is not None]
            if len(spellings) != len(node.args) or not all(item.startswith("-") for item in spellings):
                raise TreeError(
                    f"{rel}:{node.lineno}: an argument whose name is not written out; expected text."
                )
            keywords = {item.arg: item.value for item in node.keywords if item.arg}
            dest = self._literal(rel, keywords.get("dest"), None)
            dest = dest or spellings[0].lstrip("-").replace("-", "_")
            said = _text(keywords["help"]) if "help" in keywords else None
            deprecated = said if re.match(r"\W*deprecated\b", said or "", re.IGNORECASE) else None
            yield from self._with_action(
                rel, keywords.get("action") or ast.Constant("store"), spellings, dest, keywords, deprecated
            )

    def _with_action(
        self,
        rel: str,
        action: ast.expr,
        spellings: Sequence[str],
        dest: str,
        keywords: Mapping[str, ast.expr],
        deprecated: str | None,
    ) -> Iterator[tuple[str, Argument]]:
        """Spellings under an action; what it takes is the action's own default unless nargs is given."""
        name = action.value if isinstance(action, ast.Constant) else _last_name(action)
        choices, open_choices = self._choices(keywords.get("choices"))
        kind = _kind_of(keywords["type"]) if "type" in keywords else "str"
        if name in ("store_true", "store_false", "store_const", "count", "BooleanOptionalAction"):
            takes, kind = "none", "bool"
        elif name in ("store", "append", "extend"):
            takes = "one"
        elif name in self.actions:
            takes = _takes(self._action_nargs(rel, self.actions[name]))
        else:
            raise TreeError(
                f"{rel}:{action.lineno}: {spellings[0]} has the action {name!r}, which is not known here."
            )
        if "nargs" in keywords:
            takes = _takes(self._literal(rel, keywords["nargs"], None))
        if takes == "none":
            kind, choices = "bool", None
        if isinstance(name, str) and name.startswith("Deprecated"):
            new = keywords.get("new_flag")
            deprecated = (
                f"use {_text(new)}" if new is not None else deprecated
            ) or "it has no effect any more"
        required = bool(self._literal(rel, keywords.get("required"), False))
        argument = Argument(takes, kind, dest, choices, open_choices, deprecated, required)
        for spelling in spellings:
            yield spelling, argument
            if name == "BooleanOptionalAction" and spelling.startswith("--"):
                yield f"--no-{spelling[2:]}", argument

    def _action_nargs(self, rel: str, action: ast.ClassDef) -> Any:
        """The default of the action class's own `nargs` parameter; None (one value) where it has none."""
        for node in action.body:
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                names = [argument.arg for argument in node.args.args]
                defaults = dict(zip(reversed(names), reversed(node.args.defaults), strict=False))
                return self._literal(rel, defaults.get("nargs"), None)
        return None

    # Values

    def _choices(self, node: ast.expr | None) -> tuple[tuple[str, ...] | None, bool]:
        """Allowed values where they are written out, and whether plugins may add to them."""
        if node is None:
            return None, False
        name = node.id if isinstance(node, ast.Name) else None
        try:
            values = self._evaluate(node)
        except ValueError:
            return None, False
        return tuple(str(value) for value in values), name in self.extended

    def _evaluate(self, node: ast.expr, depth: int = 0) -> list[Any]:
        """A list of constants, through names and sums of them; ValueError if it is anything else."""
        if depth > 8:
            raise ValueError
        if isinstance(node, ast.Name) and node.id in self.constants:
            return self._evaluate(self.constants[node.id], depth + 1)
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            values: list[Any] = []
            for item in node.elts:
                if isinstance(item, ast.Starred):
                    values += self._evaluate(item.value, depth + 1)
                else:
                    values.append(ast.literal_eval(item))
            return values
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._evaluate(node.left, depth + 1) + self._evaluate(node.right, depth + 1)
        raise ValueError

    def _literal(self, rel: str, node: ast.expr | None, default: Any) -> Any:
        if node is None:
            return default
        try:
            return ast.literal_eval(node)
        except ValueError as error:
            raise TreeError(
                f"{rel}:{node.lineno}: found {ast.unparse(node)}; expected a value written out."
            ) from error


def _parse(source: str, file: str) -> ast.Module:
    try:
        return ast.parse(source, filename=file)
    except (SyntaxError, ValueError) as error:
        raise TreeError(f"{file} is not Python that this controller can parse: {error}.") from error


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((item.value for item in call.keywords if item.arg == name), None)


def _last_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _is_text(node: ast.expr) -> bool:
    return _text(node) is not None


def _text(node: ast.expr) -> str | None:
    """A string, also an f-string or a sum of strings; parts that are computed are left out."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(item.value) for item in node.values if isinstance(item, ast.Constant))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return None if left is None or right is None else left + right
    return None


def _without_none(node: ast.expr) -> ast.expr:
    """`Optional[X]` and `X | None` -> X, where only one other type is named."""
    if isinstance(node, ast.Subscript) and _last_name(node.value) == "Optional":
        return node.slice
    parts: list[ast.expr] = []
    if isinstance(node, ast.Subscript) and _last_name(node.value) == "Union":
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        stack: list[ast.expr] = [node]
        while stack:
            item = stack.pop()
            if isinstance(item, ast.BinOp) and isinstance(item.op, ast.BitOr):
                stack += [item.left, item.right]
            else:
                parts.append(item)
    others = [item for item in parts if not (isinstance(item, ast.Constant) and item.value is None)]
    return others[0] if len(others) == 1 else node


def _kind_of(node: ast.expr) -> str:
    name = _last_name(node)
    if name in ("bool", "int", "float", "str"):
        return name
    # argparse gets `str` for a type that it does not know, and a parsing function as it stands.
    return "str" if isinstance(node, ast.Subscript) else "other"


def _takes(nargs: Any) -> str:
    if nargs == 0:
        return "none"
    return {None: "one", "?": "optional", "*": "any", "+": "many"}.get(nargs, str(nargs))


# ---------------------------------------------------------------------------------------------
# Checks


def check_launch_arguments(arguments: Sequence[str], declared: Mapping[str, Argument]) -> list[Problem]:
    """Judge what follows `python3 -m sglang.launch_server`, one item of argv each, as argparse would read it.

    Stricter than argparse where it would silently do something else: abbreviations, and a setting
    given twice.
    """
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    position = 0
    while position < len(arguments):
        token = arguments[position]
        position += 1
        if _is_value(token, declared):
            problems.append(
                Problem(
                    "error",
                    token,
                    f"found the value {token!r} where an argument was expected; the one "
                    "before it takes no more values.",
                )
            )
            continue
        name, equals, attached = token.partition("=")
        values = [attached] if equals else []
        argument = declared.get(name)
        if argument is None:
            problems.append(_undeclared(name, declared))
            while position < len(arguments) and _is_value(arguments[position], declared):
                position += 1
            continue
        if not equals:
            most = _most(argument.takes)
            while (
                position < len(arguments) and len(values) < most and _is_value(arguments[position], declared)
            ):
                values.append(arguments[position])
                position += 1
        problems += _check_one(name, argument, values, bool(equals))
        if argument.dest in seen:
            problems.append(
                Problem(
                    "error",
                    name,
                    f"{name} sets again what {seen[argument.dest]} has set; the last would win "
                    "silently. Keep one.",
                )
            )
        seen[argument.dest] = name
    if "config" not in seen:
        for name, argument in declared.items():
            if argument.required and argument.dest not in seen:
                seen[argument.dest] = name
                problems.append(
                    Problem("error", name, f"{name} is missing; the server does not start without it.")
                )
    return problems


def _check_one(name: str, argument: Argument, values: Sequence[str], attached: bool) -> Iterator[Problem]:
    if argument.dest == "help":
        yield Problem("error", name, f"{name} prints the help and ends; no server would start. Remove it.")
        return
    if argument.deprecated is not None:
        yield Problem("warning", name, f"{name} is deprecated in this SGLang version: {argument.deprecated}")
    if argument.takes == "none" and attached:
        yield Problem("error", name, f"{name} takes no value, found {values[0]!r}. Give {name} alone.")
        return
    least = 1 if argument.takes in ("one", "many") else int(argument.takes) if argument.takes.isdigit() else 0
    if len(values) < least:
        yield Problem(
            "error",
            name,
            f"{name} needs {'a value' if least == 1 else f'{least} values'}, found {len(values)}.",
        )
        return
    for value in values:
        if argument.kind in ("int", "float"):
            try:
                int(value) if argument.kind == "int" else float(value)
            except ValueError:
                wanted = "a whole number" if argument.kind == "int" else "a number"
                yield Problem("error", name, f"{name} needs {wanted}, found {value!r}.")
                continue
        if argument.choices is not None and not _chosen(value, argument):
            severity = "warning" if argument.open_choices else "error"
            yield Problem(
                severity,
                name,
                f"{name} is {value!r}; this SGLang version knows {', '.join(argument.choices)}.",
            )


def _chosen(value: str, argument: Argument) -> bool:
    choices = argument.choices or ()
    return (str(int(value)) if argument.kind == "int" else value) in choices


def _most(takes: str) -> float:
    if takes in ("any", "many"):
        return float("inf")
    return int(takes) if takes.isdigit() else 0 if takes == "none" else 1


def _is_value(token: str, declared: Mapping[str, Argument]) -> bool:
    """Whether argparse takes an item of argv for a value, not for an argument's name."""
    if not token.startswith("-") or token in declared or len(token) == 1:
        return not token.startswith("-") or len(token) == 1
    if token.partition("=")[0] in declared or _candidates(token, declared):
        return False
    return bool(re.fullmatch(r"-\d+|-\d*\.\d+", token)) or " " in token


def _candidates(name: str, declared: Mapping[str, Argument]) -> list[str]:
    """Spellings that argparse would take `name` for an abbreviation of."""
    stem = name.partition("=")[0]
    return (
        sorted(spelling for spelling in declared if spelling.startswith(stem))
        if stem.startswith("--")
        else []
    )


def _undeclared(name: str, declared: Mapping[str, Argument]) -> Problem:
    candidates = _candidates(name, declared)
    if name == "--":
        return Problem(
            "error", name, "'--' ends the arguments; the server takes nothing after it. Remove it."
        )
    if len(candidates) > 1:
        return Problem(
            "error",
            name,
            f"{name} is not an argument of this SGLang version and is ambiguous: it could be "
            f"{', '.join(candidates)}. Write the one that is meant.",
        )
    if candidates:
        return Problem(
            "error",
            name,
            f"{name} is an abbreviation of {candidates[0]}, which the next version may make "
            f"ambiguous. Write {candidates[0]}.",
        )
    close = difflib.get_close_matches(name, declared, n=3)
    hint = f" Close to it: {', '.join(close)}." if close else ""
    return Problem("error", name, f"{name} is not an argument of this SGLang version.{hint}")


def check_environment(
    values: Mapping[str, str], declared: Mapping[str, EnvVar], names_read: Iterable[str]
) -> list[Problem]:
    """Judge variables that are to be exported, by name, as the shell will export them.

    names_read: every SGLANG_* and SGL_* name in the tree, its overlays and our own package.
    """
    read = set(names_read) | set(declared)
    problems: list[Problem] = []
    for name, value in values.items():
        hidden = _hidden(name)
        if hidden:
            problems.append(Problem("error", name, f"the name {name!r} holds {hidden}. Type the name again."))
            continue
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            problems.append(
                Problem("error", name, f"{name!r} is no name for a variable; expected letters, digits and _.")
            )
            continue
        if hidden := _hidden(value):
            problems.append(
                Problem("error", name, f"the value of {name}, {value!r}, holds {hidden}. Type it again.")
            )
            continue
        problems += _check_name(name, read)
        if name in declared:
            problems += _check_value(name, value, declared[name].type)
    return problems


def _check_name(name: str, read: set[str]) -> Iterator[Problem]:
    if name.upper().startswith("SGL_"):
        yield Problem(
            "error",
            name,
            f"{name}: SGLang copies SGL_* over SGLANG_* at import, so it would overrule "
            f"SGLANG_{name[4:].upper()}. Set that one instead.",
        )
    elif name.upper().startswith("SGLANG_") and name not in read:
        close = difflib.get_close_matches(name.upper(), sorted(read), n=3, cutoff=0.8)
        hint = (
            f" Close to it: {', '.join(close)}." if close else " Remove it, or deploy the file that reads it."
        )
        yield Problem("error", name, f"{name}: nothing in the tree reads it, so it would do nothing.{hint}")


def _check_value(name: str, value: str, kind: str) -> Iterator[Problem]:
    wrong = None
    if kind == "bool":
        if value not in ("0", "1"):
            wrong = "expected 1 or 0 (SGLang takes what it does not understand for the default)"
    elif kind == "int":
        if not re.fullmatch(r"[+-]?\d+", value):
            wrong = "expected a whole number"
    elif kind == "float":
        try:
            float(value)
        except ValueError:
            wrong = "expected a number"
        else:
            if value != value.strip() or "_" in value:
                wrong = "expected a number, written plainly"
    elif kind == "json" and value.lstrip()[:1] in ("{", "["):
        try:
            json.loads(value)
        except ValueError as error:
            wrong = f"expected JSON ({error})"
    if wrong:
        yield Problem("error", name, f"{name} is {value!r}; {wrong}.")


def _hidden(text: str) -> str | None:
    """Names the first character that a reader does not see, or None."""
    for character in text:
        category = unicodedata.category(character)
        if (category[0] == "C" or category in ("Zl", "Zp", "Zs")) and character != " ":
            called = unicodedata.name(character, "a control character")
            return f"an invisible character (U+{ord(character):04X}, {called})"
    return None
