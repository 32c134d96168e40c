"""The roles' own argument specs, checked without a task of their own.

Ansible's check of a role's specs is one more host-task for each role and host, and does not say where a value was set.
"""

from __future__ import annotations

import pathlib
import typing as t

import yaml
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible_collections.dsv4.fleet.plugins.plugin_utils.flags import SettingError

ROLES = pathlib.Path(__file__).resolve().parents[6] / "roles"


def check(
    roles: t.Sequence[str],
    variables: t.Mapping[str, t.Any],
    finish: t.Callable[[t.Any], t.Any],
    where: t.Callable[[str], str],
) -> None:
    """Check each variable that a role's specs name.

    Args:
        finish: templates a value.
        where: tells where a variable was set.

    Raises:
        SettingError: one line for each variable that is not what its spec says.
    """
    problems = []
    for role in roles:
        text = (ROLES / role / "meta" / "argument_specs.yml").read_text(encoding="utf-8")
        options = yaml.load(text, Loader=yaml.CSafeLoader)["argument_specs"]["main"]["options"]
        for name, option in options.items():
            if name not in variables:
                continue
            # One by one, so that each message can say where its variable was set.
            result = ArgumentSpecValidator({name: _strip(option)}).validate({name: finish(variables[name])})
            problems += [f"{text}; set at {where(name)}; expected type {option['type']}" for text in result.error_messages]
    if problems:
        raise SettingError("\n".join(problems))


def _strip(option: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """The part of a role's option that a module's specs know."""
    kept = {name: value for name, value in option.items() if name in ("type", "elements", "choices", "required")}
    if "options" in option:
        kept["options"] = {name: _strip(inner) for name, inner in option["options"].items()}
    return kept
