"""The text format in which Prometheus and similar tools read metrics, version 0.0.4. Pure.

Used by `observe.metrics` and by code that adds gauges to it. It escapes what must be escaped and
checks nothing else: names come from the program, never from a message.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[tuple[str, str], ...]

NO_LABELS: Labels = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One line: a number, its labels, and the suffix of the family's name."""

    value: float
    labels: Labels = NO_LABELS
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """All samples of one name."""

    name: str
    kind: Kind
    help: str
    samples: Sequence[Sample] = field(default_factory=tuple[Sample, ...])


class Histogram:
    """How often values were at or below each of some bounds. Not for several threads at once."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Take one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self, labels: Labels = NO_LABELS) -> list[Sample]:
        """Its lines: cumulative buckets, then sum and count."""
        found: list[Sample] = []
        below = 0
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            below += count
            found.append(Sample(below, (*labels, ("le", number(bound))), "_bucket"))
        return [*found, Sample(self._sum, labels, "_sum"), Sample(below, labels, "_count")]


def gauge(name: str, help: str, value: float) -> MetricFamily:
    """A gauge without labels."""
    return MetricFamily(name, "gauge", help, (Sample(value),))


def gauges(name: str, help: str, label: str, values: Mapping[str, float]) -> MetricFamily:
    """A gauge with one label, in the order of its values."""
    samples = [Sample(value, ((label, key),)) for key, value in sorted(values.items())]
    return MetricFamily(name, "gauge", help, samples)


def write(families: Iterable[MetricFamily]) -> str:
    """The whole text. A family without samples is left out."""
    lines: list[str] = []
    for family in families:
        if not family.samples:
            continue
        lines.append(f"# HELP {family.name} {_escaped(family.help)}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for sample in family.samples:
            lines.append(
                f"{family.name}{sample.suffix}{_labels(sample.labels)} {number(sample.value)}"
            )
    return "".join(f"{line}\n" for line in lines)


def number(value: float) -> str:
    """A number as the format writes it."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(value)


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    inner = ",".join(f'{name}="{_quoted(value)}"' for name, value in labels)
    return "{" + inner + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"")
