"""A trace as a timeline in words: a lane per node, a line per event, then each hot shard by itself.

Writes what `trace` found and judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from domicile.testing.timeline.trace import Mark, Stay, Trace

MOMENT_S = 0.002
"""Phases closer together than this are told on one line."""

HOW = {
    "first": "first home",
    "released": "released by the one before",
    "taken over": "the owner before was gone",
    "kept": "kept",
}


def text(traced: Trace) -> str:
    """The timeline as lines: a lane per node, what happened, then each hot shard by itself."""
    names = [lane.name for lane in traced.nodes]
    lines = [traced.title] if traced.title else []
    lines.append("lanes: " + ", ".join(f"{n} {name}" for n, name in enumerate(names)))
    lines.append("signs: L leads  | up  z frozen  x fenced  . down  ! violation")
    lines += ["", "    time  " + " ".join(str(n % 10) for n in range(len(names)))]
    for mark in _gathered(traced.marks):
        signs = " ".join(lane.sign(mark.at) for lane in traced.nodes)
        flag = "! " if mark.kind == "violation" else ""
        lines.append(f"{mark.at:8.3f}  {signs}  {flag}{mark.text}")
    for lane in traced.shards:
        lines += ["", f"{lane.shard.role}/{lane.shard.shard}"]
        lines += [f"{stay.start:8.3f}  {_stay(stay)}" for stay in lane.stays]
    return "\n".join(lines) + "\n"


def _gathered(marks: Sequence[Mark]) -> Iterator[Mark]:
    """Shards that do the same at the same node in one moment, on one line."""
    waiting: list[Mark] = []
    for mark in marks:
        if waiting:
            first = waiting[0]
            same = (mark.kind, mark.node, mark.does) == (first.kind, first.node, first.does)
            if same and mark.at - first.at < MOMENT_S:
                waiting.append(mark)
                continue
            yield _joined(waiting)
            waiting = []
        if mark.kind == "phase":
            waiting = [mark]
        else:
            yield mark
    if waiting:
        yield _joined(waiting)


def _joined(marks: Sequence[Mark]) -> Mark:
    named = ", ".join(mark.text for mark in marks)
    first = marks[0]
    return Mark(first.at, first.kind, f"{named} {first.does} at {first.node}", first.node)


def _stay(stay: Stay) -> str:
    entry = stay.entry
    if entry.state in ("free", "quarantined"):
        return f"{entry.state} after epoch {entry.epoch}"
    where = f"{stay.owner}@{entry.epoch}"
    if entry.state == "moving":
        return f"{where} moving to {stay.to or 'nobody'}"
    if stay.how == "kept":
        return f"{where} serving again: the move was taken back"
    opened = "never opened" if stay.opened is None else f"open {stay.opened - stay.start:+.3f} s"
    lost = "" if stay.lost is None else f", lost with its owner at {stay.lost:.3f}"
    return f"{where} serving ({HOW[stay.how]}, {opened}{lost})"
