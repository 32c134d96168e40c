"""Compares the whole fleet with what a play wants of it, once, on the controller."""

from __future__ import annotations

import typing as t

from ansible import constants
from ansible.plugins.action import ActionBase
from ansible.release import __version__ as ansible_version
from ansible.utils.display import Display
from ansible_collections.dsv4.fleet.plugins.plugin_utils import fleet
from ansible_collections.dsv4.fleet.plugins.plugin_utils.flags import SettingError, parse_bool

display = Display()


class ActionModule(ActionBase):
    """See the module of the same name for its documentation."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        """Fails with every problem found, one a line; else returns ``plan``, a line per worker."""
        result = super().run(tmp, task_vars)
        args = self._task.args
        variables = task_vars or {}
        tested = [str(version) for version in args["tested_ansible"]]
        if not any(ansible_version.startswith(f"{version}.") for version in tested):
            display.warning(
                f"ansible-core {ansible_version} is not a tested version (tested: {', '.join(tested)}); what follows may differ"
            )
        answers = args["inspected"]
        inspected = {host: one["dsv4"] for host, one in answers.items() if "reasons" in (one or {}).get("dsv4", {})}
        try:
            partial = parse_bool("dsv4_partial", args["partial"], "the command line")
        except SettingError as error:
            return {**result, "failed": True, "msg": str(error)}
        hosts, left_out = self._hosts(str(args["target"]), variables)
        wanted = fleet.Wanted(
            target=str(args["target"]),
            hosts=hosts,
            left_out=left_out,
            whole=bool(args["whole"]) and not partial,
            waves=args["waves"],
            at_once=args["at_once"],
            min_admitted=int(args["min_admitted"]),
            acknowledge=args["acknowledge"],
            retry_state=str(args["retry_state"]),
        )
        found = fleet.problems(wanted, inspected)
        if constants.config.get_config_value("DUPLICATE_YAML_DICT_KEY") != "error":
            found.append(
                "ansible.cfg: found duplicate_dict_key set to something else than error, so that of two values for one flag "
                "the last would win silently; expected error; run from the repository or its playbooks/ folder"
            )
        if found:
            text = "nothing on any host has changed:\n" + "\n".join(found)
            return {**result, "failed": True, "msg": text, "problems": found, "hosts": hosts}
        lines = fleet.plan_lines(wanted, inspected)
        for line in lines:
            display.display(f"plan | {line}")
        return {**result, "changed": False, "plan": lines, "hosts": list(hosts), "left_out": list(left_out)}

    def _hosts(self, pattern: str, variables: dict[str, t.Any]) -> tuple[list[str], list[str]]:
        """Hosts of the pattern that this play may touch, in the play's order, and those that ``--limit`` leaves out."""
        lookup = self._templar.copy_with_new_env(available_variables=variables)
        every = list(lookup.evaluate_expression(_trusted(f"query('ansible.builtin.inventory_hostnames', {pattern!r})")))
        here = variables.get("ansible_play_hosts_all", [])
        return [host for host in every if host in here], [host for host in every if host not in here]


def _trusted(text: str) -> str:
    from ansible.template import trust_as_template

    return trust_as_template(text)
