"""Replica groups: who is the primary of a replicated database? Theory of operation.

A *group* is one replicated database. Its *servers* keep the same data. One of them, the *primary*,
accepts writes; the others follow it. Beside each server runs an *agent*: it keeps a record of the
server in the store under a lease, and makes of its server what the group's state asks for.

    vacant --founded--> electing(1)
    serving(p,e) --p gone, or released--> electing(e+1) --decided--> chosen(w,e+1)
    chosen(w,e+1) --promoted--> serving(w,e+1)
    chosen(w,e+1) --w gone, or behind--> electing(e+2)
    serving(p,e) --switchover--> switching(p,w,e) --caught up--> chosen(w,e+1)

There is one state record, and each change of it is a compare-and-set. Everything else is desired
state: every agent reads the record and reconciles its own server to it (F13). Nobody sends orders,
so no order can be executed late, and whoever runs an election may die at any step.

Why two servers never accept writes at once: a server is open only in the epoch that the state
serves, and only until its agent's lease ends by the agent's own count (L1). A *guard* beside the
server holds that deadline and closes the server by itself (F2). Others begin an election only once
the agent's record is gone from the store, which is later (F4), or after the agent itself closed its
server and said so.

Why nothing acknowledged is lost in synchronous mode: the state lists every quorum that may hold an
acknowledged write, and an election reads enough of each (F7, F12). In asynchronous mode the most
advanced of the same history is chosen; what it lacks is stated beforehand and counted afterwards.

- `chains`: histories, positions, and up to where two servers agree
- `records`: what lies in the store
- `sync_set`: write quorums and their changes
- `choice`: who becomes primary, and what that loses
- `tables`: the transitions of the state, and the wish for each server
- `machine`: what every agent runs

All of these are pure. Reading order: as listed. Rules: F1-F14.
"""
