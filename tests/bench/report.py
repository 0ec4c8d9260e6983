"""What was measured, as Markdown tables and one SVG. No clock, no process: figures in, text out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from html import escape

OURS = "ours"


def at(values: Sequence[float], share: float) -> float:
    """The value below which this share (0 to 1) of them lies, the nearest that was measured."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def number(value: float) -> str:
    """Three digits that mean something."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


class Table:
    """Samples of one quantity by peer; None is "did not happen within bound seconds"."""

    def __init__(
        self, key: str, title: str, unit: str, goal: str, *, bound: float | None = None, note: str = ""
    ) -> None:
        self.key, self.title, self.unit, self.goal, self.bound = key, title, unit, goal, bound
        self.note = note
        self.samples: dict[str, list[float | None]] = {}

    def add(self, name: str, value: float | None) -> None:
        """One more sample of a peer."""
        self.samples.setdefault(name, []).append(value)

    def median(self, name: str) -> float | None:
        """The median of a peer; None where one sample did not happen, or there is none."""
        values = [v for v in self.samples.get(name, []) if v is not None]
        complete = values and len(values) == len(self.samples[name])
        return statistics.median(values) if complete else None

    def markdown(self, order: Sequence[str]) -> str:
        """The table, and the ratio of each median to ours."""
        base = self.median(OURS)
        if base is None:
            base = next((m for name in order if (m := self.median(name)) is not None), None)
        lines = [
            _heading(self.title, self.goal, self.note),
            f"| | n | median {self.unit} | p10 | p90 | max | times ours |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for name in sorted(self.samples, key=lambda n: _place(order, n)):
            values = [v for v in self.samples[name] if v is not None]
            median = self.median(name)
            if median is None or not values:
                bound = f"within {self.bound:g} s" if self.bound else "in time"
                lines.append(f"| {name} | {len(self.samples[name])} | never {bound} | | | | |")
                continue
            ratio = number(median / base) if base else ""
            cells = [number(v) for v in (median, at(values, 0.1), at(values, 0.9), max(values))]
            lines.append(f"| {name} | {len(values)} | {' | '.join(cells)} | {ratio} |")
        return "\n".join(lines)


class Grid:
    """One row of named facts by peer."""

    def __init__(self, key: str, title: str, columns: Sequence[str], *, goal: str, note: str = "") -> None:
        self.key, self.title, self.columns, self.goal, self.note = key, title, columns, goal, note
        self.rows: list[tuple[str, tuple[object, ...]]] = []

    def add(self, name: str, *facts: object) -> None:
        """The facts of a peer, in the order of the columns."""
        assert len(facts) == len(self.columns)
        self.rows.append((name, facts))

    def markdown(self, order: Sequence[str]) -> str:
        """The table."""
        del order  # rows stay as they were added
        lines = [
            _heading(self.title, self.goal, self.note),
            "| | " + " | ".join(self.columns) + " |",
            "|---" + "|---:" * len(self.columns) + "|",
        ]
        for name, facts in self.rows:
            lines.append(f"| {name} | " + " | ".join(_word(f) for f in facts) + " |")
        return "\n".join(lines)


def _word(fact: object) -> str:
    return ("yes" if fact else "no") if isinstance(fact, bool) else str(fact)


def _heading(title: str, goal: str, note: str) -> str:
    words = " ".join([f"Goal: {goal}." if goal else "", note]).strip()
    return f"### {title[0].upper()}{title[1:]}\n" + (f"\n{words}\n" if words else "")


def _place(order: Sequence[str], name: str) -> tuple[int, str]:
    return (order.index(name) if name in order else len(order), name)


# -- the plot ----------------------------------------------------------------------------------------------------------

WIDTH, PANEL, BAR, LABEL = 460, 24, 17, 150
COLUMN = WIDTH - LABEL - 60


def svg(panels: Sequence[tuple[str, str, dict[str, float]]]) -> str:
    """Bars on a logarithmic scale, two panels beside each other: (title, unit, value by peer). Less is better."""
    blocks = [_panel(title, unit, values) for title, unit, values in panels if values]
    rows = [blocks[i : i + 2] for i in range(0, len(blocks), 2)]
    y, parts = 10, []
    for row in rows:
        for column, (_, block) in enumerate(row):
            parts.append(f'<g transform="translate({column * WIDTH + 10},{y})">{block}</g>')
        y += max(height for height, _ in row) + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH + 10} {y}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _panel(title: str, unit: str, values: dict[str, float]) -> tuple[int, str]:
    low = 10 ** math.floor(math.log10(min(values.values()) * 0.6))
    high = max(values.values()) * 1.5

    def x(value: float) -> float:
        return COLUMN * math.log10(value / low) / math.log10(high / low)

    height = PANEL + BAR * len(values) + 18
    parts = [f'<text x="0" y="14" font-weight="bold">{escape(title.replace("`", ""))}</text>']
    tick = low
    while tick <= high:
        at_x = LABEL + x(tick)
        parts.append(f'<path d="M{at_x:.1f} {PANEL}V{height - 16}" stroke="#ddd"/>')
        label = f"{tick:g}" + (f" {unit}" if tick * 10 > high else "")
        parts.append(
            f'<text x="{at_x:.1f}" y="{height - 4}" fill="#777" font-size="10" text-anchor="middle">{label}</text>'
        )
        tick *= 10
    for row, (name, value) in enumerate(sorted(values.items(), key=lambda item: item[1])):
        top = PANEL + row * BAR
        colour = "#c0392b" if name.startswith(OURS) else "#7f8c8d"
        parts += [
            f'<text x="{LABEL - 6}" y="{top + 12}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{LABEL}" y="{top + 2}" width="{max(1.0, x(value)):.1f}" height="{BAR - 4}" fill="{colour}"/>',
            f'<text x="{LABEL + max(1.0, x(value)) + 4:.1f}" y="{top + 12}" font-size="11">{number(value)}</text>',
        ]
    return height, "".join(parts)
