"""Small results on their way from the device to the host, without anyone waiting for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

MOST_WAITING = 64
"""Letters under way; with more, the oldest is waited for, so that the host never runs far ahead."""


class Mail:
    """Copies of device tensors in pinned memory, each batch with an event that says it has arrived."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._waiting: deque[tuple[Any, list[torch.Tensor], Any]] = deque()

    def post(self, tensors: Sequence[torch.Tensor], note: Any) -> None:
        """Send the tensors' contents as they are now on the current stream; `note` comes along."""
        if self.device.type == "cpu":
            self._waiting.append((None, [tensor.clone() for tensor in tensors], note))
            return
        copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._waiting.append((arrived, copies, note))

    def take(self, wait: bool = False) -> Iterator[tuple[list[torch.Tensor], Any]]:
        """What has arrived, in order."""
        while self._waiting:
            arrived, copies, note = self._waiting[0]
            if arrived is not None and not arrived.query():
                if not wait and len(self._waiting) < MOST_WAITING:
                    return
                arrived.synchronize()
            self._waiting.popleft()
            yield copies, note
