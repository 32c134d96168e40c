"""Feature flags: from whatever YAML or ``-e`` made of a boolean to the one right value, or an error that says where."""

from __future__ import annotations

import dataclasses
import typing as t

PREFIX = "dsv4_flag_"
TRUE_WORDS = frozenset({"true", "yes", "on", "1"})
FALSE_WORDS = frozenset({"false", "no", "off", "0"})
ALLOWED = "true or false (also yes/no, on/off, 1/0)"


class SettingError(ValueError):
    """A setting that cannot be taken as it is: says name, value, where it was set and what is allowed."""


@dataclasses.dataclass(frozen=True)
class Flag:
    """One row of the flags table in ``roles/sglang_serve/vars/main.yml``."""

    variable: str
    env: str
    default: bool
    instrument: str | None
    summary: str

    @property
    def short(self) -> str:
        """The name that overrides and reports use: the variable without its prefix."""
        return self.variable.removeprefix(PREFIX)


def table(rows: t.Iterable[t.Mapping[str, t.Any]]) -> list[Flag]:
    """The flags table as objects, in its own order."""
    return [
        Flag(str(row["variable"]), str(row["env"]), bool(row["default"]), row.get("instrument"), str(row["summary"]))
        for row in rows
    ]


def parse_bool(name: str, value: t.Any, where: str) -> bool:
    """The boolean that *value* stands for.

    Raises:
        SettingError: for anything but a YAML boolean, the integers 1 and 0, and the words of ``ALLOWED``. A blank
            value is an error too: SGLang reads an empty variable as its default, which may be on.
    """
    if isinstance(value, bool):
        return bool(value)
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str):
        word = value.lower()
        if word in TRUE_WORDS:
            return True
        if word in FALSE_WORDS:
            return False
    found = "nothing (null)" if value is None else f"{str(value)!r} ({type_name(value)})"
    raise SettingError(f"{name}: found {found}, set at {where}; expected {ALLOWED}; set one of these")


def type_name(value: t.Any) -> str:
    """The YAML word for the type of *value*."""
    for kind, word in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (dict, "mapping")):
        if isinstance(value, kind):
            return word
    return "list" if isinstance(value, (list, tuple)) else type(value).__name__


@dataclasses.dataclass(frozen=True)
class Effective:
    """The value of one flag on one worker, and which of the sources gave it."""

    value: bool
    source: str


@dataclasses.dataclass(frozen=True)
class Resolved:
    """All flags of one worker, the overrides that it will hold, and what a person should be told about them."""

    flags: dict[str, Effective]
    overrides: dict[str, dict[str, t.Any]]
    notes: list[str]

    def on(self, short: str) -> bool:
        """Whether the flag is on."""
        return self.flags[short].value


def resolve(
    rows: list[Flag],
    variables: t.Mapping[str, t.Any],
    where: t.Callable[[str], str],
    kept: t.Mapping[str, t.Mapping[str, t.Any]],
    wanted: t.Mapping[str, bool],
    clear: t.Collection[str],
    stamp: t.Mapping[str, str],
) -> Resolved:
    """Flags from the inventory, then from overrides that the worker holds, then from what this play wants.

    Args:
        variables: the host's variables, after Ansible's own precedence.
        where: tells where a variable was set.
        kept: overrides found on the worker: short name to value, since, by, why.
        wanted: this play's overrides: short name to value.
        clear: short names of overrides to drop, or ``all``.
        stamp: since, by and why of overrides made now.

    Raises:
        SettingError: all that is wrong with the variables, one line each.
    """
    known = {row.variable: row for row in rows}
    problems = [
        f"{name}: found a variable that begins with {PREFIX}, set at {where(name)}; expected one of "
        f"{', '.join(sorted(known))}; correct the name or remove it"
        for name in sorted(variables)
        if name.startswith(PREFIX) and name not in known
    ]
    shorts = {row.short for row in rows}
    for kind, names in (("override", wanted), ("override to clear", set(clear) - {"all"})):
        problems += [
            f"{kind} {name!r}: found no such flag; expected one of {', '.join(sorted(shorts))}"
            for name in sorted(set(names) - shorts)
        ]
    flags: dict[str, Effective] = {}
    overrides: dict[str, dict[str, t.Any]] = {}
    notes: list[str] = []
    for row in rows:
        inventory = Effective(row.default, "default")
        if row.variable in variables:
            try:
                value = parse_bool(row.variable, variables[row.variable], where(row.variable))
            except SettingError as error:
                problems.append(str(error))
                continue
            inventory = Effective(value, where(row.variable))
        held = kept.get(row.short)
        cleared = "all" in clear or row.short in clear
        flags[row.short] = inventory
        if row.short in wanted:
            value = wanted[row.short]
            flags[row.short] = Effective(value, "override")
            if value != inventory.value:
                same = held is not None and bool(held["value"]) == value
                overrides[row.short] = dict(t.cast(t.Mapping[str, t.Any], held)) if same else {"value": value, **stamp}
        elif held is not None and not cleared:
            value = bool(held["value"])
            told = f"{row.short}={int(value)} since {held['since']} by {held['by']} ({held['why']})"
            if value == inventory.value:
                notes.append(f"override dropped, the inventory says the same now: {told}")
            else:
                flags[row.short] = Effective(value, "override")
                overrides[row.short] = dict(held)
                notes.append(f"override kept: {told}; the inventory says {int(inventory.value)}")
    if problems:
        raise SettingError("\n".join(problems))
    return Resolved(flags, overrides, notes)
