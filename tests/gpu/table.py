"""One table of what the parts wrote: python table.py DIRECTORY. Exit code 1 where a bar is not met."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> int:
    rows = [row for path in sorted(Path(sys.argv[1]).glob("*.json")) for row in json.loads(path.read_text())]
    rows.sort(key=lambda row: (row["bar"], row["version"]))
    print(f"{'bar':4} {'version':8} {'what':62} {'measured':72} met")
    for row in rows:
        met = "yes" if row["met"] else "NO"
        print(f"{row['bar']:4} {row['version']:8} {row['what']:62} {row['figure']:72} {met}")
    missed = sum(not row["met"] for row in rows)
    print(f"{len(rows) - missed} of {len(rows)} met")
    return 1 if missed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
