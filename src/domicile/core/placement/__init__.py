"""Where shards should be; never when they go there. Theory of operation.

`plan` is one pure function: from a picture of the cluster (`model.PlanInput`: nodes, entries of
each role, operators' wishes, releases, deaths) to decisions: give a homeless shard an owner, move a
shard, take a move back, put a shard into quarantine. It remembers nothing between calls, so any
coordinator that reads the same store decides the same.

The order of reasons for a home is: an operator's wish, the target of a move under way, the place by
the strategy, the node that had the shard last, the least loaded node. Departing nodes receive
nothing and give everything away. While versions are mixed, only nodes of the target version receive
and nothing is balanced.

- `model`       what goes in and what comes out: data, and small questions about it
- `plan`        the decisions of one role, in their order
- `balance`     the arithmetic of `least_shards`: the fewest moves to an even load, and limits per
                round
- `strategies`  preferences by name (`consistent_ring`, `ranges`) and the type of a user's own
                function
- `versions`    which version is newer, and which one may receive

What a plan wants is not done yet: `core.coordinator` decides what may be committed now. A plan may
name an owner only for a shard that was released or whose owner's record is gone (C4); an assertion
in `plan` says so, and the commit is conditional on it again.

Reading order: `model`, `plan`, `balance`, `strategies`, `versions`.
"""
