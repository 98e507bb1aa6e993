"""Control planes: which process decides who owns what. Theory of operation.

All planes produce the same thing: a shard map with epochs in the store, which every process watches
and caches. So the message path knows no plane, and an incarnation knows only the port
(`ports.control.ControlPlane`). It makes its plane by name (`planes`), feeds it what the store and
the peers say, reports to it as an owner, and asks it when a leaving node may go. Planes are shells:
they carry out what machines in `core` decide, and decide nothing about shards themselves.

**elected** is the plane of today; a manager is the same plane in a process that is home to nothing.
At most one process leads, and it says so by the leader key in the store, under a lease of its own:

    following --key absent, own rank's turn--> campaigning --key won--> leading --end--> following

- `Elected`        the plane. What this process says to the leader and hears from it: releases,
                   wishes to keep a shard, lost nodes, probes. If this process leads itself, it
                   tells itself, without a link.
- `Candidate`      campaigns when the key is absent (C1), and makes a `Leadership` if it wins.
- `Leadership`     one term of office: drives one `core.coordinator` machine; tells nodes, pings
                   them, asks for probes, asks a user's allocation function (`StrategyRunner`).
- `MachineDriver`  what is the same for any machine `step(event, now) -> effects` that decides by
                   what the store says: inbox, timer, lease, listing, commits, reads.
- `PeerProbe`      a member's answer to the leader's question whether it reaches a node (C6).

Who calls whom: the incarnation calls `Elected`; `Elected` feeds the `Candidate`; the `Candidate`
feeds its `Leadership`; the `Leadership` steps the machine and carries out its effects. Back to
others it goes by the callables of `ControlWiring` only: send, learn, check_alive.

**A term.** The driver lists the store, then feeds the machine what the watch brought since (C2).
Every use compares the guard and the lease first, never a timer alone. Whatever ends a term (a
fence, a lease that was not renewed, a conflict on the leader key, a bug in the machine) ends it at
once: timers, tasks and memory go, and the next term begins from the store.

**A release that no leader hears.** The owner repeats it every second. If no leader was in reach for
a second, the plane writes `release/...` into the store, where the next leader finds it (H10).

Invariants: C1 every commit of a term is conditional on its own leader key, so two terms can overlap
in time but not in effect; L1 nothing is sent or committed past the deadline of the leader lease;
I3 nodes are told only what is stored; I6 commits that pass while the first listing is under way
are bounded, and so are the calls of a user's function.

Where to change what: what may be committed, and when, is in `core.coordinator`; who may lead, and
when to try, in `core.coordinator.election`; when a leaving node must stay, in
`core.coordinator.departures`. A second plane (`leases`, `external`) is a module here and a row in
`planes`; the docstrings of the port say what each method means without a leader. A machine of
another kind gets a subclass of `MachineDriver`.
Reading order: `ports.control`, `planes`, `elected`, `candidate`, `driver`, `leadership`,
`strategy_runner`, `peer_probe`.
"""
