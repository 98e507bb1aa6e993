"""Is this process a member, and may it act now? Theory of operation.

A process is a member while its record is in the store: `nodes/<incarnation>` for a node,
`clients/<incarnation>` for a client, usually attached to a lease. It may act until the lease's
deadline, which counts from when the last acknowledged renewal was *sent* (L1). `core.lease` holds
the rules; this room asks the store and the clock.

    unregistered --join--> held --leave--> ended
    unregistered, held --deadline, refused, record gone or evicted, store rewound--> fenced
    fenced --revoke--> ended

**Joining** (`member.join`). Read the whole store; check the node id and the wire protocols; agree
on `config` by a conditional write (`config_agreement`); open the port; then grant the lease and
write the record, if its key is absent (`registration`). The member waits during store outages.
After a write of unknown outcome the record may be stored. So the next try renews the lease and
never grants it again: an incarnation that may have expired must not come back (A5). The record
names the granted ttl, and the member never counts with a longer one (C5).

**Renewing.** Each renewal also reads the own record: the lease counts only while it exists (L1).

- by a task (`task_renewer`) on the event loop: a blocked loop does not renew
- by a thread (`thread_renewer`), for a node whose store can be called from any thread: a node with
  a blocked loop keeps its shards for up to `stall_limit_s`, and its record says so (DX-10).
  `loopwatch` tells when the loop last turned. Both threads change the lease under one lock. Guards
  read it without a lock (`lease_holder` says why that is safe).

Under `fencing = "health"` a node's record has no lease and no deadline (`Unleased`): the node
continues during store outages, and only proof of its death frees its shards (C9).

**Watching** (`member.run`). One watch follows the store from the listing on and gives facts to the
owner's `MemberEvents`, in the store's order. After a gap the member lists the whole store again. A
revision that went back means that the store lost commits: that fences the member too (S5).

**Noticing deaths** (`death_watch`), at every node with a health port. It asks for proof on a
schedule, and early when a connection breaks or a peer gets no answer. Only the verdict `DEAD`
counts; silence, errors and missing proof do not. Then one conditional commit removes the record and
stores the evidence, so that the dead node's shards are free before its lease ends (C5, L6).

**Fencing** (`lease_holder`). `guard()` is called before every turn, resumption and send (L3). The
first time it fails, or when a renewal or the watch shows that the record is gone or evicted, the
member is fenced: `on_fenced` is called once, on the event loop. The owner stops everything (L4) and
then calls `revoke`. The incarnation never acts again; a new one joins (L5).

**Leaving** (`member.leave`). After everything has stopped, the guard refuses first, and only then
the record is removed (H14). Without a lease the holder itself must delete its record. It may report
success only if no write of the record can still reach the store (S1).

Invariants: no incarnation acts after its deadline (L1, L3); a fence is final (L5); nothing is
revoked while it could still act (I1); a store call without an answer is neither done nor failed
(`store_calls`, S1); every store call has a time limit (I6).
Reading order: `lease_holder`, `member`, `registration`, `record_kinds`, `task_renewer`,
`thread_renewer`, `loopwatch`, `death_watch`, `config_agreement`, `store_calls`, `clock`.
"""
