"""How a call reaches its entity and comes back. Theory of operation.

`runtime` holds the message side of one incarnation and connects the rooms. The machines of
`core.handoff` decide about order and homes; the rooms here carry out what they decide.

**Out** (`model`, `sending`). `ref.ask` finds the handler and makes a `Call`. `OutgoingCalls.ask`
checks the lease (L3), finds the shard (`routing`) and the chain of handlers that wait for this ask
(N1, N2: a cycle is refused). Then one of three ways, each of which numbers the message (H1):

    home here, nothing of this sender open   the handler runs within the call, if it can begin now
    home known, nothing waits before it      written to the owner at once (`_submit`)
    otherwise                                held; `Sender` says when it is written (`_hold`)

A message to this process itself waits in the runtime for the next turn of the loop. Until the
answer comes the call is an `OutgoingCall` with a future; `ask_timeouts` watches its deadline.

**In** (`hosting`, `running`). The dispatcher gives a batch of messages to `Runtime.on_requests`,
which lends a worker and hands each request to the `ShardHost` of its shard. Then:

    request -- the shard is clear, the entity idle ----------> begin
            -- else: `Owner` accepts --> mailbox --> `_next` -> begin, or `_serve`
            -- else: `Owner` refuses or returns it
    begin   -- ended or failed ------------------------------> answer
            -- suspended --> a worker resumes it (`Guarded`) -> answer

`_serve` is the long way, for a message that needs more than its handler: an entity that must start
first (`activation`), a key that was perhaps used before, or a refusal. Before every resumption the
turn checks the lease (L3).

A durable entity has an output gate (`ports.work`, J5). Its handlers do not wait for the journal.
What leaves it does: its answers wait in the gate, and its own asks and tells await the gate first,
until everything that the handler could have seen is committed (I4).

A due timer takes the same way as a message of the owner to itself. A resident's timers are in its
cell; `hosting.timers` keeps those of entities that are not in memory, and a shard that moves takes
all of them along (DX-25).

**Back.** `Runtime.answer` sends a `Reply` to the link that the message came from. A `Begun` tells
the sender in batches what has started. `OutgoingCalls.on_reply` resolves the future, and `ask`
decodes the value or raises the error. `Return` and `Flushed` go to the `Sender`, which writes the
message again, to the next owner. If the caller stops waiting, `Cancel` follows the message.

**The rooms**, each importing only those below it, and what each keeps:

- `runtime`  routes and batches; bounds how long messages may begin within one turn of the loop
- `sending`  I5: a call has its number, or its place in a line, before it first suspends;
             I6: what waits is limited;
             I9: every ask gets one outcome that says whether it ran; a lost tell is counted
- `hosting`  a handler begins only in `Execution.begin`, after the owner machine and the lease allow
             it; an exclusive handler runs alone in its entity; a draining shard is released only
             when nothing waits, runs or is resident (H10)
- `carry`    I1: fields and timers are sent only after their epoch ended, and used only in the next
             epoch
- `running`  no handler is resumed after the deadline (L3), nor cleaned up after the hard one (L4);
             no context variable leaks from one handler to the next
- `model`    what users write; nothing here sends or runs anything (I9: how errors travel)

A fence ends all of it (L4, L5): `Runtime.fence` closes every owner machine, cancels every handler
and fails every open call. A new incarnation gets a new runtime.

Reading order: `model.ref`, `model.handlers`, `sending.outbound`, `runtime`, `hosting.shard_host`,
`hosting.execution`, `hosting.cell`, `hosting.activation`, `running.workers`, then `carry`.
"""
