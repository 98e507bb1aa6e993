"""PostgreSQL servers as members of a replica group: driver, gate, process, kind.

Domicile starts the server (`ServerProcess`), on the machine of its agent. Linux only. How the words
of the ports map to a server (F3, F8-F12):

- It *starts fenced*: `start` puts `standby.signal` beside the data first. A server in recovery
  refuses writes by itself, whatever anybody sets. A promotion removes that file, and the driver
  puts it back at once. So any restart, whoever makes it, comes up in recovery.
- *Opened* by the gate alone. A server that has been open is *closed* by an immediate stop of its
  postmaster; the guard starts it again, fenced. `default_transaction_read_only` is no fence.
- *Shut*: only the group's own roles may connect, by a `pg_hba.conf` of ours, and every other
  session has ended. A connection that was accepted and has not said yet who it is has the old
  rules: it is no session yet, and its process is ended too. A server is shut while it stands, is
  drained, or is promoted and not open yet. Until `unlock` its `synchronous_standby_names` names
  nobody, so that a session that slipped through would never see its commit acknowledged.
- It *stands*: shut, and without a primary to stream from. A server that was open is stopped and
  comes back in recovery. One that is promoted and was never opened, or is drained, stays as it is.
- *Promotion*: shut, then `pg_promote`, which begins a new timeline, then a row with a random token
  in a table of ours: the *mark*. The token is the database's own id of its history, because two
  servers may give the same number to two timelines. A server that is already out of recovery, shut,
  gets a new mark only: whatever it has since its promotion, it has alone.
- The *offset* is the place in the log (LSN): what is replayed, or flushed at a primary.
- *Following*: streams, if the server's timelines are those of the primary up to its own end.
  Else `pg_rewind`, if the place where PostgreSQL sees the two part is not behind the place where
  the chains say that they part. Behind it, two timelines share a number: everything is copied by
  `pg_basebackup`, beside the data, and put in its place once it is whole. Each follower makes
  itself a slot at its primary; it drops the slots that it has itself.
- What a server *has beyond* its next primary is in its write-ahead log. Those files are copied, and
  `pg_waldump` counts the commits in them.
- A *quorum* is `ANY k (...)` over the server ids, which are the `application_name` of followers.
  The set goes by way of a name that nobody has. Each walsender shows that it has taken that over
  before the new set is used: none of them goes on acknowledging by the old one.

What a crash in between leaves:

- before `pg_promote`: a standby. After it, before `standby.signal`: the server's rules are shut,
  and `start` writes the file. Before the mark: a position of the new epoch under an old history;
  the agent elects again.
- in `pg_rewind`, or while the copy takes the data's place: a note (`replacing`) that was written
  before. The server is not started, and `follow` copies everything anew. A copy that broke off is
  deleted and begun anew; the data it was to replace is untouched.
- between the files of settings and the signal that loads them: the files hold from the next start.
- Files are written whole, by rename. The gate writes what opens; driver and gate write what shuts.

`timelines` and `config_files` are pure. `local_server` knows files, processes and sessions of one
server; `driver`, `gate` and `process` are the ports; `lost_log` saves and counts.
"""

from __future__ import annotations

from domicile.failover.drivers.postgres.driver import PostgresDriver
from domicile.failover.drivers.postgres.gate import PostgresGate
from domicile.failover.drivers.postgres.kind import PostgresKind
from domicile.failover.drivers.postgres.process import PostgresProcess

__all__ = ["PostgresDriver", "PostgresGate", "PostgresKind", "PostgresProcess"]
