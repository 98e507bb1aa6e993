"""Asks each server of an etcd cluster about itself, for `domicile doctor`. It changes nothing.

Only `domicile.stores.etcd.store` uses it. A server that does not answer is an answer, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from domicile.errors import ConfigError, StoreError
from domicile.stores.etcd import rpc_pb2 as pb
from domicile.stores.etcd.connection import ALARM, MEMBERS, STATUS, WATCH, EtcdConnections, in_time
from domicile.stores.etcd.failures import explanation
from domicile.stores.etcd.findings import EtcdMemberSaid, EtcdSurvey

OLDEST_S = 1.0
"""Seconds for the oldest change: a store that has none does not answer."""


async def asked_about(connections: EtcdConnections, data: bytes, end: bytes) -> EtcdSurvey:
    """What the servers of a URL say of themselves. `data` is what the store's keys begin with."""
    address = connections.address
    servers = [await _status(connections, endpoint) for endpoint in address.endpoints]
    members: list[pb.Member] = []
    alarms: list[tuple[int, int]] | None = None
    oldest = 0
    for server in servers:
        if server.status is None or members:
            continue
        try:
            async with connections.only(server.endpoint) as session:
                login = connections.login
                listed = await connections.unary(session, MEMBERS)(
                    pb.MemberListRequest(), metadata=login
                )
                members = list(listed.members)
                told = await connections.unary(session, ALARM)(pb.AlarmRequest(), metadata=login)
                alarms = [(alarm.memberID, alarm.alarm) for alarm in told.alarms]
                if server.status.leader:
                    stream = connections.stream(session, WATCH)
                    oldest = await _oldest(stream, login, data, end)
        except (grpc.aio.AioRpcError, StoreError, ConfigError):
            continue
    auth = connections.auth
    if not address.user and connections.history.has_answered:
        auth = False  # it let a process read that has no login
    return EtcdSurvey(address, servers, members, alarms, auth, oldest)


async def _status(connections: EtcdConnections, endpoint: str) -> EtcdMemberSaid:
    address = connections.address
    try:
        async with connections.only(endpoint) as session:
            ask = connections.unary(session, STATUS)
            return EtcdMemberSaid(
                endpoint, await ask(pb.StatusRequest(), metadata=connections.login)
            )
    except grpc.aio.AioRpcError as error:
        details = error.details() or ""
        why = explanation(error.code(), details, tls=address.tls, user=address.user)
        return EtcdMemberSaid(endpoint, None, f"it {why}")
    except (StoreError, ConfigError) as error:
        return EtcdMemberSaid(endpoint, None, str(error))


async def _oldest(stream: Any, login: tuple[tuple[str, str], ...], data: bytes, end: bytes) -> int:
    """The oldest revision of which a watch would tell; 0 if none comes in time."""
    asked = pb.WatchCreateRequest(key=data, range_end=end, start_revision=1, fragment=True)
    done = asyncio.Event()

    async def requests() -> AsyncIterator[pb.WatchRequest]:
        yield pb.WatchRequest(create_request=asked)
        await done.wait()

    call = stream(requests(), metadata=login)
    try:
        async with in_time(OLDEST_S):
            async for reply in call:
                if reply.compact_revision:
                    return int(reply.compact_revision)
                if reply.events or reply.canceled:
                    return 1 if reply.events else 0
    except grpc.aio.AioRpcError:
        return 0
    finally:
        done.set()
        call.cancel()
    return 0
