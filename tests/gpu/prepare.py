"""Write the trees for run.sh: of each version the few files that are needed, as they are and patched.

Usage: python tests/gpu/prepare.py OUT [WHEEL_CACHE]. Downloads wheels; nothing of them is committed.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from patches.hooks import HOOK_FILES  # the path comes first
from patches.matrix import read
from patches.release import build

VERSIONS = ("0.5.14", "0.5.18", "0.5.19", "0.5.23")
BESIDE = (
    "sglang/srt/layers/attention/dsv4/metadata.py",
    "sglang/srt/layers/attention/dsa/dsa_topk_backend.py",
    "sglang/srt/layers/attention/mqa_logits_utils.py",
)


def main(out: Path, cache: Path) -> None:
    """For each version: OUT/VERSION/base/sglang/… and OUT/VERSION/patched/{sglang,dsv4_probe}/…"""
    for version in VERSIONS:
        base = read(version, cache, [*HOOK_FILES, *BESIDE])
        release = build(base, hashlib.sha256(version.encode()).hexdigest(), version)
        patched = {rel.removeprefix("python/"): content for rel, content in release.files.items()}
        for kind, files in (("base", base), ("patched", {**base, **patched})):
            for rel, content in files.items():
                path = out / version / kind / rel
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        print(f"{version}: {release.digest}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "wheels"))
