"""What a patched SGLang tree calls: the passport and the instruments.

This package is shipped into releases beside `sglang`. Importing it costs nothing: what needs torch
is imported when the first hook of an instrument that is on runs.
"""

from __future__ import annotations

CANARY = "SGLANG_DSV4_IDXK_CANARY"
GE_DIFF = "SGLANG_DSV4_GE_DIFF"
ALIAS_AUDIT = "SGLANG_DSV4_ALIAS_AUDIT"

INSTRUMENTS: dict[str, str] = {CANARY: "canary", GE_DIFF: "ge_diff", ALIAS_AUDIT: "alias_audit"}
"""Instruments in this release: the flag that switches one on, and the instrument's name."""
