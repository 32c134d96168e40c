"""Where a variable was set, from the tags that ansible-core 2.19 keeps on every value that it loads."""

from __future__ import annotations

import typing as t

# The one private name that we use: there is no public way to read a tag. tests/unit/plugins checks that it works.
from ansible._internal._datatag._tags import Origin


def of(value: t.Any, fallback: str) -> str:
    """``path:line:column`` or Ansible's own description of the source; *fallback* for values that carry no tag."""
    origin = Origin.get_tag(value)
    return fallback if origin is None else str(origin)


class Finder:
    """Tells where the variables of one host were set."""

    def __init__(self, variables: t.Mapping[str, t.Any]) -> None:
        self._variables = variables
        self._names: dict[str, t.Any] | None = None

    def variable(self, name: str) -> str:
        """Where *name* was set. Booleans and null carry no tag themselves; the name does."""
        value = self._variables.get(name)
        place = of(value, "")
        if not place:
            if self._names is None:
                self._names = {str(key): key for key in self._variables}
            place = of(self._names.get(name, name), "")
        return place or "an unknown place (a role default, a fact or a task)"

    def value(self, value: t.Any, name: str) -> str:
        """Where *value* was set; else where the variable that holds it was."""
        return of(value, "") or self.variable(name)
