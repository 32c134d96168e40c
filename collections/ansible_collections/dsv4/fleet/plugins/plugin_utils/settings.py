"""Inputs that are not flags: launch arguments, extra environment variables, words of a command."""

from __future__ import annotations

import pathlib
import re
import typing as t
import unicodedata

from ansible_collections.dsv4.fleet.plugins.plugin_utils.flags import SettingError, parse_bool, type_name

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
SECRET_ARGUMENTS = frozenset({"--api-key", "--admin-api-key"})
Where = t.Callable[[t.Any, str], str]
"""Tells where a value was set: (value, fallback name) to ``path:line:column`` or a description."""


def invisible(text: str) -> str | None:
    """The first character of *text* that a reader cannot see, named; None where there is none.

    A tab, a no-break space, a zero-width joiner and a carriage return all count: SGLang compares values unstripped.
    """
    for character in text:
        category = unicodedata.category(character)
        if category in {"Cc", "Cf", "Zl", "Zp"} or (category == "Zs" and character != " "):
            return f"U+{ord(character):04X} {unicodedata.name(character, 'control character')}"
    return None


def literal(value: t.Any, name: str, where: str) -> str:
    """The text of one scalar, as it was written.

    YAML 1.1 reads 010 as 8 and 1:30 as 90. Where the source line is known, it is read again, and a number whose text
    is not its value is refused.

    Raises:
        SettingError: for nulls, lists, mappings, invisible characters and numbers that YAML has changed.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        written = _written(where)
        if written is not None and written != str(value):
            raise SettingError(
                f"{name}: found {written} in {where}, which YAML reads as the number {value}; expected text that means "
                f"one thing; write '{written}' in quotes, or {value}"
            )
        return str(value)
    if isinstance(value, str):
        hidden = invisible(value)
        if hidden is not None:
            raise SettingError(
                f"{name}: found the invisible character {hidden} in {str(value)!r}, set at {where}; "
                "expected visible characters and plain spaces; remove it"
            )
        return str(value)
    found = "nothing (null)" if value is None else f"a {type_name(value)}"
    raise SettingError(f"{name}: found {found}, set at {where}; expected one text or number; set it or remove the entry")


def _written(where: str) -> str | None:
    """The plain scalar at ``path:line:column``; None where it cannot be read again."""
    match = re.fullmatch(r"(/.+?):(\d+):(\d+)", where)
    if match is None:
        return None
    path, line, column = match[1], int(match[2]), int(match[3])
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8").splitlines()[line - 1][column - 1 :]
    except (OSError, IndexError, UnicodeDecodeError):
        return None
    found = re.match(r"[-+]?[0-9][0-9_:.eE+-]*", text)
    return found[0] if found else None


def launch_arguments(items: t.Any, where: Where) -> list[str]:
    """The command-line words of a typed list.

    An entry is a switch (``--trust-remote-code``) or a mapping of one option to one value or a list of values
    (``--tp: 4``).

    Raises:
        SettingError: for every entry of another shape, one line each.
    """
    name = "sglang_serve_arguments"
    if not isinstance(items, (list, tuple)):
        raise SettingError(f"{name}: found a {type_name(items)}; expected a list such as [--trust-remote-code, {{--tp: 4}}]")
    words: list[str] = []
    problems: list[str] = []
    for number, item in enumerate(items, 1):
        label = f"{name}[{number}]"
        place = where(item, name)
        if isinstance(item, str) and item.startswith("--") and " " not in item and "=" not in item:
            words.append(str(item))
            continue
        if not isinstance(item, dict) or len(item) != 1:
            shown = str(item) if isinstance(item, str) else f"a {type_name(item)}"
            problems.append(
                f"{label}: found {shown!r}, set at {place}; expected a switch such as --trust-remote-code, "
                "or one option with its value, such as --tp: 4"
            )
            continue
        ((option, value),) = item.items()
        label = f"{name} {option}"
        if not isinstance(option, str) or not option.startswith("--"):
            problems.append(f"{label}: found the option {option!r}, set at {place}; expected a name that begins with --")
            continue
        if option in SECRET_ARGUMENTS:
            problems.append(
                f"{label}: found a secret among the launch arguments, set at {place}, where every process list shows "
                f"it; expected it in sglang_serve_secret_arguments; move it there"
            )
            continue
        words.append(str(option))
        for one in value if isinstance(value, (list, tuple)) else [value]:
            try:
                words.append(literal(one, label, where(one, name)))
            except SettingError as error:
                problems.append(str(error))
    if problems:
        raise SettingError("\n".join(problems))
    return words


def environment(items: t.Any, name: str, reserved: t.Collection[str], where: Where) -> dict[str, str]:
    """Names and values of extra environment variables.

    Booleans become 1 and 0. *reserved* names belong to the flags table or to the serve script itself.

    Raises:
        SettingError: for every entry that cannot be taken, one line each.
    """
    if not isinstance(items, dict):
        raise SettingError(f"{name}: found a {type_name(items)}; expected a mapping of names to values")
    result: dict[str, str] = {}
    problems: list[str] = []
    for key, value in items.items():
        label = f"{name}.{key}"
        place = where(value, name)
        if not isinstance(key, str) or not NAME.match(key):
            problems.append(f"{label}: found a name that no shell can export, set at {place}; expected letters, digits and _")
        elif key.startswith("SGL_"):
            problems.append(
                f"{label}: found a legacy SGL_ name, set at {place}; SGLang copies it over the SGLANG_ variable; "
                f"expected SGLANG_{key.removeprefix('SGL_')}; rename it"
            )
        elif key in reserved or key.startswith("DSV4_FLEET_"):
            problems.append(f"{label}: found a name that the serve script sets itself, set at {place}; remove it here")
        else:
            try:
                text = literal(value, label, place)
                result[str(key)] = {"true": "1", "false": "0"}[text] if isinstance(value, bool) else text
            except SettingError as error:
                problems.append(str(error))
    if problems:
        raise SettingError("\n".join(problems))
    return result


def secrets(items: t.Any, name: str, where: Where) -> dict[str, str]:
    """Names and values of secrets. No message repeats a value.

    Raises:
        SettingError: for values that are empty, not text, or hold invisible characters, one line each.
    """
    if not isinstance(items, dict):
        raise SettingError(f"{name}: found a {type_name(items)}; expected a mapping of names to values")
    problems: list[str] = []
    for key, value in items.items():
        found = "nothing" if value in (None, "") else None if isinstance(value, str) else f"a {type_name(value)}"
        if found is None and invisible(value) is not None:
            found = f"the invisible character {invisible(value)}"
        if found is not None:
            problems.append(f"{name}.{key}: found {found}, set at {where(value, name)}; expected the secret as text")
    if problems:
        raise SettingError("\n".join(problems))
    return {str(key): str(value) for key, value in items.items()}


def words(value: t.Any, name: str, where: Where) -> list[str]:
    """The words of a command, from a list or from one plain string without quotes or shell characters."""
    place = where(value, name)
    if isinstance(value, str):
        if not value.strip() or re.search(r"[^A-Za-z0-9_./ :=@+-]", value):
            raise SettingError(f"{name}: found {str(value)!r}, set at {place}; expected a list of words, as this needs a shell")
        return value.split()
    if isinstance(value, (list, tuple)) and value:
        return [literal(word, name, where(word, name)) for word in value]
    raise SettingError(f"{name}: found a {type_name(value)}, set at {place}; expected a list of words")


def consent(variables: t.Mapping[str, t.Any], name: str, default: bool, where: Where) -> bool:
    """A boolean that is not a flag, by the same rules as a flag."""
    return parse_bool(name, variables[name], where(variables[name], name)) if name in variables else default
