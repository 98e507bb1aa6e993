"""May this process act, and is that one dead? Theory of operation.

An incarnation may act (run handlers, answer, commit) only while its lease is held, by its own
careful count: from when the last acknowledged renewal was *sent*, plus the granted time to live,
less a margin (L1). The store counts from when it *received* the renewal. So the process always
stops first, as long as clocks run at about the same rate (A1) and pauses are noticed.

Pauses are noticed because every guard compares the clock (L3): before a handler starts, before a
suspended one resumes, before replies leave. A timer alone would be too late after a pause.

    unregistered --granted--> held --deadline, refused, evicted--> fenced --> ended

Nothing leads back from *fenced*: the incarnation ends and a new one registers (L5). Between the
deadline and the hard deadline a cancelled handler may clean up; past it none is ever resumed (L4).

- `lease` is that machine, as a table. Members and leaders use the same one.
- `keeper` says when the next renewal is due, by what became of the last one. Members and leaders
  use the same one, in a task or in a thread.
- `blocked_loop` says whether a node whose event loop does not turn goes on renewing (DX-10): for
  `stall_limit_s`, and not longer. A blocking call must cost no shard; a dead loop must lose them.
- `death_probes` says which incarnations to look at, and when, to prove deaths sooner than leases
                 run out (L6), and what to commit once a death is proved (C5).

Invariants: I1(c) no handler of an old owner runs once the new owner's first handler starts; I2 a
fenced process commits nothing. This room imports `core.state` only.
"""
