"""The store on a Redis or Valkey server: every read and write is one run of one script (S11).

- `store`     `RedisStore`, called on the event loop, and its watches
- `thread_client`  the second client, for the thread that renews leases
- `calls`     one run of the script: arguments, answers, and the history of the store (S5)
- `server`    connections, what a server must be, and what its errors mean
- `ticks`     when this process must advance store time (S4)
- `findings`  what `domicile doctor` reports about a server
- `store.lua` the script

Redis is never consistent across a failover: acknowledged commits may be lost there. Clients notice
afterwards and raise `StoreRewound`.
"""
