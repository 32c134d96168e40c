"""The roles' interface: specs, defaults, tables and documents say the same thing."""

from __future__ import annotations

import configparser
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROLES = sorted(path.parents[1].name for path in ROOT.glob("roles/*/meta/argument_specs.yml"))
TYPES = {"str": str, "path": str, "int": int, "bool": bool, "list": list, "dict": dict}


def load(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def declared(role: str) -> dict[str, Any]:
    """Every input of a role with its default: defaults/main.yml, and the tables of sglang_serve."""
    defaults = dict(load(f"roles/{role}/defaults/main.yml"))
    if role == "sglang_serve":
        tables = load("roles/sglang_serve/vars/main.yml")
        for rows in tables.values():
            defaults.update({row["variable"]: row["default"] for row in rows})
    return defaults


def test_every_role_has_specs() -> None:
    assert sorted(path.name for path in (ROOT / "roles").iterdir()) == ROLES


@pytest.mark.parametrize("role", ROLES)
def test_specs_and_defaults_agree_in_name_type_and_value(role: str) -> None:
    options = load(f"roles/{role}/meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    defaults = declared(role)
    assert sorted(options) == sorted(defaults)
    for name, option in options.items():
        assert option["default"] == defaults[name], name
        assert option["description"], name
        kind = TYPES.get(option["type"])
        templated = isinstance(option["default"], str) and "{{" in option["default"]
        assert kind is None or templated or type(option["default"]) is kind, name


@pytest.mark.parametrize("role", ROLES)
def test_public_inputs_carry_the_roles_name(role: str) -> None:
    assert [name for name in load(f"roles/{role}/defaults/main.yml") if not name.startswith(f"{role}_")] == []


def test_what_is_made_from_the_specs_is_fresh() -> None:
    done = subprocess.run([sys.executable, ROOT / "docs/generate.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_both_configurations_say_the_same() -> None:
    # Playbooks work from the root and from playbooks/; Ansible reads the one in the working directory.
    found = []
    for path in (ROOT / "ansible.cfg", ROOT / "playbooks/ansible.cfg"):
        parser = configparser.ConfigParser(interpolation=None)
        parser.read(path)
        sections = {name: dict(parser[name]) for name in parser.sections()}
        for key in ("inventory", "roles_path", "collections_path"):
            sections["defaults"][key] = str((path.parent / sections["defaults"][key]).resolve())
        found.append(sections)
    assert found[0] == found[1]
    assert found[0]["defaults"]["duplicate_dict_key"] == "error"
