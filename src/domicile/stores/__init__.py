"""Where is the cluster's shared state kept? Implementations of `domicile.ports.store`.

- `memory`      the reference store: one process, nothing survives it
- `sqlite`      the embedded store: the processes of one machine share a file
- `etcd`        the store of an etcd cluster, for nodes of many machines
- `namespace`   the part of a store that belongs to one cluster
- `storetime`   a store's own time, made from a wall clock (S4)
- `threaded`    the thread side of a store on a server, on a loop of its own (`loop_thread`)
- `file_locks`  proof of death for the processes of one machine (L6)

A store knows keys, values, revisions and leases. It must know nothing about shards or nodes.
"""
