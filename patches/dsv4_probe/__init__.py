"""What a patched SGLang tree calls: the passport and the instruments.

This package is shipped into releases beside `sglang`. Importing it costs nothing: the instruments
that need torch are imported by the hooks that call them.
"""

from __future__ import annotations

INSTRUMENTS: dict[str, str] = {}
"""Instruments in this release: the flag that switches one on, and the instrument's name."""
