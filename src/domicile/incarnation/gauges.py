"""The gauges of one incarnation, computed when a scraper asks. Called by `incarnation.observation`
only.

Reads and never changes: no clock is armed, no guard asked, nothing counted. Its cost grows with the
shards of the cluster and with mailboxes that hold mail, never with resident entities (I8).
"""

from __future__ import annotations

from collections import Counter
from math import inf

from domicile.core.handoff.tables import Phase
from domicile.core.placement.suspicion import loses_owners
from domicile.incarnation.incarnation import RunningIncarnation
from domicile.observe.exposition import MetricFamily, Sample, gauge, gauges


def gauges_of(life: RunningIncarnation) -> list[MetricFamily]:
    """The gauges of an incarnation that stands."""
    members, runtime = life.member.members, life.runtime
    phases: Counter[tuple[str, str]] = Counter()
    residents: Counter[str] = Counter(dict.fromkeys(runtime.shards, 0))
    messages: Counter[str] = Counter(dict.fromkeys(runtime.shards, 0))
    for (role, _), host in runtime.hosts.items():
        if host.owner.phase is not Phase.CLOSED:
            phases[role, host.owner.phase.value] += 1
        residents[role] += len(host.cells)
        messages[role] += sum(len(mailbox.queue) for mailbox in host.owner.mailboxes.values())
    asks = runtime.sending.open_asks
    held = sum(len(sender.queue) for sender in runtime.sending.senders.values())
    shards = [
        Sample(count, (("role", role), ("phase", phase)))
        for (role, phase), count in sorted(phases.items())
    ]
    away = {"shards": 0, "entities": 0}
    losing = 0
    for _, entry in members.map:
        away["shards"] += entry.state == "quarantined"
        away["entities"] += len(entry.barred)
        losing += loses_owners(entry)
    found = [
        MetricFamily(
            "domicile_turns_total", "counter", "Handlers begun.", (Sample(runtime.observer.turns),)
        ),
        gauge("domicile_nodes", "Nodes and managers in the store.", len(members.nodes)),
        gauge("domicile_clients", "Clients in the store.", len(members.clients)),
        gauge("domicile_leading", "1 while this process coordinates.", life.control.leading),
        MetricFamily("domicile_shards", "gauge", "Shards at this node by phase.", shards),
        gauges("domicile_quarantined", "Shards and entities put away (DX-20).", "what", away),
        gauge(
            "domicile_shards_losing_owners",
            "Shards that lost three owners in a row or more, with no entity to blame (DX-24).",
            losing,
        ),
        gauges("domicile_residents", "Entities in memory.", "role", residents),
        gauges("domicile_mailbox_messages", "Messages that wait for a turn.", "role", messages),
        gauge("domicile_held_messages", "Messages sent here whose shard has no home yet.", held),
        gauge("domicile_open_asks", "Asks of this process without an answer.", asks),
    ]
    if life.links is not None:
        up, waiting = life.links.links_up, life.links.waiting_bytes
        found += [
            gauge("domicile_links", "Links with a live connection.", up),
            gauge("domicile_link_waiting_bytes", "Bytes the kernel did not take yet.", waiting),
        ]
    if life.loop_watch is not None:
        text = "How long the event loop took to call back when it was last asked."
        found.append(gauge("domicile_loop_lag_seconds", text, round(life.loop_watch.lag_s, 6)))
    left_s = life.lease_left_s
    if left_s < inf:
        text = "For how long this process may act without another renewal (L1)."
        found.append(gauge("domicile_lease_remaining_seconds", text, round(left_s, 3)))
    return found
