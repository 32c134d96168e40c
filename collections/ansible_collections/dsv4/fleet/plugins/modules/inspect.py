"""Documentation of the action plugin of the same name; nothing of this file runs on a host."""

from __future__ import annotations

DOCUMENTATION = """
module: inspect
short_description: Reads one worker and works out its wanted state
version_added: 0.1.0
description:
  - Checks the host's variables before it asks the host anything, then reads the worker through the agent, builds or finds
    the release for the tree that the host really has, renders script and unit, and lets bash run the script up to its exec.
  - Nothing on the host changes, in check mode or not. Fails with every problem found, one a line.
options:
  worker:
    description: The worker, as docs/agent.md has it.
    type: dict
    required: true
  serve:
    description: Templates, launch arguments, unit settings and the flags table of the role sglang_serve.
    type: dict
    required: true
  release:
    description: Overlays and the controller's cache, of the role sglang_release.
    type: dict
    required: true
  secrets:
    description: Secrets; they travel on standard input and come back in no result.
    type: dict
    required: true
  overrides:
    description: Flags that this play changes, by short name.
    type: dict
    required: true
  clear_overrides:
    description: Overrides to drop, by short name, or all.
    type: list
    elements: str
    required: true
  why:
    description: The reason that new overrides carry.
    type: str
    required: true
  rollback:
    description: Wants the last proved state other than the live one.
    type: bool
    required: true
  look_only:
    description: Returns what is wrong as C(msg) without failing.
    type: bool
    required: true
author:
  - The dsv4-fleet authors
"""

EXAMPLES = """
- name: Worker inspected
  ansible.builtin.import_role:
    name: sglang_worker
    tasks_from: inspect
"""

RETURN = """
dsv4:
  description: Worker, what was seen, what is wanted, reasons for a change by part, notes, and the difference.
  returned: success
  type: dict
"""
