"""Decisions without side effects: what may happen, and what follows from it.

Nothing here reads a clock, a socket, a logger or a random source. Time and a `Random` are
arguments. A machine takes an event and returns effects. A shell in another package carries the
effects out: it commits first and sends afterwards (I3). So every decision can be tested without
mocks, searched exhaustively and replayed from a seed.

Five rooms, each with its theory of operation in its own `__init__`:

- `state`        what the store holds, and one view of it
- `lease`        may this process act, and is another process dead?
- `handoff`      how a shard moves without losing, duplicating or reordering a message
- `placement`    where shards should be; never when they go there
- `coordinator`  what may be committed about it, and when

Read `state` first, then `handoff`, then `placement` with `coordinator`. Four modules serve all
rooms: `ids`, `hashing` (which shard an entity belongs to), `machines` (the form of a transition
table) and `wire` (the messages between processes).
"""
