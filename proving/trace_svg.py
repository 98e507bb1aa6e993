"""A trace as a picture: time from left to right, a lane per node and per hot shard.

Draws what `trace` found and judges nothing. The file needs nothing from anywhere else and follows
the viewer's light or dark scheme where that is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape, quoteattr

from proving.trace import Mark, NodeLane, ShardLane, Stay, Trace

LEFT, RIGHT, TOP = 110, 24, 58
PLOT = 1080
NODE_H, SHARD_H, GAP = 22, 20, 8
FAULT_ROWS, FAULT_H = 4, 13
LETTER = 5.6
"""About how wide a letter of the small text is."""

COLOURS = (
    "#4a7ebb", "#d9643a", "#3d9a68", "#b58a1c", "#8e63b5", "#c2527f", "#3a9aa8", "#7d8a3c",
    "#8a6a55", "#6a7686",
)  # fmt: skip

STYLE = """
text { font: 11px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #333 }
.small { font-size: 10px } .title { font-size: 14px; font-weight: 600 }
.paper { fill: #fff } .grid { stroke: #ddd } .faint { fill: #777 } .rail { stroke: #ccc }
.inside { fill: #fff; font-size: 9px } .ink { fill: #222 } .inkline { stroke: #222 }
.fault { stroke: #888; stroke-dasharray: 2 3 } .quiet { fill: #7a7a7a; opacity: .09 }
.bad { stroke: #d0021b; fill: #d0021b } .badtext { fill: #d0021b; font-weight: 600 }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd } .paper { fill: #16181c } .grid { stroke: #33373d } .faint { fill: #999 }
  .rail { stroke: #444 } .ink { fill: #eee } .inkline { stroke: #eee } .quiet { fill: #aaa }
  .bad { stroke: #ff5a5f; fill: #ff5a5f } .badtext { fill: #ff5a5f } .inside { fill: #fff }
}
"""

PATTERNS = """
<pattern id="still" width="6" height="6" patternUnits="userSpaceOnUse"
 patternTransform="rotate(45)"><rect width="6" height="6" fill="#fff" fill-opacity=".35"/>
<rect width="3" height="6" fill="#000" fill-opacity=".35"/></pattern>
<pattern id="leaving" width="4" height="4" patternUnits="userSpaceOnUse">
<rect width="2" height="4" fill="#fff" fill-opacity=".6"/></pattern>
"""


def draw(traced: Trace) -> str:
    """The whole picture, as the text of an SVG file."""
    return "\n".join(_Drawing(traced).lines()) + "\n"


class _Drawing:
    def __init__(self, traced: Trace) -> None:
        self._t = traced
        self._span = max(traced.end - traced.start, 1e-9)
        self._colour = {
            lane.name: COLOURS[number % len(COLOURS)] for number, lane in enumerate(traced.nodes)
        }
        self._faults_y = TOP
        self._nodes_y = TOP + FAULT_ROWS * FAULT_H + 12
        self._shards_y = self._nodes_y + len(traced.nodes) * (NODE_H + GAP) + 26
        self._axis_y = self._shards_y + len(traced.shards) * (SHARD_H + GAP) + 4
        self._bad = [mark for mark in traced.marks if mark.kind == "violation"]
        self._legend_y = self._axis_y + 44
        told = min(len(self._bad), 5)
        self.height = self._legend_y + 62 + told * 16
        self.width = LEFT + PLOT + RIGHT

    def lines(self) -> Iterator[str]:
        title = escape(self._t.title or "trace")
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" aria-label={quoteattr(title)}>'
        )
        yield f"<title>{title}</title><style>{STYLE}</style><defs>{PATTERNS}</defs>"
        yield f'<rect class="paper" width="{self.width}" height="{self.height}"/>'
        yield _text(16, 26, title, "title")
        yield _text(16, 44, escape(self._summary()), "small faint")
        yield from self._calm()
        yield from self._axis()
        yield from self._faults()
        yield _text(16, self._nodes_y - 6, "nodes", "small faint")
        for number, lane in enumerate(self._t.nodes):
            yield from self._node(lane, self._nodes_y + number * (NODE_H + GAP))
        yield _text(16, self._shards_y - 6, "shards, coloured by owner", "small faint")
        for number, shard in enumerate(self._t.shards):
            yield from self._shard(shard, self._shards_y + number * (SHARD_H + GAP))
        yield from self._violations()
        yield from self._legend()
        yield "</svg>"

    def _x(self, at: float) -> float:
        return LEFT + (at - self._t.start) / self._span * PLOT

    def _summary(self) -> str:
        faults = sum(mark.kind == "fault" for mark in self._t.marks)
        moves = sum(stay.how == "released" for lane in self._t.shards for stay in lane.stays)
        return (
            f"{self._t.end - self._t.start:.1f} s, {len(self._t.nodes)} nodes, {faults} faults, "
            f"{moves} planned moves of the shards shown, violations: {len(self._bad)}"
        )

    # time

    def _axis(self) -> Iterator[str]:
        step = next(
            (s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 600) if self._span / s <= 16),
            3600,
        )
        tick = -(-self._t.start // step) * step
        while tick <= self._t.end:
            x = self._x(tick)
            yield _line(x, self._faults_y, x, self._axis_y, "grid")
            yield _text(x, self._axis_y + 14, f"{tick:g}", "small faint", "middle")
            tick += step
        yield _text(LEFT + PLOT, self._axis_y + 28, "seconds", "small faint", "end")

    def _calm(self) -> Iterator[str]:
        for mark in self._t.marks:
            if mark.kind == "quiet":
                x = self._x(mark.at)
                tall = self._axis_y - self._faults_y
                yield _rect(x, self._faults_y, LEFT + PLOT - x, tall, 'class="quiet"')
                label = "quiet: no faults from here on"
                yield _text(LEFT + PLOT - 4, self._faults_y + 9, label, "small faint", "end")

    # faults

    def _faults(self) -> Iterator[str]:
        """Labels in rows, each where it does not cover another, with a line to what was hit."""
        yield _text(16, self._faults_y + 9, "faults", "small faint")
        ends = [0.0] * FAULT_ROWS
        rows = {lane.name: number for number, lane in enumerate(self._t.nodes)}
        for mark in self._t.marks:
            if mark.kind != "fault":
                continue
            x = self._x(mark.at)
            label = _short(mark)
            row = next((n for n, end in enumerate(ends) if end <= x), None)
            hit = self._nodes_y + rows[mark.node] * (NODE_H + GAP) if mark.node in rows else None
            bottom = self._nodes_y if hit is None else hit
            top = self._faults_y + (FAULT_ROWS if row is None else row + 1) * FAULT_H
            shown = f"<title>{mark.at:.3f} {escape(mark.text)}</title>"
            yield f"<g>{shown}{_line(x, top, x, bottom, 'fault')}"
            if row is not None:
                ends[row] = x + len(label) * LETTER + 8
                yield _text(x - 2, self._faults_y + row * FAULT_H + 9, escape(label), "small")
            if hit is not None:
                yield f'<path class="ink" d="M{x:.1f} {hit:.1f}l-3.5 -6h7z"/>'
            yield "</g>"

    # lanes

    def _node(self, lane: NodeLane, y: float) -> Iterator[str]:
        colour = self._colour[lane.name]
        yield f'<rect x="16" y="{y + 7}" width="8" height="8" rx="2" fill="{colour}"/>'
        yield _text(30, y + 15, escape(lane.name))
        middle = y + NODE_H / 2
        yield _line(LEFT, middle, LEFT + PLOT, middle, "rail")
        for span in lane.spans:
            x, width = self._x(span.start), self._x(span.end) - self._x(span.start)
            title = f"{lane.name} {span.state}, {span.start:.3f} to {span.end:.3f}"
            if span.state in ("up", "frozen"):
                yield _rect(x, y + 4, width, NODE_H - 6, f'fill="{colour}"', title)
            if span.state == "frozen":
                yield _rect(x, y + 4, width, NODE_H - 6, 'fill="url(#still)"', title)
            elif span.state == "fenced":
                edge = 'fill="none" class="bad" style="fill:none" stroke-width="1.5"'
                yield _rect(x, y + 5, max(width, 2), NODE_H - 8, edge, title)
        for start, end in lane.leads:
            x, width = self._x(start), self._x(end) - self._x(start)
            title = f"{lane.name} leads, {start:.3f} to {end:.3f}"
            yield _rect(x, y, max(width, 1), 4, 'class="ink"', title)
        for mark in self._t.marks:
            if mark.kind in ("fence", "evicted") and mark.node == lane.name:
                yield _cross(self._x(mark.at), middle, f"{mark.at:.3f} {mark.text}")

    def _shard(self, lane: ShardLane, y: float) -> Iterator[str]:
        yield _text(30, y + 14, escape(f"{lane.shard.role}/{lane.shard.shard}"))
        middle = y + SHARD_H / 2
        yield _line(LEFT, middle, LEFT + PLOT, middle, "rail")
        for stay in lane.stays:
            yield from self._stay(stay, y)
        for stay in lane.stays:
            x = self._x(stay.start)
            if stay.how == "released":
                yield f'<path class="ink" d="M{x:.1f} {middle - 5}l4 5l-4 5l-4 -5z"/>'
            elif stay.how == "taken over":
                yield f'<path class="ink" d="M{x:.1f} {middle - 5}l4.5 9h-9z"/>'

    def _stay(self, stay: Stay, y: float) -> Iterator[str]:
        entry = stay.entry
        if stay.owner not in self._colour:
            return
        colour = self._colour[stay.owner]
        x, end = self._x(stay.start), self._x(stay.end)
        lost = stay.end if stay.lost is None else max(stay.lost, stay.start)
        opened = lost if stay.opened is None else min(max(stay.opened, stay.start), lost)
        open_x, lost_x = self._x(opened), self._x(lost)
        to = f" to {stay.to}" if stay.to else ""
        title = f"{stay.owner}@{entry.epoch} {entry.state}{to}, {stay.start:.3f} to {stay.end:.3f}"
        # Thin while nobody serves it: not opened yet, or lost with its owner.
        yield _rect(x, y + SHARD_H / 2 - 1.5, end - x, 3, f'fill="{colour}"', title)
        yield _rect(open_x, y + 2, lost_x - open_x, SHARD_H - 4, f'fill="{colour}"', title)
        if entry.state == "moving":
            wide = max(lost_x - x, 1.5)
            yield _rect(x, y + 2, wide, SHARD_H - 4, 'fill="url(#leaving)"', title)
        elif lost_x - open_x > 24 and stay.how != "kept":
            yield _text(open_x + 8, y + 14, str(entry.epoch), "inside")

    def _violations(self) -> Iterator[str]:
        for mark in self._bad:
            x = self._x(mark.at)
            yield f"<g><title>{mark.at:.3f} {escape(mark.text)}</title>"
            yield f'<line class="bad" stroke-width="2" x1="{x:.1f}" x2="{x:.1f}" ' \
                  f'y1="{self._faults_y}" y2="{self._axis_y}"/>'  # fmt: skip
            yield f'<path class="bad" d="M{x:.1f} {self._axis_y}l-5 9h10z"/></g>'

    # legend

    def _legend(self) -> Iterator[str]:
        y, x = self._legend_y, 16.0
        sample = next(iter(self._colour.values()), COLOURS[0])
        box = f'width="22" height="12" fill="{sample}"'
        for drawn, label in (
            (f"<rect {box}/>", "up, or shard served (number: epoch)"),
            (f'<rect {box}/><rect width="22" height="12" fill="url(#still)"/>', "frozen"),
            ('<rect class="bad" style="fill:none" width="22" height="12"/>', "fenced"),
            ('<line class="rail" x1="0" x2="22" y1="6" y2="6"/>', "down, no owner"),
            (f'<rect {box}/><rect class="ink" width="22" height="4"/>', "leads"),
            (f'<rect {box}/><rect width="22" height="12" fill="url(#leaving)"/>', "moving away"),
            (
                f'<rect y="4.5" width="22" height="3" fill="{sample}"/>',
                "not yet open, or owner lost",
            ),
            ('<path class="ink" d="M11 1l4 5l-4 5l-4 -5z"/>', "hand-off"),
            ('<path class="ink" d="M11 1l4.5 9h-9z"/>', "takeover, owner gone"),
            ('<path class="ink" d="M11 11l-3.5 -6h7z"/>', "fault"),
            (_cross(11, 6, ""), "fence or eviction"),
            ('<path class="bad" d="M11 1l-5 9h10z"/>', "violation"),
        ):
            width = 22 + 6 + len(label) * LETTER + 18
            if x + width > self.width - 8:
                x, y = 16.0, y + 22
            yield f'<g transform="translate({x:.0f} {y:.0f})">{drawn}'
            yield _text(28, 10, label, "small") + "</g>"
            x += width
        for mark in self._bad[:5]:
            y += 22 if mark is self._bad[0] else 16
            told = mark.text if len(mark.text) <= 190 else mark.text[:187] + "..."
            yield _text(16, y + 10, escape(f"{mark.at:.3f}  {told}"), "small badtext")


def _short(mark: Mark) -> str:
    """A fault's label: without its prefix, nodes by number."""
    label = mark.text.removeprefix("fault: ")
    number = mark.node.rpartition("-")[2]
    return label.replace(mark.node, number) if mark.node else label


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    shown = f' class="{style}"' if style else ""
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{shown}{where}>{text}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _rect(x: float, y: float, width: float, height: float, look: str, title: str = "") -> str:
    if width <= 0:
        return ""
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return (
        f"<rect {size} {look}><title>{escape(title)}</title></rect>"
        if title
        else (f"<rect {size} {look}/>")
    )


def _cross(x: float, y: float, title: str) -> str:
    shown = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<g class="bad" stroke-width="2">{shown}<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8" '
        'style="fill:none"/></g>'
    )
