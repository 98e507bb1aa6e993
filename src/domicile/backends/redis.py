"""`redis://host/0`, `rediss://` with TLS: the store on a Redis or Valkey server.

The registry calls it. It needs redis-py, which the extra `domicile[redis]` installs; nothing here
imports it before a store is opened. Redis has no journals: a program with durable entities names
one.
"""

from __future__ import annotations

from domicile.backends.registry import Backend, OpenOptions, shown_url
from domicile.membership.clock import SystemClock
from domicile.ports.store import Store
from domicile.stores.commit_log import QueuedCommit


class RedisBackend(Backend):
    """One server, or one node of a cluster; several stores may share it, each with a prefix."""

    scheme = "redis"
    stores = "redis://host:6379/0 (nodes of many machines; not across a failover)"
    needs = ("redis",)
    install = "domicile[redis]"

    def check_url(self, url: str) -> None:
        """As `Backend.check_url`."""
        # Imported late, as in `open_store`: redis-py is an extra, and its import takes time.
        from domicile.stores.redis.server import RedisAddress

        RedisAddress.parse(url, shown_url(url))

    def open_store(self, url: str, options: OpenOptions) -> Store:
        """As `Backend.open_store`."""
        from domicile.stores.redis.server import RedisAddress
        from domicile.stores.redis.store import RedisStore

        return RedisStore(
            RedisAddress.parse(url, shown_url(url)), by=options.by, meter=options.meter,
            op_timeout_s=options.op_timeout_s, reads_only=options.reads_only,
            creates=options.creates,
        )  # fmt: skip

    def commits(self, url: str, after: int) -> list[QueuedCommit] | None:
        """As `Backend.commits`."""
        from domicile.stores.redis.commits import redis_commits  # late, as above
        from domicile.stores.redis.server import RedisAddress

        return redis_commits(RedisAddress.parse(url, shown_url(url)), after, SystemClock().now)


class RedissBackend(RedisBackend):
    """The same over TLS."""

    scheme = "rediss"
    stores = "rediss://host:6379/0 (the same with TLS)"


REDIS = RedisBackend()
REDISS = RedissBackend()
