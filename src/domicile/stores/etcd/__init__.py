"""A cluster's shared state in etcd: `etcd://host:2379` (S12).

`store` is the port's implementation. Theory of operation:

- A commit is one transaction: comparisons of create and modify revisions, the writes, and reads
  that tell which condition did not hold (`client`). It is sent once. Errors that etcd gives before
  it writes mean "not done"; a lost connection or a late answer means `Unknown` (`failures`).
- A call asks one server. After a failure the next one is asked, if asking twice does no harm. Each
  new connection must first show a write that this process has seen (`connection`, `history`), so a
  restored etcd is noticed even if new commits have overtaken the lost ones (S5).
- A lease's text becomes a number by hashing; a key under the lease holds the text (`leases`). A
  renewal counts after a read through a majority in the same raft term.
- A watch resumes from the last event that was handed out (`watch`). It asks for a sign of life only
  if renewals show a revision that it has not heard of, or if nobody renews (`watch_pulse`).
- `domicile doctor` asks each server by itself (`survey`) and is told what that means (`findings`).

`rpc.proto` is the part of etcd's API that is used. Reading order: client, connection, watch.
"""
