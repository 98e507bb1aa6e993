"""May this process act, and is another process dead? Theory of operation.

An incarnation may act (run handlers, answer, commit) only while its lease is valid by its own
count: the time when the last acknowledged renewal was *sent*, plus the granted time to live, less a
margin (L1). The store counts from when it *received* the renewal. So the process always stops
first, as long as clocks run at about the same rate (A1) and pauses are noticed.

Pauses are noticed because every guard compares the clock (L3): before a handler starts, before a
suspended handler resumes, before replies leave. A timer alone would be too late after a pause.

    unregistered --granted--> held --deadline, refused, evicted--> fenced --> ended

No event leads back from *fenced*: the incarnation ends and a new one registers (L5). Between the
deadline and the hard deadline a cancelled handler may clean up. After the hard deadline no handler
is resumed (L4).

- `lease` is that machine, as a table. Members and leaders use the same one.
- `keeper` says when the next renewal is due, depending on the result of the last one. Members and
  leaders use the same class, in a task or in a thread.
- `blocked_loop` says whether a node with a blocked event loop renews (DX-10): for `stall_limit_s`
  at most. A blocking call must cost no shard; a loop that never returns must lose its shards.
- `death_probes` says which incarnations to probe, and when, so that deaths are proved before leases
  expire (L6). It also says what to commit after a death is proved (C5).

Invariants: I1(c) no handler of an old owner runs once the new owner's first handler starts; I2 a
fenced process commits nothing. This room imports `core.state` only.
"""
