"""What may be committed about where shards are, and when. Theory of operation.

`machine.Coordinator` is one leadership: `step(event, now) -> effects`. Events and effects are in
`events`. A driver in `domicile.control` feeds the machine what the store and the nodes report. It
also carries out the effects: commit, read again, tell a node, ask for a probe, set a timer, resign.
After it has resigned, the object returns no effects.

**The round.** A round begins when something changed or a timer fired. A round that balances is left
out if the last one found nothing and neither an event nor time has changed its input since (I8).
The machine prunes what owners reported (`reports`) and asks `core.placement.plan` what should be.
It drops what must wait (`waiting`, `departures`) and drafts one commit per block of the map
(`commits`). A round does not wait for all releases: the leader commits each shard's new owner as
soon as that shard is released, batched for 5 ms (H12).

**Slices.** With many shards a round pauses after some milliseconds of work and goes on with the
next `Tick`, which the machine asks for at once. Meanwhile it takes other events. They do not stop
the round: the next one decides about what they change. So a decision is drafted only if its block,
the records of its nodes and the wish for its shard are still as planned.

**Why a commit cannot do harm.** Every commit has conditions. The revision of the leader key: a
deposed leader changes nothing (C1). The revision of the block: no change is lost. The new owner's
record is present and, for a takeover, the old owner's record is absent (C4). The leader tells nodes
only what is stored (I3), and they merge it by `change` (C3), so repeating an entry is harmless. The
machine reads a commit of unknown outcome again and recognises it by its transaction id (S1).

**What it remembers.** Only what can be lost without harm: when each node was last heard, releases
that are not committed yet, and commits without an outcome. A new leader starts from the store
alone (C2). A report may come before the leader knows the shard's entry. It is kept, but it counts
only once the store names its sender as the owner in that epoch (J1, DX-08).

- `events`           what goes in and what comes out
- `reports`          what owners reported: releases, requests to keep a shard, when they were heard
- `commits`          drafts of commits, housekeeping of old keys, pauses after conflicts
- `waiting`          the first placement waits until no more nodes register (C8)
- `departures`       leaving nodes become empty in small steps; the last eligible leader stays until
                     they are empty (H14)
- `eviction`         a node that renews but that the other members cannot reach is evicted (C6)
- `quarantine`       what dead owners had on trial, how long deaths and quarantines last (DX-20);
                     `core.placement.suspicion` says who is blamed
- `election`         which nodes may lead, and when they try (C1)
- `custom_strategy`  a user's own allocation function: the leader asks it and waits for it, but
                     works without its answer

Reading order: `events`, `machine`, `reports`, `commits`, then the others as needed.
"""
