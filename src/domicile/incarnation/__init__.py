"""One run of a process, from its registration to its end. Theory of operation.

A process has one incarnation after another. Each has 128 random bits as its name, a lease, links,
senders, shard hosts and a control plane, and none of these is ever used by the next one (L5).

    begin --registered--> run --leave--> over --> ended
                           run --fenced--> over --> ended --> the supervisor begins the next one

- `RunningIncarnation`  wires store, transport and journal to the member, the control plane and the
                        runtime; passes on what they report; leaves; ends.
- `Dispatcher`          what peers say: one table from message type to the part that takes it, for
                        each direction. Runtime and control plane bring their own rows.
- `Shutdown`            what a leaving process waits for, each wait with a deadline (H14).
- `StoreTasks`          small calls to the store that belong to no other part.
- `Supervisor`          begins the next incarnation after a fence; gives up after several that
                        failed at once. Refs of a node or client send through its current one.
- `Observation`, `gauges`  what operators see; they look and change nothing.
- `Backends`, `Identity`   what a process is wired to, and what it wants to be. Data only.

**Begin.** Make all parts, end what earlier incarnations owe the store, listen, register. No peer
dials before the record with the address is in the store.

**Run.** The member renews and watches. Each commit goes to the cluster view first; then its facts
go to the runtime (`on_fact`), then the commit to the control plane (`on_changes`). Peers' messages
come through the links to the `Dispatcher`. The incarnation is on no message's path.

**Leave (H14).** The order matters:
1. say so in the store, so that the coordinator moves the shards away;
2. wait until every shard is released and its next home stored, and all own asks are answered;
3. stay for others that leave too, if the control plane needs this process for that;
4. say goodbye to all that have dialled, until they know it and everything sent is acknowledged;
5. resign from control, give up the lease.
When each of these may end is decided in `core.coordinator.departures` and by the links.

**End (L5).** After leaving or a fence, `_end` stops everything in a fixed order, each step even if
one before it failed: handlers stop before the lease is given back, or they would run beside their
successors (I1). What could not be revoked is *owed*, and the next incarnation revokes it.

Invariants: I1 nothing of an incarnation runs past its lease; L3 guards are compared before every
use, so a fence needs no cooperation; I6 no wait without a deadline. No control plane, store or
transport is named here: `control.planes` and `backends` know them.

Reading order: `context`, `incarnation` (`begin`, `run`, `leave`, `_end`), `dispatch`, `shutdown`,
`supervisor`, then the rest as needed.
"""
