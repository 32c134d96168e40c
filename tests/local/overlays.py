"""The operator's two patched files of the story, made from the downloaded tree and never committed.

The real ones keep index-K in bf16. These only read the variables that the real ones read, which is what a release, its
checks and the stand-in engine look at.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from tests.local import downloads
from tests.local.settings import CACHE

INDEXER = "sglang/srt/layers/attention/dsv4/indexer.py"
RUNNER = "sglang/srt/model_executor/runner/decode_cuda_graph_runner.py"
LINES = {
    INDEXER: (
        "import os as _dsv4_os",
        'DSV4_BF16_INDEX_K = _dsv4_os.environ.get("SGLANG_DSV4_BF16_INDEX_K") == "1"',
        'DSV4_TRITON_INDEXER = _dsv4_os.environ.get("SGLANG_DSV4_TRITON_INDEXER") == "1"',
    ),
    RUNNER: (
        "import os as _dsv4_os",
        'DSV4_BF16_INDEX_K = _dsv4_os.environ.get("SGLANG_DSV4_BF16_INDEX_K") == "1"',
    ),
}
#: What `sglang_release_overlays` of inventory/local is read from.
OVERLAYS = CACHE / "overlays.json"


def make() -> Path:
    """Write the overlays beside the downloads, and their list as `sglang_release_overlays` has it."""
    tree = downloads.sglang_tree()
    rows = []
    for rel, lines in LINES.items():
        base = (tree / rel).read_bytes()
        source = CACHE / "overlays" / hashlib.sha256(base).hexdigest()[:12] / Path(rel).name
        source.parent.mkdir(parents=True, exist_ok=True)
        _write(source, base + ("\n" + "\n".join(lines) + "\n").encode())
        rows.append({"file": rel, "source": str(source), "base_sha256": hashlib.sha256(base).hexdigest()})
    _write(OVERLAYS, json.dumps(rows, indent=1).encode())
    return OVERLAYS


def _write(path: Path, content: bytes) -> None:
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_bytes(content)
    fresh.replace(path)
