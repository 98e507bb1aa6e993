"""The guard: who closes a server when its agent cannot? Theory of operation.

An agent may die or freeze while its server lives (F2). So beside each server runs a second, tiny
process. It holds one deadline: the agent's lease, on the clock that both processes share. It is the
only one that opens the server, and it closes the server when

- the agent says so,
- the agent's connection ends: the agent is gone,
- the deadline passes: the agent stands still, or cannot renew its lease.

Orders of the agent are taken one at a time, and a newer one ends the one under way. The deadline
is compared here, right before the server is opened.

If the server does not let itself be closed within the stop budget (L4), it is killed, where the
guard started it. If the guard itself stands still, a timer in the kernel kills the guard at the end
of the stop budget; the kernel also kills the server, whose parent the guard is. So there is no
moment in which a stopped process keeps a server open. A server that somebody else started (*attach
mode*) survives its guard: then nobody closes it, until a new guard does.

- `kernel_timer`: the timer that kills this process
- `messages`: what agent and guard say to each other
- `line`: the agent's end, which implements the port `Guard`
- `server_guard`: the guard itself
"""
