"""Which shard a call belongs to, if the cluster and this process mean the same type (RG-24).

Used by `outbound` alone. It decides from the config record and from the types that this process
registered. It never looks at homes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from domicile.core.ids import ShardKey
from domicile.core.state.agreement import mismatch
from domicile.core.state.records import TypeRecord
from domicile.entity.model.ref import Call
from domicile.errors import NotExecuted, Unavailable

if TYPE_CHECKING:
    from domicile.entity.runtime import Runtime


class NoNodeUp(Exception):
    """No node of the role is up, so nobody can say yet which types it will serve."""


class Routing:
    """Finds shards, and remembers how many each type has."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._seen: dict[tuple[str, str, str], int] = {}
        """Number of shards by (role, type, shard function), after the cluster's type was found the
        same."""

    def shard_of(self, call: Call) -> ShardKey:
        """The shard that a call belongs to; raises `NotExecuted` if there is none.

        Raises `NoNodeUp` while it cannot be known: the call waits for a node (DX-27).
        """
        kind = call.kind
        asked = (kind.role, kind.name, kind.shard_id)
        shards = self._seen.get(asked)
        if shards is None:
            shards = self._seen[asked] = self._shards_of(*asked)
        return ShardKey(kind.role, call.place(call.entity, shards))

    def has_node(self, role: str) -> bool:
        """Whether a node of the role is up, so that its types are known."""
        return bool(self._runtime.members.types(role))

    def _shards_of(self, role: str, kind: str, shard_id: str) -> int:
        """How many shards a type has, if it is the same type here and in the cluster (RG-24)."""
        members = self._runtime.members
        config = members.config
        wanted = TypeRecord(role, shard_id)
        own = self._runtime.catalogue.get(kind)
        known = None if config is None else config.types.get(kind)
        if own is not None:
            known = own.record
        why = mismatch(kind, known or wanted, wanted)
        if why:
            raise NotExecuted(why)
        if own is not None:
            # This process registered the type itself, and its watch may not have shown that yet.
            # Joining agreed with the config on the number of shards.
            return self._runtime.shards.get(role, self._runtime.settings.shards)
        if not members.knows_type(role, kind):
            registered = members.types(role)
            if not registered:
                raise NoNodeUp
            raise Unavailable(
                f"no node has registered entity type {kind!r} in role {role!r} (registered: "
                f"{', '.join(registered)}); start a node with entities=[...] listing it"
            )
        assert config is not None, "a node registers its roles in the config before itself"
        return config.shards[role]
