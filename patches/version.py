"""Our own version: part of every release's manifest, and so of its digest."""

from __future__ import annotations

VERSION = "0.1.0"
