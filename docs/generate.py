"""Writes what is made from the roles' own files: the flags in sglang_serve's specs, and docs/reference.md.

`python docs/generate.py` writes; `python docs/generate.py --check` exits 1 where a file is not what it would write.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[1]
SPECS = ROOT / "roles/sglang_serve/meta/argument_specs.yml"
MARK = "      # From vars/main.yml:\n"


def _table() -> dict[str, list[dict[str, Any]]]:
    return yaml.safe_load((ROOT / "roles/sglang_serve/vars/main.yml").read_text())


def _yaml(value: Any) -> str:
    """One line of YAML."""
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()


def _option(name: str, kind: str, default: Any, summary: str) -> str:
    return f"      {name}:\n        type: {kind}\n        default: {_yaml(default)}\n        description: {summary}\n"


def specs() -> str:
    """sglang_serve's argument specs, with one option for each row of its tables."""
    written = SPECS.read_text().partition(MARK)[0] + MARK
    tables = _table()
    for row in tables["__sglang_serve_flags"]:
        # A spec of type bool would turn 'enabled' into false; the plugin parses flags itself and is strict.
        written += _option(row["variable"], "raw", row["default"], f"{row['summary']} Sets {row['env']}.")
    for row in tables["__sglang_serve_inputs"]:
        written += _option(row["variable"], "raw" if row["type"] == "bool" else row["type"], row["default"], row["summary"])
    return written


def reference() -> str:
    """docs/reference.md: every input of every role."""
    lines = ["# Reference: every input", "", "Made from the roles' argument specs by `make docs`.", ""]
    for path in sorted(ROOT.glob("roles/*/meta/argument_specs.yml")):
        spec = yaml.safe_load(path.read_text())["argument_specs"]["main"]
        lines += [
            f"## {path.parents[1].name}",
            "",
            spec["short_description"] + ".",
            "",
            "| variable | type | default | |",
            "|---|---|---|---|",
        ]
        for name, option in spec["options"].items():
            default = _yaml(option["default"]).replace("|", "\\|")
            lines.append(f"| `{name}` | {option['type']} | `{default}` | {option['description']} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Write or check; returns the exit code."""
    check = "--check" in sys.argv
    stale = False
    # In this order: the reference is made from the specs.
    for path, make in ((SPECS, specs), (ROOT / "docs/reference.md", reference)):
        text = make()
        if path.exists() and path.read_text() == text:
            continue
        stale = True
        if not check:
            path.write_text(text)
        print(f"{path.relative_to(ROOT)}: {'found stale; run make docs' if check else 'written'}")
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main())
