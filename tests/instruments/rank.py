"""One rank of a tensor-parallel server, for test_hooks.py: `rank.py RANK WORLD MEETING_FILE FAULT`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "patches")]

import torch  # noqa: E402  # the path comes first
from dsv4_probe import hooks  # noqa: E402

from tests.instruments.fakes import hooked  # noqa: E402

rank, world, meeting, fault = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
hooks._unfit = lambda: None
model = hooked(hooks, None)
model.capture()
for number in range(4 + 3 * rank):  # not as many each: where an instrument waited for other ranks, this would not end well
    model.replay(*[fault] * (number == 2))
torch.distributed.destroy_process_group()
