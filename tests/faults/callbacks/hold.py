"""Holds a run at one moment until a test lets it go on: what ansible-runner tells of events comes while the run goes on."""

from __future__ import annotations

import os
import pathlib
import time
import typing as t

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: hold
type: aggregate
short_description: Waits after one task's result until a file is there
version_added: 0.1.0
description:
  - E(DSV4_HOLD) is C(ACTION HOST FILE); the run waits after the result of this action on this host (C(-) for any host) until
    the file is there, at most two minutes.
requirements:
  - enabled in C(callbacks_enabled)
"""

LIMIT_S = 120


class CallbackModule(CallbackBase):
    """One moment in one run."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "hold"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        action, host, file = os.environ["DSV4_HOLD"].split(" ", 2)
        self._action, self._host, self._file = action, host, pathlib.Path(file)

    def v2_runner_on_ok(self, result: t.Any) -> None:
        if result.task.action == self._action and self._host in ("-", result.host.get_name()):
            until = time.monotonic() + LIMIT_S
            while not self._file.exists():
                if time.monotonic() > until:
                    raise TimeoutError(f"found no {self._file} after {LIMIT_S} s, expected the test to make it")
                time.sleep(0.05)
