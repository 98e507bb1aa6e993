"""What the store holds, and how a process sees it. Theory of operation.

The store is a small, strongly consistent database of keys and values (`txn` says what can be asked
of it). Every write has a revision that rises for the whole store. A process reads everything once,
as a listing at one revision, and then follows the changes in order.

**Keys** (`keys`). One table says of every family how its keys are made and parsed and its values
decoded. Each family has one writer, or a rule that settles races:

    config               what all members agreed on: shards per role, entity types
    leader               the acting coordinator, under its lease; its revision guards all it writes
    nodes/<incarnation>  a node, under its lease; gone means: it can no longer commit or serve
    clients/<incarn.>    a client, under its lease
    map/<role>/<block>   64 entries of the shard map; written by the leader only
    release/..., started/...      what owners say when they cannot reach the leader
    drain/, wish/, target, pardon/, kick/         what operators want
    dead/, stuck/, audit/, rewound                evidence, reports, marks

**The map** (`shardmap`). One entry per shard: owner, epoch, state, the next owner while it moves,
and `change`, a number that rises with every change of that entry. Two entries of one shard are
ordered by `change` alone, wherever they came from (the watch, the leader, a returned message), so a
process merges what it hears in any order and never goes back (C3).

**Epochs.** A shard's epoch rises with each new owner and never repeats. Entries that carry an epoch
are never deleted and never leased (S6). Journals and owners compare epochs; nobody compares times.

**The view** (`cluster_view`). What a listing and the changes after it add up to: one class for
members, leaders, operators and status, which reads by that table and returns what is new as facts.
It holds nothing that is not stored (C2, I3): what somebody merely wants lives elsewhere until its
commit is known. Of the map it keeps the blocks as stored, by revision, for commits to rest on (C2);
and for processes the newest entries, by `change` (C3).
Values that cannot be read are left out; since every commit is conditional, a gap in the view can
cost time but never a second owner.

**Agreement** (`agreement`). Why a process may or may not take part: shards per role, hash
functions, wire protocols, tokens.

Invariants: I1(a) the store names one owner and epoch per shard; I3 nothing is told that is not
stored. Reading order: `txn`, `records`, `shardmap`, `keys`, `cluster_view`, `agreement`.
"""
