"""What the store holds, and how a process sees it. Theory of operation.

The store is a small, strongly consistent database of keys and values (`txn` says what a commit can
ask of it). Every commit has a revision, which rises for the whole store. A process reads everything
once, as a listing at one revision, and then follows the changes in order.

**Keys** (`keys`). One table says for every family how to make and parse its keys and how to decode
its values. Each family has one writer, or a rule for concurrent writers:

    config               what all members agreed on: shards per role, entity types
    leader               the acting coordinator, under its lease; all its commits depend on the
                         revision of this key
    nodes/<incarnation>  a node, under its lease; if it is gone, the node cannot commit or serve
    clients/<incarn.>    a client, under its lease
    map/<role>/<block>   64 entries of the shard map; only the leader writes them
    release/..., trial/<incarn.>  what owners report through the store
    drain/, wish/, target, pardon/, kick/         what operators want
    dead/, stuck/, audit/, rewound, moved         evidence, reports, marks

**The map** (`shardmap`). One entry per shard: owner, epoch, state, the next owner while it moves,
and `change`, a number that rises with every change of that entry. Two entries of one shard are
ordered by `change` alone, whatever their source is (the watch, the leader, a returned message). So
a process merges entries in any order and never goes back to an older one (C3).

**Epochs.** A shard's epoch rises with each new owner and never repeats. Entries that carry an epoch
are never deleted and never leased (S6). Journals and owners compare epochs; no code compares times.

**The view** (`cluster_view`). The result of a listing and the changes after it. Members, leaders,
operators and status use one class, which reads by that table and returns what is new as facts. It
holds nothing that is not stored (C2, I3): drafts and wishes are kept elsewhere until their commit
is known. Of the map it keeps the blocks as stored, by revision, as the base of commits (C2), and
for processes the newest entries, by `change` (C3). Values that cannot be read are left out. Every
commit is conditional, so a gap in the view can cost time but never cause a second owner.

**Agreement** (`agreement`). Why a process may or may not join the cluster: shards per role, hash
functions, wire protocols, tokens.

Invariants: I1(a) the store names one owner and epoch per shard; I3 nothing is told that is not
stored. Reading order: `txn`, `records`, `shardmap`, `keys`, `cluster_view`, `agreement`.
"""
