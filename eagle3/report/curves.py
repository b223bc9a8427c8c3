"""Line charts as inline SVG, and training curves read from DVCLive's files."""

import csv
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

Points = Sequence[tuple[float, float]]

MOST_DOTS = 40  # of a line; with more points they are not marked
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 480, 220, 52, 34, 12, 12


def line_chart(title: str, x_label: str, lines: Mapping[str, Points]) -> str:
    """One chart with a line per name, as markup. Each line has its name and last value as a title to hover."""
    points = [point for line in lines.values() for point in line]
    if not points:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    left, right = min(xs), max(xs)
    low, high = _padded(min(ys), max(ys))

    def place(x: float, y: float) -> str:
        across = LEFT + (WIDTH - LEFT - RIGHT) * ((x - left) / (right - left) if right > left else 0.5)
        return f"{across:.1f},{TOP + (HEIGHT - TOP - BOTTOM) * (1 - (y - low) / (high - low)):.1f}"

    marks = []
    for value in (low, (low + high) / 2, high):
        across, down = place(left, value).split(",")
        marks.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down}" y2="{down}"/>')
        marks.append(f'<text x="{LEFT - 6}" y="{down}" class="y">{value:.3g}</text>')
    for value in dict.fromkeys((left, right)):
        across, _ = place(value, low).split(",")
        marks.append(f'<text x="{across}" y="{HEIGHT - BOTTOM + 14}" class="x">{value:,.0f}</text>')
    marks.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" class="x">{escape(x_label)}</text>')
    keys = []
    for number, (name, line) in enumerate(lines.items()):
        path = " ".join(place(x, y) for x, y in line)
        told = escape(f"{name}: {line[-1][1]:.3g} at {line[-1][0]:,.0f}")
        marks.append(f'<g class="line l{number % 6}"><title>{told}</title><polyline points="{path}"/>')
        dots = path.split(" ") if len(line) <= MOST_DOTS else []
        marks += ['<circle cx="{}" cy="{}" r="2.5"/>'.format(*dot.split(",")) for dot in dots]
        marks.append("</g>")
        keys.append(f'<span class="key l{number % 6}">{escape(name)}</span>')
    summary = escape("; ".join(f"{name} ends at {line[-1][1]:.3g}" for name, line in lines.items() if line))
    label = f'role="img" aria-label="{escape(title)}: {summary}"'
    drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" {label}>{"".join(marks)}</svg>'
    return f'<figure><figcaption>{escape(title)}</figcaption>{drawing}<div class="keys">{"".join(keys)}</div></figure>'


def _padded(low: float, high: float) -> tuple[float, float]:
    room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return (low - room if low < 0 or low > room else 0.0), high + room


def read_curve(path: Path) -> list[tuple[float, float]]:
    """(step, value) of one of DVCLive's TSV files; nothing where there is no such file."""
    if not path.is_file():
        return []
    with path.open(newline="") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t"))
    return [(float(row["step"]), float(row[path.stem])) for row in rows]
