"""Documentation of the action plugin of the same name; nothing of this file runs on a host."""

from __future__ import annotations

DOCUMENTATION = """
module: status
short_description: Says of every worker what it runs, what it should run, and where the two differ
version_added: 0.1.0
description:
  - Runs on the controller, on what inspecting each worker gave. The callback dsv4.fleet.report ends the run with exit
    code 3 where there is drift.
options:
  inspected:
    description: The result of dsv4.fleet.inspect by host.
    type: dict
    required: true
author:
  - The dsv4-fleet authors
"""

EXAMPLES = """
- name: Live state told
  dsv4.fleet.status:
    inspected: "{{ dict(ansible_play_hosts_all | zip(ansible_play_hosts_all | map('extract', hostvars, '__inspected'))) }}"
"""

RETURN = """
workers:
  description: A row per worker.
  returned: always
  type: list
  elements: dict
drift:
  description: Whether any worker is not as it should be.
  returned: always
  type: bool
"""
