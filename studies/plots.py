"""Draws plots if matplotlib is installed (`pip install forkpoint[plots]`)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LIMIT_LINES: Final = ("--", ":", "-.")


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a plot."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    limit: bool = False  # not a system: drawn in black, broken


def axis_bottom(heights: Sequence[float]) -> float:
    """Return where the axis starts: at 0, unless all heights lie in its upper half, where their differences would not
    show."""
    lowest, highest = min(heights, default=0.0), max(heights, default=0.0)
    return lowest - 0.05 * (highest - lowest) if 0 < highest < 2 * lowest else 0.0


def write_plot(path: Path, title: str, x_name: str, panels: Mapping[str, Sequence[Curve]]) -> bool:
    """Draw panels side by side, keyed by the name of their y axis, with a common x axis. Return False if matplotlib is
    missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(4.6 * len(panels), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for number, (y_name, curves) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(1, len(panels), number)
        limits = itertools.cycle(LIMIT_LINES)
        for rank, curve in enumerate(curves):
            line, color = (next(limits), "black") if curve.limit else ("-", f"C{rank}")
            axes.plot(curve.x, curve.y, marker="o", markersize=3, label=curve.name, linestyle=line, color=color)
        axes.set_xlabel(x_name)
        axes.set_ylabel(y_name)
        axes.set_ylim(bottom=axis_bottom([height for curve in curves for height in curve.y]))
        axes.grid(alpha=0.3)
        if number == 1:
            axes.legend(fontsize=7)
    figure.savefig(path, dpi=100, metadata={"Software": ""})
    return True
