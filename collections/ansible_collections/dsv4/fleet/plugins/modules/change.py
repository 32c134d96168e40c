"""Documentation of the action plugin of the same name; nothing of this file runs on a host."""

from __future__ import annotations

DOCUMENTATION = """
module: change
short_description: Brings one worker to its wanted state by one transaction that the worker owns
version_added: 0.1.0
description:
  - Sends one request to the agent and follows the transaction by short reads. A lost connection is retried; the
    transaction goes on without it. A host that cannot be reached is a failed host, never an unreachable one.
  - In check mode it returns what would change and the difference, and does not connect.
options:
  inspected:
    description: The result of dsv4.fleet.inspect.
    type: dict
    required: true
  worker:
    description: The worker, as docs/agent.md has it.
    type: dict
    required: true
  secrets:
    description: Secrets; they travel on standard input and come back in no result.
    type: dict
    required: true
  limits:
    description: Deadlines in seconds, and counts.
    type: dict
    required: true
  generation:
    description: Prompt, expected answer and length of the gate's one generation.
    type: dict
    required: true
  acknowledge:
    description: A person has looked at this worker's drained or interrupted end.
    type: bool
    required: true
  retry_state:
    description: The first 12 or more characters of a refused state that is asked for again.
    type: str
    required: true
  preserve:
    description: Leaves a worker that could not be proved running, for a look.
    type: bool
    required: true
author:
  - The dsv4-fleet authors
"""

EXAMPLES = """
- name: Worker brought to its wanted state
  ansible.builtin.import_role:
    name: sglang_worker
"""

RETURN = """
dsv4:
  description: The agent's result (docs/agent.md), with its end state, timeline and what changed.
  returned: always
  type: dict
"""
