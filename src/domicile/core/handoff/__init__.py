"""How a shard moves without losing, duplicating or reordering a message. Theory of operation.

A planned move is two commits. The first makes the entry *moving*: the owner empties the shard. The
second makes it *serving* at the next owner, under the next epoch. In between, the old owner
finishes what runs and returns what has not started, and senders hold their messages. Nobody waits
for all senders, so a silent sender stalls no move. No node ever forwards a message.

Two machines per shard keep the order, each a table from (state, event) to what follows (`tables`):

**The owner** (`owner`), one per shard at the node that is or was its home:

    closed --serving(me)--> open --moving(me)--> draining --empty--> released --newer epoch--> ...

An open shard accepts a message whose stamp (epoch, change) fits. A draining one accepts only
*finishing* messages, which running handlers wait for (N3-N5), so call chains do not deadlock.
After it has refused a message of a link, it refuses that whole link until the sender flushes (H7):
otherwise a later message could overtake a returned one. Messages for an entity type that the node
lacks never start (DX-26): they do not keep the shard from being empty, and its release returns
them. *Released* is final for its epoch (H10): no older entry opens the shard again, or two homes
could be open at once.

**The sender** (`sender`), one per shard at each process that sends to it:

    unbound --write--> bound(owner, epoch)
    bound --moving, return or mismatch--> flushing --Flushed--> unbound

A sender that has written to an owner is bound to it. Before it writes to another owner it must know
that nothing of its own is still on the way. So it sends `Flush` behind everything else; the owner
returns what has not started, in order, and answers `Flushed`; only then the sender goes on (H4,
H5). If the link is lost instead, what was written and not answered is *unknown*: the caller of an
ask learns `MaybeExecuted`, a lost tell is counted (H6).

Order rests on the owners' answers alone. Map entries only start a flush earlier; acting on a stale
entry costs time, never order.

- `mailbox`    messages at their owner: what waits, and what may start (readers together, writers
               alone)
- `pending`    messages at their sender: what is queued and what is written, numbered per shard (H1)
- `admission`  how much may wait at a node or be on its way to one, and who is refused (I6)

Invariants: I5 from one sender to one entity messages run in sending order, each at most once, and a
planned move adds no gap; I6 every queue has a limit. Where to change what: a new situation is a row
of a table in `tables`, with its rule; `proving.search` then tries every order of events with it.
Reading order: `tables`, `mailbox`, `owner`, `pending`, `sender`, `admission`.
"""
