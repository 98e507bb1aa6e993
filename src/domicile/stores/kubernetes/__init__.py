"""How do clusters use a Kubernetes API server as their store (S8)?

`objects` says how a key becomes a ConfigMap and a lease a Lease. `client` makes the calls,
`observed` decides when a Lease has ended, `ending` ends it, `watch` follows the keys. `store` puts
them together. The API server has no transaction over several objects and ends no Lease: a commit
writes one key, and each process ends the Leases that it sees unchanged for their ttl.
"""
