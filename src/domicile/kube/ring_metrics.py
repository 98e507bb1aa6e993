"""The sharder's metrics, with the names that the controller sharding project gave them.

Counted by `sharding`, read by a scraper through `families`. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from domicile.observe.exposition import Labels, MetricFamily, Sample

PREFIX = "controller_sharding_"

HELP = {
    "assignments": "Objects that were given an instance, because they had none.",
    "movements": "Objects that were moved from an instance that is gone, or after their owner.",
    "drains": "Objects that an instance was asked to let go of.",
    "ring_calculations": "How often a ring was formed anew.",
}


class RingMetrics:
    """Counters and gauges of all rings of one process."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[Labels, int]] = {name: {} for name in HELP}
        self._states: dict[str, Mapping[str, str]] = {}
        self._available: dict[str, int] = {}

    def count(self, name: str, labels: Labels) -> None:
        """Count one more of something in `HELP`."""
        found = self._counts[name]
        found[labels] = found.get(labels, 0) + 1

    def total(self, name: str) -> int:
        """A counter, whatever its labels."""
        return sum(self._counts[name].values())

    def show(self, ring: str, states: Mapping[str, str], available: int) -> None:
        """The instances of a ring as they are now."""
        self._states[ring], self._available[ring] = states, available

    def forget(self, ring: str) -> None:
        """A ring is gone: its gauges go, its counters stay."""
        self._states.pop(ring, None)
        self._available.pop(ring, None)

    def families(self) -> list[MetricFamily]:
        """Everything, for a scraper."""
        found = [
            MetricFamily(
                f"{PREFIX}{name}_total",
                "counter",
                help,
                [Sample(count, labels) for labels, count in self._counts[name].items()],
            )
            for name, help in HELP.items()
        ]
        info: list[Sample] = []
        state: list[Sample] = []
        shards: list[Sample] = []
        available: list[Sample] = []
        for ring, states in sorted(self._states.items()):
            of_ring = (("controllerring", ring),)
            shards.append(Sample(len(states), of_ring))
            available.append(Sample(self._available[ring], of_ring))
            for shard, value in sorted(states.items()):
                info.append(Sample(1, (*of_ring, ("shard", shard))))
                state.append(Sample(1, (*of_ring, ("shard", shard), ("state", value))))
        gauges = (
            ("shard_info", "The instances of a ring.", info),
            ("shard_state", "Their states.", state),
            ("controllerring_status_shards", "How many instances a ring has.", shards),
            ("controllerring_status_available_shards", "How many of them are there.", available),
        )
        return found + [
            MetricFamily(f"{PREFIX}{name}", "gauge", help, samples)
            for name, help, samples in gauges
        ]
