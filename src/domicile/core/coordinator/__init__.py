"""What may be committed about where shards are, and when. Theory of operation.

`machine.Coordinator` is one leadership: `step(event, now) -> effects`. Events and effects are in
`events`. A driver in `domicile.control` feeds it what the store and the nodes say, and carries out
its effects: commit, read again, tell a node, ask for a probe, set a timer, resign. One object is
one term of office; once it has resigned it says nothing more.

**The round.** Something changed, or a timer came. The machine prunes what owners reported
(`reports`), asks `core.placement.plan` what should be, drops what must wait (`waiting`,
`departures`), drafts one commit per block of the map (`commits`) and hands it out. The round is no
barrier: each shard's new owner is committed as soon as its own release arrives, batched for 5 ms
(H12).

**Why a commit cannot do harm.** Every commit is conditional on the revision of the leader key, so a
deposed leader changes nothing (C1); on the revision of its block, so no change is lost; on the new
owner's record being present and, for a takeover, on the old owner's record being absent (C4). Nodes
are told only what is stored (I3), and they merge it by `change` (C3): repeating history is
harmless. A commit of unknown outcome is read again and recognised by its transaction id (S1).

**What it remembers.** Only what can be lost without harm: who was heard when, who released what and
has not been heeded yet, which commits are out. A new leader starts from the store alone (C2).

- `events`           what goes in and what comes out
- `reports`          what owners said: releases, wishes to keep a shard, signs of life
- `commits`          drafts of commits, housekeeping of old keys, pauses after conflicts
- `waiting`          the first placement waits until registrations are quiet (C8)
- `departures`       nodes that leave empty in small steps; the last eligible leader sees them off
                     (H14)
- `eviction`         a node that nobody reaches but that renews is evicted by agreement (C6)
- `quarantine`       shards that lost several owners in a row (DX-20)
- `election`         who may lead, and when to try (C1)
- `custom_strategy`  a user's own allocation function: asked, waited for, never relied upon

Reading order: `events`, `machine`, `reports`, `commits`, then the rest as they are needed.
"""
