"""Which store, journal, transport and health port does a URL mean?

`registry` knows which backend a scheme means; `memory`, `sqlite`, `postgres`, `redis`, `etcd` and
`kubernetes` are the built-in ones, and `pods` is a health port beside any of them; `wiring` opens
everything that one process needs. Derive a `Backend` to add another store or journal.
"""

from __future__ import annotations

from domicile.backends.etcd import ETCD
from domicile.backends.kubernetes import KUBERNETES
from domicile.backends.memory import MEMORY
from domicile.backends.pods import SCHEME, pod_health
from domicile.backends.postgres import POSTGRES
from domicile.backends.redis import REDIS, REDISS
from domicile.backends.registry import Backend, OpenOptions, register, register_health
from domicile.backends.sqlite import SQLITE

__all__ = ["Backend", "OpenOptions", "register", "register_health"]

register(MEMORY)
register(SQLITE)
register(POSTGRES)
register(REDIS)
register(REDISS)
register(ETCD)
register(KUBERNETES)
register_health(SCHEME, pod_health)
