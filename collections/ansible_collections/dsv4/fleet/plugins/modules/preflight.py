"""Documentation of the action plugin of the same name; nothing of this file runs on a host."""

from __future__ import annotations

DOCUMENTATION = """
module: preflight
short_description: Compares the whole fleet with what a play wants of it, once
version_added: 0.1.0
description:
  - Runs on the controller, on what inspecting each worker gave. Fails with every problem found; then nothing on any host
    has changed.
options:
  target:
    description: The pattern whose workers the play changes.
    type: str
    required: true
  waves:
    description: Wave sizes, counts or percentages.
    type: list
    elements: raw
    required: true
  at_once:
    description: Workers of one wave that may be away at the same time.
    type: int
    required: true
  whole:
    description: Refuses a limit that leaves workers of the target out.
    type: bool
    required: true
  partial:
    description: Consents to such a limit.
    type: bool
    required: true
  tested_ansible:
    description: Versions of ansible-core that are not named aloud.
    type: list
    elements: str
    required: true
  inspected:
    description: The result of dsv4.fleet.inspect by host.
    type: dict
    required: true
  min_admitted:
    description: Workers of one role that every router must keep.
    type: int
    required: true
  acknowledge:
    description: Workers whose drained or interrupted end a person has looked at.
    type: list
    elements: str
    required: true
  retry_state:
    description: The start of a refused state that is asked for again.
    type: str
    required: true
author:
  - The dsv4-fleet authors
"""

EXAMPLES = """
- name: Fleet checked
  ansible.builtin.import_role:
    name: fleet_preflight
"""

RETURN = """
plan:
  description: A line per worker, what would change and why.
  returned: success
  type: list
  elements: str
problems:
  description: Every reason why no worker may be touched.
  returned: failure
  type: list
  elements: str
"""
