"""Valkey and Redis servers as members of a replica group: driver, gate, process, kind.

How the port's words map to a server (F3, F8-F10):

- It *refuses writes*: as a replica, it answers READONLY; else `CLIENT PAUSE ... WRITE`, which holds
  writes back. Sessions are ended by `CLIENT KILL`. Only the gate opens, for the guard alone (F2).
- It *follows nobody*: a replica is made one of a dead address, which keeps its data, its offset and
  its replication id. A server that is no replica stays as it is.
- It *starts fenced*: as a replica of the dead address, by the command line that the guard gives it,
  or by the last line of its configuration file where somebody else starts it.
- *Promotion*: `REPLICAOF NO ONE`, a mark and the pause in one transaction, so that no client's
  write comes in between. It always begins a new replication id. The mark is a PUBLISH: replicated,
  and no data.
- What a server *has beyond* its next primary is read from its own backlog, as a replica would read
  it: the exact commands. If the backlog does not reach back that far, it is the whole data set.

Asynchronous mode only: the server itself cannot wait for a quorum before it answers.
"""

from __future__ import annotations

from domicile.failover.drivers.valkey.driver import ValkeyDriver, count_writes
from domicile.failover.drivers.valkey.gate import ValkeyGate
from domicile.failover.drivers.valkey.kind import ValkeyKind

__all__ = ["ValkeyDriver", "ValkeyGate", "ValkeyKind", "count_writes"]
