"""Draws the shuffle storage that topologies leave, from a result of `make bench`: `plot.py RESULT.json OUT.svg`."""

import json
import pathlib
import sys

WIDTH, HEIGHT, LEFT, TOP = 640, 300, 70, 40
FONT = 'font-family="sans-serif" font-size="13"'
COLOURS = {"off": "#c0504d", "on": "#00897b"}
WORDS = {"off": "plain Spark", "on": "with stagecrew"}


def draw(figures) -> str:
    """Draws the megabytes on disk, and the outputs in the tracker, after each topology."""
    words = f"after topologies that shuffle {figures['megabytes']} MB each"
    disk = {name: [one["disk"] / 1e6 for one in ones] for name, ones in figures["left"].items()}
    tracked = {name: [one["outputs"] for one in ones] for name, ones in figures["left"].items()}
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {2 * HEIGHT}" {FONT}>',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *chart(disk, f"MB of shuffle files on disk, {words}"),
            f'<g transform="translate(0 {HEIGHT})">',
            *chart(tracked, f"Outputs in Spark's tracker, {words}"),
            "</g>",
            "</svg>\n",
        ]
    )


def chart(left, title):
    """Draws one chart: the values of both sides after each topology."""
    most = max(max(values) for values in left.values())
    step = next(s for s in (10, 50, 100, 500, 1000, 5000) if most / s <= 8)
    top = (int(most / step) + 1) * step
    count = len(left["on"])

    def x(number: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * number / count

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - 50) * (1 - value / top)

    parts = [
        f'<text x="{LEFT}" y="22" fill="#333333">{title}</text>',
    ]
    for value in range(0, top + 1, step):
        parts.append(
            f'<line x1="{LEFT}" y1="{y(value):.1f}" x2="{x(count):.1f}" y2="{y(value):.1f}" stroke="#dddddd"/>'
        )
        parts.append(f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end" fill="#333333">{value:,}</text>')
    parts.extend(
        f'<text x="{x(number):.1f}" y="{HEIGHT - 28}" text-anchor="middle" fill="#333333">{number}</text>'
        for number in range(0, count + 1, max(count // 5, 1))
    )
    parts.append(f'<text x="{x(count / 2):.1f}" y="{HEIGHT - 8}" text-anchor="middle" fill="#333333">topologies</text>')
    for name, values in left.items():
        points = " ".join(f"{x(i + 1):.1f},{y(value):.1f}" for i, value in enumerate(values))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="2.5"/>')
        parts.append(
            f'<text x="{x(count * 0.98):.1f}" y="{y(values[-1]) - 8:.1f}" text-anchor="end" fill="{COLOURS[name]}">'
            f"{WORDS[name]}</text>"
        )
    return parts


if __name__ == "__main__":
    pathlib.Path(sys.argv[2]).write_text(draw(json.loads(pathlib.Path(sys.argv[1]).read_text())["partitions"]))
