"""Says of every worker what it runs, what it should run, and where the two differ."""

from __future__ import annotations

import typing as t

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.dsv4.fleet.plugins.plugin_utils import status

display = Display()


class ActionModule(ActionBase):
    """See the module of the same name for its documentation."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        """Returns ``workers`` (one row each) and ``drift``; the report callback turns drift into exit code 3."""
        result = super().run(tmp, task_vars)
        rows = [status.row(host, one) for host, one in self._task.args["inspected"].items() if one and not one.get("skipped")]
        for line in status.table(rows):
            display.display(line)
        return {**result, "changed": False, "workers": rows, "drift": any(row["drift"] for row in rows)}
