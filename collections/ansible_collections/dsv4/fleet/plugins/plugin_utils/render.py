"""Renders an operator's templates, as Ansible's own template module would."""

from __future__ import annotations

import os
import pathlib
import typing as t

from ansible.template import Templar, trust_as_template
from ansible_collections.dsv4.fleet.plugins.plugin_utils.flags import SettingError


def template(templar: Templar, path: str | os.PathLike[str], variables: t.Mapping[str, t.Any]) -> str:
    """The text that the template at *path* gives with *variables*; includes are looked for beside it.

    Raises:
        SettingError: when there is no such file, or it has carriage returns, which bash would take as part of a value.
    """
    source = pathlib.Path(path)
    if not source.is_file():
        raise SettingError(f"template: found no file {source}; expected one; correct sglang_serve_template")
    text = source.read_bytes().decode()
    if "\r" in text:
        raise SettingError(f"template {source}: found carriage returns; expected LF line ends only; convert the file")
    own = templar.copy_with_new_env(searchpath=[os.fspath(source.parent)], available_variables=dict(variables))
    return str(own.template(trust_as_template(text), escape_backslashes=False, overrides={"trim_blocks": True}))
