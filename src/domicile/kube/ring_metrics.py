"""The sharder's metrics, with the names that the controller sharding project gave them.

Counted by `sharding`, read by a scraper through `families`. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from domicile.kube.leases import InstanceState
from domicile.kubeapi.objects import ControllerRing
from domicile.observe.exposition import Labels, MetricFamily, Sample

PREFIX = "controller_sharding_"

HELP = {
    "assignments": "Objects that were given an instance, because they had none.",
    "movements": "Objects that were moved from an instance that is gone, or after their owner.",
    "drains": "Objects that an instance was asked to let go of.",
    "ring_calculations": "How often a ring was formed anew.",
}


OF_RING = {
    "metadata_generation": "The generation of a ring.",
    "observed_generation": "The generation that the ring's status speaks of.",
    "status_shards": "How many instances a ring has.",
    "status_available_shards": "How many of them are there.",
}

STATES = (*(state.value for state in InstanceState), "unknown")
"""The values of a state set: each is a sample, of which one is 1."""


@dataclass(frozen=True, slots=True)
class ShownInstance:
    """An instance for a scraper."""

    name: str
    namespace: str
    uid: str
    state: InstanceState


ShownRing = tuple[ControllerRing, Sequence[ShownInstance]]
"""A ring and its instances."""


class RingMetrics:
    """Counters and gauges of all rings of one process."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[Labels, int]] = {name: {} for name in HELP}
        self._rings: dict[str, Callable[[], ShownRing]] = {}

    def count(self, name: str, labels: Labels) -> None:
        """Count one more of something in `HELP`."""
        found = self._counts[name]
        found[labels] = found.get(labels, 0) + 1

    def total(self, name: str) -> int:
        """A counter, whatever its labels."""
        return sum(self._counts[name].values())

    def show(self, ring: str, now: Callable[[], ShownRing]) -> None:
        """Have a ring shown; `now` tells a scraper what it is when it asks."""
        self._rings[ring] = now

    def forget(self, ring: str) -> None:
        """A ring is gone: its gauges go, its counters stay."""
        self._rings.pop(ring, None)

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
        numbers: dict[str, list[Sample]] = {name: [] for name in OF_RING}
        for name, now in sorted(self._rings.items()):
            ring, instances = now()
            of_ring = (("controllerring", name), ("uid", ring.metadata.uid))
            values = (
                ring.metadata.generation,
                ring.status.observed_generation,
                len(instances),
                sum(one.state.available for one in instances),
            )
            for samples, value in zip(numbers.values(), values, strict=True):
                samples.append(Sample(value, of_ring))
            for one in instances:
                of_shard = (
                    ("namespace", one.namespace), ("shard", one.name), ("controllerring", name),
                )  # fmt: skip
                info.append(Sample(1, (*of_shard, ("uid", one.uid))))
                for known in STATES:
                    state.append(
                        Sample(int(known == one.state.value), (*of_shard, ("state", known)))
                    )
        gauges = [
            ("shard_info", "The instances of a ring.", info),
            ("shard_state", "Their states: 1 for the present one, 0 for the others.", state),
            *((f"controllerring_{name}", OF_RING[name], found) for name, found in numbers.items()),
        ]
        return found + [
            MetricFamily(f"{PREFIX}{name}", "gauge", help, samples)
            for name, help, samples in gauges
        ]
