"""Where shards should be; never when they go there. Theory of operation.

`plan` is one pure function. Its input is `model.PlanInput`: nodes, entries of each role, operators'
wishes, releases, owner deaths. Its output is decisions: give a shard without a home an owner, move
a shard, revert a move, put a shard into quarantine. It remembers nothing between calls, so every
coordinator that reads the same store decides the same.

A home is chosen for the first of these reasons that applies: an operator's wish, the target of a
move under way, the strategy's place, the node that had the shard last, the least loaded node.
Departing nodes receive no shards and give all their shards away. While versions are mixed, only
nodes of the target version receive, and nothing is balanced. A shard that needs an entity type goes
to no node that lacks it while another node that can receive has it (DX-26).

- `model`       what goes in and what comes out: data, and small questions about it
- `plan`        the decisions of one role, in their order
- `balance`     the arithmetic of `least_shards`: the fewest moves to an even load, and limits per
                round
- `strategies`  preferences by name (`consistent_ring`, `ranges`) and the type of a user's own
                function
- `slices`      how long work makes pauses
- `versions`    which version is newer, and which one may receive
- `suspicion`   which entity or shard is blamed for the deaths of owners, and is put away (DX-20,
                DX-24)

A plan changes nothing: `core.coordinator` decides what may be committed now. A plan may name an
owner only for a shard that was released or whose owner's record is gone (C4). An assertion in
`plan` checks this, and the commit is conditional on it too.

Reading order: `model`, `plan`, `balance`, `strategies`, `versions`, `suspicion`.
"""
