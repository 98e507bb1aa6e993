"""The names on the wire: labels, annotations, resources. They are those of the controller sharding
project, so that its instances and ours understand each other (KR-15). Pure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

GROUP = "sharding.timebertt.dev"

SHARD_LABEL = f"shard.alpha.{GROUP}/"
"""Before the ring's name: which instance an object belongs to."""

DRAIN_LABEL = f"drain.alpha.{GROUP}/"
"""Before the ring's name: the instance is asked to let go of the object."""

RING_LABEL = f"alpha.{GROUP}/controllerring"
"""On Leases: of which ring the instance is a member."""

STATE_LABEL = f"alpha.{GROUP}/state"
"""On Leases: the state as the sharder sees it. It is shown to people and never read."""

INCARNATION = "domicile.dev/incarnation"
"""Annotation of a Lease: which run of the instance holds it."""

ABSENT = "domicile.dev/was-absent"
"""Annotation of a Lease that the sharder made because an instance had none."""

HASH = "domicile.dev/hash"
"""Annotation of a ring: `bounded` asks for the ring with bounded load (K6)."""

SHARDER = "shardlease-controller"
"""The holder of a Lease that the sharder has taken."""

DEFAULT_DURATION_S = 15
"""The duration of a Lease that names none."""

MAX_DURATION_S = 600
"""The longest duration that an instance of ours may ask for. A longer one in another Lease counts
in full, and an event names it."""

WEBHOOK_PATH = "/webhooks/sharder/controllerring/"


def shard_label(ring: str) -> str:
    """The label that names an object's instance."""
    return SHARD_LABEL + ring


def drain_label(ring: str) -> str:
    """The label that asks an instance to let go."""
    return DRAIN_LABEL + ring


_GENERATED = re.compile(r"[^-].*-(?=.*[a-z])[bcdfghjklmnpqrstvwxz2456789]{5}")


def is_generated_name(name: str) -> bool:
    """Whether the API server has made up a pod's name, as it does for Deployments: by the five
    letters and digits at its end. A StatefulSet's pod has its number there."""
    return _GENERATED.fullmatch(name) is not None


def webhook_name(ring: str) -> str:
    """The name of a ring's MutatingWebhookConfiguration."""
    return f"controllerring-{ring}"


class GroupResource(NamedTuple):
    """A resource without its version: `("apps", "deployments")`."""

    group: str
    resource: str

    def __str__(self) -> str:
        return f"{self.resource}.{self.group}" if self.group else self.resource


class ObjectName(NamedTuple):
    """One object of the cluster."""

    resource: GroupResource
    namespace: str
    name: str

    def __str__(self) -> str:
        where = f"{self.namespace}/" if self.namespace else ""
        return f"{self.resource} {where}{self.name}"
