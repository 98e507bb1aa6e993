"""Messages for entity types that this node lacks, although it is home to their shard (DX-26).

Made by the runtime, asked by shard hosts before an entity first starts. Such messages wait in their
mailboxes while the leader can move the shard to a node that has the type. The move returns them to
their senders in order, as it returns every message that has not started (H8-H10). Messages that no
move can help are refused at once. The leader learns of the need from the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from domicile.core.handoff.tables import Phase
from domicile.core.ids import EntityKey, LinkKey, ShardKey
from domicile.core.placement.model import fitting, willing
from domicile.entity.hosting.cell import Incoming
from domicile.errors import Unavailable
from domicile.taglog import TaggedLog

if TYPE_CHECKING:
    from domicile.entity.hosting.shard_host import ShardHost
    from domicile.entity.runtime import Runtime

log = TaggedLog()

NEWS_S = 2.0
"""Seconds that messages for a type wait although no node is known here to have it: their sender may
know a node that this process has not seen yet."""

MOST = 1_024
"""I6: types that are remembered because no node is known to have them."""

PATIENCE = 2
"""Sweeps that a nested message may wait in a shard that drains while its own handlers wait."""

LATE = "its time ran out before the leader could move its shard to a node that has it"
HERE = "a handler of the same shard waits for it, so the shard can't move to a node that has it"
ENTANGLED = "handlers of its shard seem to wait for it, so the shard can't move to such a node"


class UnservedMessages:
    """One incarnation's messages for types that it lacks. `note` stores that a shard needs one."""

    def __init__(self, runtime: Runtime, note: Callable[[ShardKey, str], None]) -> None:
        self._runtime, self._note = runtime, note
        self._hosts: dict[ShardHost, int] = {}
        """Hosts that have such messages, and how many sweeps found them draining and waiting."""
        self._noted: dict[tuple[ShardKey, str], None] = {}
        """What was noted since the last sweep."""
        self._unknown: dict[str, float] = {}
        """Types that no node is known to have, and since when messages for them come."""
        self._warned: dict[str, None] = {}

    def keeps(self, host: ShardHost, entity: EntityKey) -> bool:
        """Whether the messages of an entity wait here; if not, they must be refused."""
        shard, kind = host.shard, entity.type
        if self._can_move(shard, kind):
            self._unknown.pop(kind, None)
            self._ask_to_move(shard, kind)
        elif not self._may_come(shard, kind):
            return False
        self._hosts.setdefault(host, 0)
        self._refuse(host, (entity,), HERE, lambda queued: _waits_for(shard, queued))
        return True

    def look(self) -> None:
        """A node came or is gone: it may be the first or the last one with a type that messages
        wait for."""
        self._unknown.clear()
        for host in self._hosts:
            host.look_again(self._entities(host))

    def sweep(self, now: float) -> None:
        """Refuse what waited too long, and note again what the store does not hold."""
        self._noted.clear()
        for host in list(self._hosts):
            entities = self._entities(host)
            self._refuse(host, entities, LATE, lambda queued: now >= queued.expires_at)
            if not entities:
                del self._hosts[host]
                continue
            stuck = host.owner.phase is Phase.DRAINING and self._runtime.sending.awaits(host.shard)
            self._hosts[host] = self._hosts[host] + 1 if stuck else 0
            if self._hosts[host] >= PATIENCE:
                self._refuse(host, entities, ENTANGLED, lambda queued: queued.nested)
            host.look_again(entities)

    def _entities(self, host: ShardHost) -> list[EntityKey]:
        catalogue = self._runtime.catalogue
        return [entity for entity in host.owner.mailboxes if entity.type not in catalogue]

    def _can_move(self, shard: ShardKey, kind: str) -> bool:
        """Whether another node may get the shard and has all types that the shard needs."""
        members = self._runtime.members
        nodes = willing(members.nodes, shard.role, members.drains)
        fit = fitting(nodes, (kind, *members.needs.get(shard, ())))
        return any(kind in nodes[node].types for node in fit)

    def _may_come(self, shard: ShardKey, kind: str) -> bool:
        """Whether this process may not have seen yet that a node with the type is there."""
        if self._runtime.members.knows_type(shard.role, kind):
            return False
        now = self._runtime.clock.now()
        if kind not in self._unknown and len(self._unknown) >= MOST:
            return False
        return now < self._unknown.setdefault(kind, now) + NEWS_S

    def _ask_to_move(self, shard: ShardKey, kind: str) -> None:
        runtime = self._runtime
        if kind in runtime.members.needs.get(shard, ()) or (shard, kind) in self._noted:
            return
        self._noted[shard, kind] = None
        self._note(shard, kind)
        if kind not in self._warned:
            self._warned[kind] = None
            log.warning(
                "node %s lacks entity type %r, which other nodes of role %r have: messages for it "
                "wait until the leader has moved their shards to such a node; list the type in "
                "entities=[...] of all nodes of a role, or give it a role of its own",
                runtime.node_id, kind, shard.role, extra={"node": runtime.node_id},
            )  # fmt: skip

    def _refuse(
        self,
        host: ShardHost,
        entities: Iterable[EntityKey],
        why: str,
        wanted: Callable[[Incoming], bool],
    ) -> None:
        """Refuse those of some entities' messages that are wanted."""
        node = self._runtime.node_id
        for entity in entities:
            mailbox = host.owner.mailboxes.get(entity)
            found: dict[tuple[LinkKey, int], None] = {
                (queued.source, queued.n): None
                for queued in (() if mailbox is None else mailbox.queue)
                if wanted(queued)
            }
            if found:
                name = f"{entity.type} {entity.id!r}"
                host.refuse(
                    found, Unavailable(f"{name} did not run: node {node} lacks that type; {why}")
                )


def _waits_for(shard: ShardKey, queued: Incoming) -> bool:
    """Whether a handler of a shard waits for a message."""
    return queued.nested and any(
        (caller.role, caller.shard) == shard for caller in queued.request.chain
    )
