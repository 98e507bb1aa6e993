"""Clients of databases that follow a group's primary: for redis-py, and for asyncpg.

`redis.follow_redis` and `asyncpg.follow_asyncpg` give a client that stays the same through all
changes of primary. Both stand on `primary_course`: each new connection asks the store where the
primary is, and news of another primary ends the connections of the one before.
"""
