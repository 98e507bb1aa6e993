"""Clients of databases that follow a group's primary: for redis-py, asyncpg and psycopg.

`redis.follow_redis`, `asyncpg.follow_asyncpg` and `psycopg.follow_psycopg` give a client that stays
the same through all changes of primary. `redis.follow_redis_sync` and `psycopg.follow_psycopg_sync`
are for programs without an event loop. All stand on `primary_course`: each new connection asks the
store where the primary is, and news of another primary ends the connections of the one before.
"""
