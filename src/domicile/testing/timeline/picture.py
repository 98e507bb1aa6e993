"""A trace as a picture: time from left to right, a lane per node and per hot shard.

Draws what `trace` found and judges nothing. The file needs nothing from anywhere else and follows
the viewer's light or dark scheme where that is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape, quoteattr

from domicile.testing.timeline.trace import Mark, NodeLane, Sent, ShardLane, Stay, Trace

WIDTH = 1200
LEFT, RIGHT, TOP = 124, 24, 62
NODE_H, SHARD_H, MAIL_H, GAP = 24, 22, 64, 8
FAULT_ROWS, FAULT_H = 4, 15
LETTER = 6.2
"""About how wide a letter of the small text is."""

MISSED = ("not_executed", "maybe_executed", "lost")
"""What a sender is told of a message that did not run, or perhaps not."""

COLOURS = (
    "#4a7ebb", "#d9643a", "#3d9a68", "#b58a1c", "#8e63b5", "#c2527f", "#3a9aa8", "#7d8a3c",
    "#8a6a55", "#6a7686",
)  # fmt: skip

STYLE = """
text { font: 12px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #222 }
.small { font-size: 11px } .title { font-size: 15px; font-weight: 600 } .note { font-weight: 600 }
.paper { fill: #fff } .grid { stroke: #e2e5e9 } .faint { fill: #667 } .rail { stroke: #c4c9d0 }
.inside { fill: #fff; font-size: 11px } .ink { fill: #222 } .runs { fill: #000; opacity: .3 }
.fault { stroke: #889; stroke-dasharray: 2 3 } .quiet { fill: #7a7a7a; opacity: .09 }
.mail { stroke: #445; stroke-width: 1; fill: none } .dot { fill: #445 }
.bad { stroke: #d0021b; fill: #d0021b } .badtext { fill: #d0021b; font-weight: 600 }
@media (prefers-color-scheme: dark) {
  text { fill: #dde1e6 } .paper { fill: #16181c } .grid { stroke: #2c3036 } .faint { fill: #9aa }
  .rail { stroke: #4a4f57 } .ink { fill: #eee } .quiet { fill: #aaa } .inside { fill: #fff }
  .mail { stroke: #b9c0ca } .dot { fill: #b9c0ca }
  .bad { stroke: #ff5a5f; fill: #ff5a5f } .badtext { fill: #ff5a5f }
}
"""

PATTERNS = """
<pattern id="still" width="6" height="6" patternUnits="userSpaceOnUse"
 patternTransform="rotate(45)"><rect width="6" height="6" fill="#fff" fill-opacity=".35"/>
<rect width="3" height="6" fill="#000" fill-opacity=".35"/></pattern>
<pattern id="leaving" width="4" height="4" patternUnits="userSpaceOnUse">
<rect width="2" height="4" fill="#fff" fill-opacity=".6"/></pattern>
"""


def draw(traced: Trace, *, width: int = WIDTH, zero: float = 0.0) -> str:
    """The whole picture, as the text of an SVG file; the axis counts from `zero`."""
    return "\n".join(_Drawing(traced, width, zero).lines()) + "\n"


class _Drawing:
    def __init__(self, traced: Trace, width: int, zero: float) -> None:
        self._t = traced
        self._zero = zero
        self._span = max(traced.end - traced.start, 1e-9)
        self._colour = {
            lane.name: COLOURS[number % len(COLOURS)] for number, lane in enumerate(traced.nodes)
        }
        self.width, self._plot = width, width - LEFT - RIGHT
        self._bad = [mark for mark in traced.marks if mark.kind == "violation"]
        self._labels, rows = self._place_labels()
        self._faults_y = TOP
        self._nodes_y = TOP + rows * FAULT_H + 22
        self._shards_y = self._nodes_y + len(traced.nodes) * (NODE_H + GAP) + 28
        self._lanes_y: list[float] = []
        y = self._shards_y
        for lane in traced.shards:
            y += MAIL_H if lane.messages else 0
            self._lanes_y.append(y)
            y += SHARD_H + GAP
        self._axis_y = y + 4
        self._legend_y = self._axis_y + 40
        self._legend_lines, legend_h = self._legend()
        told = min(len(self._bad), 5)
        self.height = self._legend_y + legend_h + 14 + told * 18

    def lines(self) -> Iterator[str]:
        title = escape(self._t.title or "trace")
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height:g}" '
            f'width="{self.width}" height="{self.height:g}" role="img" '
            f"aria-label={quoteattr(self._t.title or 'trace')}>"
        )
        yield f"<title>{title}</title><style>{STYLE}</style><defs>{PATTERNS}</defs>"
        yield f'<rect class="paper" width="{self.width}" height="{self.height:g}" rx="6"/>'
        yield _text(16, 26, title, "title")
        yield _text(16, 45, escape(self._summary()), "small faint")
        yield from self._calm()
        yield from self._axis()
        yield from self._faults()
        yield _text(16, self._nodes_y - 6, "nodes", "small faint")
        for number, node in enumerate(self._t.nodes):
            yield from self._node(node, self._nodes_y + number * (NODE_H + GAP))
        yield _text(16, self._shards_y - 6, "shards, coloured by owner", "small faint")
        for shard, y in zip(self._t.shards, self._lanes_y, strict=True):
            yield from self._mail(shard, y)
            yield from self._shard(shard, y)
        yield from self._violations()
        yield from self._legend_lines
        yield from self._complaints()
        yield "</svg>"

    def _x(self, at: float) -> float:
        """Where a time is; what began before the picture begins at its edge."""
        return LEFT + max(at - self._t.start, 0.0) / self._span * self._plot

    def _summary(self) -> str:
        faults = sum(mark.kind == "fault" for mark in self._t.marks)
        since = self._t.start
        stays = [stay for lane in self._t.shards for stay in lane.stays if stay.start >= since]
        messages = [sent for lane in self._t.shards for sent in lane.messages if sent.at >= since]
        parts = [
            f"{self._t.end - since:.1f} s, {len(self._t.nodes)} nodes, faults: {faults}",
            f"of the shards shown: hand-offs {sum(one.how == 'released' for one in stays)}",
            f"takeovers {sum(one.how == 'taken over' for one in stays)}",
        ]
        if messages:
            ran = sum(sent.started is not None for sent in messages)
            twice = sum(sent.starts > 1 for sent in messages)
            parts.append(f"messages {len(messages)}, started {ran}, started twice {twice}")
        return ", ".join([*parts, f"violations: {len(self._bad)}"])

    # time

    def _axis(self) -> Iterator[str]:
        step = next(
            (s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 600) if self._span / s <= 16),
            3600,
        )
        tick = -(-(self._t.start - self._zero) // step) * step + self._zero
        while tick <= self._t.end:
            x = self._x(tick)
            yield _line(x, self._nodes_y, x, self._axis_y, "grid")
            shown = f"{tick - self._zero:.6g}"
            yield _text(x, self._axis_y + 14, shown, "small faint", "middle")
            tick += step
        yield _text(LEFT + self._plot, self._axis_y + 28, "seconds", "small faint", "end")

    def _calm(self) -> Iterator[str]:
        for mark in self._t.marks:
            if mark.kind == "quiet":
                x = self._x(mark.at)
                tall = self._axis_y - self._faults_y
                end = LEFT + self._plot
                yield _rect(x, self._faults_y, end - x, tall, 'class="quiet"')
                label = "quiet: no faults from here on"
                yield _text(end - 4, self._faults_y + 9, label, "small faint", "end")

    # faults

    def _place_labels(self) -> tuple[list[tuple[Mark, str, int | None]], int]:
        """Labels of faults and notes, each with a row in which it covers no other, if there is one.

        A note takes the place of the label of a fault of the same moment.
        """
        noted = [mark.at for mark in self._t.marks if mark.kind == "note"]
        ends: list[float] = [0.0]
        placed: list[tuple[Mark, str, int | None]] = []
        for mark in self._t.marks:
            if mark.kind not in ("fault", "note"):
                continue
            x, label = self._x(mark.at), _short(mark)
            if mark.kind == "fault" and mark.at in noted:
                placed.append((mark, label, None))
                continue
            x -= self._leftwards(x, label)
            row = next((n for n, end in enumerate(ends) if end <= x), None)
            if row is None and len(ends) < FAULT_ROWS:
                row = len(ends)
                ends.append(0.0)
            if row is not None:
                ends[row] = x + len(label) * LETTER + 8
            placed.append((mark, label, row))
        return placed, len(ends)

    def _leftwards(self, x: float, label: str) -> float:
        """How far a label at the right edge must stand to the left of its line."""
        width = len(label) * LETTER + 8
        return width if x + width > self.width else 0.0

    def _faults(self) -> Iterator[str]:
        """Labels in rows, each with a line to what was hit."""
        yield _text(16, self._faults_y + 10, "events", "small faint")
        rows = {lane.name: number for number, lane in enumerate(self._t.nodes)}
        for mark, label, row in self._labels:
            x = self._x(mark.at)
            hit = self._nodes_y + rows[mark.node] * (NODE_H + GAP) if mark.node in rows else None
            bottom = self._nodes_y if hit is None else hit
            if mark.kind == "note":
                bottom = self._axis_y
            top = self._faults_y + (0 if row is None else row) * FAULT_H + 4
            shown = f"<title>{mark.at:.3f} {escape(mark.text)}</title>"
            yield f"<g>{shown}{_line(x, top, x, bottom, 'fault')}"
            if row is not None:
                look = "small note" if mark.kind == "note" else "small"
                y, left = self._faults_y + row * FAULT_H + 10, self._leftwards(x, label) > 0
                yield _text(x - 4 if left else x + 4, y, escape(label), look, _anchor(left))
            if hit is not None:
                yield f'<path class="ink" d="M{x:.1f} {hit:.1f}l-3.5 -6h7z"/>'
            yield "</g>"

    # lanes

    def _node(self, lane: NodeLane, y: float) -> Iterator[str]:
        colour = self._colour[lane.name]
        yield f'<rect x="16" y="{y + 8:g}" width="9" height="9" rx="2" fill="{colour}"/>'
        yield _text(32, y + 17, escape(lane.name))
        middle = y + NODE_H / 2
        yield _line(LEFT, middle, LEFT + self._plot, middle, "rail")
        for span in lane.spans:
            x, width = self._x(span.start), self._x(span.end) - self._x(span.start)
            title = f"{lane.name} {span.state}, {span.start:.3f} to {span.end:.3f}"
            if span.state in ("up", "frozen"):
                yield _rect(x, y + 4, width, NODE_H - 6, f'fill="{colour}"', title)
            if span.state == "frozen":
                yield _rect(x, y + 4, width, NODE_H - 6, 'fill="url(#still)"', title)
            elif span.state == "fenced":
                edge = 'class="bad" style="fill:none" stroke-width="1.5"'
                yield _rect(x, y + 5, max(width, 2), NODE_H - 8, edge, title)
            if span.state != "up" and width > len(span.state) * LETTER + 12:
                yield _text(x + 8, middle - 3, span.state, "small faint")
        for start, end in lane.leads:
            x, width = self._x(start), self._x(end) - self._x(start)
            title = f"{lane.name} leads, {start:.3f} to {end:.3f}"
            yield _rect(x, y, max(width, 1), 4, 'class="ink"', title)
        for mark in self._t.marks:
            if mark.kind in ("fence", "evicted") and mark.node == lane.name:
                yield _cross(self._x(mark.at), middle, f"{mark.at:.3f} {mark.text}")

    def _mail(self, lane: ShardLane, y: float) -> Iterator[str]:
        """Every message from where it was sent, above, to where it began to run, in the lane."""
        if not lane.messages:
            return
        top = y - MAIL_H + 12
        yield _text(16, top + 4, "messages", "small faint")
        yield _line(LEFT, top, LEFT + self._plot, top, "rail")
        for sent in lane.messages:
            if sent.at < self._t.start:
                continue
            x, title = self._x(sent.at), escape(f"{sent.at:.3f} {sent.what}")
            yield f'<g><title>{title}</title><circle class="dot" cx="{x:.1f}" cy="{top}" r="1.8"/>'
            if sent.started is not None:
                yield _line(x, top, self._x(sent.started), y + 2, "mail")
            elif sent.told in MISSED and sent.told_at is not None:
                at = self._x(sent.told_at)
                yield _line(x, top, at, top + 12, "mail") + _cross(at, top + 12, sent.told)
            yield "</g>"

    def _shard(self, lane: ShardLane, y: float) -> Iterator[str]:
        middle = y + SHARD_H / 2
        yield _text(16, y + 15, escape(_called(lane)))
        yield _line(LEFT, middle, LEFT + self._plot, middle, "rail")
        for stay in lane.stays:
            yield from self._stay(stay, y)
        for sent in lane.messages:
            yield from self._run(sent, y)
        for stay in lane.stays:
            if stay.start < self._t.start:
                continue
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
        words = "lost with its owner"
        if stay.lost is not None and end - lost_x > len(words) * LETTER + 8:
            yield _text(lost_x + 8, y + SHARD_H + 1, words, "small faint")
        if entry.state == "moving":
            wide = max(lost_x - x, 1.5)
            yield _rect(x, y + 2, wide, SHARD_H - 4, 'fill="url(#leaving)"', title)
        elif stay.how != "kept":
            for words in (f"{stay.owner}, epoch {entry.epoch}", str(entry.epoch)):
                if lost_x - open_x > len(words) * LETTER + 14:
                    yield _text(open_x + 10, y + 15, escape(words), "inside")
                    break

    def _run(self, sent: Sent, y: float) -> Iterator[str]:
        """A handler that took long enough to be seen."""
        if sent.started is not None and sent.finished is not None:
            x, width = self._x(sent.started), self._x(sent.finished) - self._x(sent.started)
            if width > 2:
                title = f"{sent.what} runs at {sent.node}"
                yield _rect(x, y + 2, width, SHARD_H - 4, 'class="runs"', title)

    def _violations(self) -> Iterator[str]:
        for mark in self._bad:
            x = self._x(mark.at)
            yield f"<g><title>{mark.at:.3f} {escape(mark.text)}</title>"
            yield f'<line class="bad" stroke-width="2" x1="{x:.1f}" x2="{x:.1f}" ' \
                  f'y1="{self._faults_y}" y2="{self._axis_y}"/>'  # fmt: skip
            yield f'<path class="bad" d="M{x:.1f} {self._axis_y}l-5 9h10z"/></g>'

    # legend

    def _legend(self) -> tuple[list[str], float]:
        """Only signs that the picture has, so that there is little to read."""
        y, x = self._legend_y, 16.0
        lines: list[str] = []
        for drawn, label in self._signs():
            width = 22 + 6 + len(label) * LETTER + 14
            if x + width > self.width - 8:
                x, y = 16.0, y + 22
            lines.append(f'<g transform="translate({x:.0f} {y:.0f})">{drawn}')
            lines.append(_text(28, 10, label, "small") + "</g>")
            x += width
        return lines, y - self._legend_y + 22

    def _signs(self) -> Iterator[tuple[str, str]]:
        since = self._t.start
        states = {span.state for lane in self._t.nodes for span in lane.spans if span.end >= since}
        stays = [stay for lane in self._t.shards for stay in lane.stays if stay.end >= since]
        hows = {stay.how for stay in stays if stay.start >= since}
        kinds = {mark.kind for mark in self._t.marks}
        messages = [sent for lane in self._t.shards for sent in lane.messages if sent.at >= since]
        sample = next(iter(self._colour.values()), COLOURS[0])
        box = f'width="22" height="12" fill="{sample}"'
        if messages:
            sign = '<circle class="dot" cx="3" cy="1" r="1.8"/><path class="mail" d="M3 1l16 11"/>'
            yield sign, "message: sent (dot), begins to run (end of the line)"
        if any(sent.started is None and sent.told in MISSED for sent in messages):
            yield _cross(11, 6, ""), "its sender was told: not, or perhaps not, executed"
        if any((sent.finished or 0.0) - (sent.started or 0.0) > 0.02 for sent in messages):
            yield (
                f'<rect {box}/><rect class="runs" x="6" width="10" height="12"/>',
                "a handler runs",
            )
        yield f"<rect {box}/>", "node is up, shard is served"
        if "frozen" in states:
            yield f'<rect {box}/><rect width="22" height="12" fill="url(#still)"/>', "frozen"
        if "fenced" in states:
            yield '<rect class="bad" style="fill:none" width="22" height="12"/>', "fenced"
        yield f'<rect {box}/><rect class="ink" width="22" height="4"/>', "coordinates (leads)"
        if any(stay.entry.state == "moving" for stay in stays):
            sign = f'<rect {box}/><rect width="22" height="12" fill="url(#leaving)"/>'
            yield sign, "shard is leaving"
        if any(stay.lost is not None or stay.opened != stay.start for stay in stays):
            sign = f'<rect y="4.5" width="22" height="3" fill="{sample}"/>'
            yield sign, "not yet open, or owner lost"
        if "released" in hows:
            yield '<path class="ink" d="M11 1l4 5l-4 5l-4 -5z"/>', "hand-off"
        if "taken over" in hows:
            yield '<path class="ink" d="M11 1l4.5 9h-9z"/>', "takeover, owner gone"
        if "fault" in kinds:
            yield '<path class="ink" d="M11 11l-3.5 -6h7z"/>', "fault"
        if "fence" in kinds or "evicted" in kinds:
            yield _cross(11, 6, ""), "fence or eviction"
        if self._bad:
            yield '<path class="bad" d="M11 1l-5 9h10z"/>', "violation"

    def _complaints(self) -> Iterator[str]:
        y = self.height - min(len(self._bad), 5) * 18 - 8
        for mark in self._bad[:5]:
            y += 18
            most = int((self.width - 32) / LETTER)
            told = f"{mark.at:.3f}  {mark.text}"
            told = told if len(told) <= most else told[: most - 3] + "..."
            yield _text(16, y - 6, escape(told), "small badtext")


def _called(lane: ShardLane) -> str:
    """A lane's label: the entity if all messages are to one, else the shard."""
    entities = list(dict.fromkeys(sent.what.split()[1] for sent in lane.messages))
    if len(entities) == 1 and len(entities[0]) * LETTER < LEFT - 16:
        return entities[0]
    return f"{lane.shard.role}/{lane.shard.shard}"


def _short(mark: Mark) -> str:
    """A fault's label: without its prefix, nodes by number."""
    label = mark.text.removeprefix("fault: ")
    number = mark.node.rpartition("-")[2]
    return label.replace(mark.node, number) if mark.node else label


def _anchor(left: bool) -> str:
    return "end" if left else "start"


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
