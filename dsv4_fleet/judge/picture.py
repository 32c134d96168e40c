"""A picture of the rates: each wave and worker with its interval, control beside treatment."""

from __future__ import annotations

import io
import textwrap
from typing import Any, Final

import matplotlib
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

matplotlib.use("Agg")

# Okabe and Ito's colours, which stay apart for colour-blind eyes.
COLOURS: Final = {"treatment": "#0072B2", "control": "#D55E00", "pool": "#333333"}
VERDICTS: Final = {"PASS": "#009E73", "FAIL": "#B2182B", "INCONCLUSIVE": "#8A6D00"}


def draw(verdict: dict[str, Any], earlier: list[dict[str, Any]]) -> bytes:
    """PNG of this verdict, below the `earlier` ones of the same rollout."""
    rows: list[tuple[str, dict[str, Any], str, bool]] = []
    groups = []
    for number, item in enumerate([*earlier, verdict], 1):
        groups.append((len(rows), f"wave {number}: {item['verdict']}", VERDICTS[item["verdict"]]))
        rows.append(("treated, together", item["wave"], "treatment", True))
        for arm in ("treatment", "control"):
            if arm == "control" and item["control"]["workers"] > 1:
                rows.append(("control, together", item["control"], "control", True))
            rows += [
                (f"{name} (control)" if arm == "control" else name, worker, arm, False)
                for name, worker in item["workers"].items()
                if worker["arm"] == arm
            ]
    groups.append((len(rows), "rollout so far", COLOURS["pool"]))
    rows.append(("all treated workers", verdict["pool"], "pool", True))
    return _plot(rows, groups, verdict)


def _plot(
    rows: list[tuple[str, dict[str, Any], str, bool]],
    groups: list[tuple[int, str, str]],
    verdict: dict[str, Any],
) -> bytes:
    # A heading takes a row of its own above its group.
    heads = {at: (text, colour) for at, text, colour in groups}
    figure = Figure(figsize=(9.5, 1.7 + 0.34 * (len(rows) + 1.35 * len(groups))), dpi=150)
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15))  # inches around it all
    axes = figure.subplots()
    limit = 100 * max(1.25 * verdict["known"], *(1.08 * row["upper"] for _, row, _, _ in rows if row["sessions"]), 0.02)
    place, ticks, labels = 0.0, [], []
    for at, (label, group, colour, together) in enumerate(rows):
        if at in heads:
            place -= 1.35 if at else 1.0
            text, tint = heads[at]
            axes.text(
                -0.012,
                place,
                text,
                transform=axes.get_yaxis_transform(),
                ha="right",
                va="center",
                color=tint,
                fontweight="bold",
                fontsize=10.5,
            )
        place -= 1
        ticks.append(place)
        labels.append(label)
        _row(axes, place, group, COLOURS[colour], together, limit)
    for value, text, style in (
        (verdict["allowed"], "allowed", (0, (4, 3))),
        (verdict["known"], "known fault", (0, (1, 2))),
    ):
        axes.axvline(100 * value, color="#555555", linestyle=style, linewidth=1.1, zorder=1)
        axes.annotate(
            f"{text} {100 * value:g} %",
            (100 * value, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, 3),
            textcoords="offset points",
            fontsize=8.5,
            color="#555555",
        )
    axes.set_xlim(0, limit * 1.22)
    axes.set_ylim(place - 0.8, 0)
    axes.set_yticks(ticks, labels, fontsize=9.5)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= limit])
    axes.set_xlabel("corrupted sessions in %, with exact 95 % bounds on either side", fontsize=9.5)
    axes.xaxis.grid(True, color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    reasons = dict.fromkeys(reason["code"].replace("_", " ") for reason in verdict["reasons"])
    axes.annotate(
        "\n".join(textwrap.wrap(", ".join(reasons), 100)),
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 19),
        textcoords="offset points",
        fontsize=9,
        color=VERDICTS[verdict["verdict"]],
    )
    axes.set_title(
        f"Corrupted tool-call sessions: {verdict['verdict']}",
        loc="left",
        fontsize=13,
        fontweight="bold",
        color=VERDICTS[verdict["verdict"]],
        pad=22 + 13 * len(textwrap.wrap(", ".join(reasons), 100)),
    )
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _row(axes: Any, place: float, group: dict[str, Any], colour: str, together: bool, limit: float) -> None:
    if not group["sessions"]:
        axes.text(0.4, place, "no session", va="center", fontsize=8.5, color="#777777")
        return
    low, high, rate = 100 * group["lower"], 100 * group["upper"], 100 * group["rate"]
    axes.plot(
        [low, high],
        [place, place],
        color=colour,
        linewidth=4.5 if together else 2.2,
        alpha=0.45 if together else 0.75,
        solid_capstyle="round",
        zorder=2,
    )
    axes.plot(
        [rate],
        [place],
        marker="D" if together else "o",
        color=colour,
        markersize=7 if together else 5.5,
        markeredgecolor="white",
        markeredgewidth=0.8,
        zorder=3,
        clip_on=False,
    )
    extra = f", {group['failed']} failed" if group["failed"] else ""
    axes.text(
        limit * 1.02,
        place,
        f"{group['hard']} of {group['sessions']}{extra}",
        va="center",
        fontsize=8.5,
        color="#444444",
    )
