"""Replica groups as records, by hand or from a simulated group, and in a SQLite file."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from domicile.core.ids import Incarnation
from domicile.core.state.txn import Committed, Item, Listing, Put
from domicile.failover.chains import Chain, HistoryStart
from domicile.failover.records import (
    GROUPS,
    GroupConfig,
    GroupPhase,
    GroupState,
    LossReceipt,
    PastPrimary,
    ServerRecord,
    config_key,
    encode_group_record,
    past_key,
    receipt_key,
    server_key,
    state_key,
)
from domicile.failover.view import GroupRecords
from domicile.stores.namespace import Namespace
from domicile.stores.sqlite.store import SqliteStore
from domicile.testing.groups.group import SimGroup

VALKEY = GroupConfig("valkey")

Values = dict[bytes, bytes]

CHAIN: Chain = (HistoryStart(0, 0), HistoryStart(1, 0), HistoryStart(3, 1_000))


def incarnation(server: str) -> Incarnation:
    return Incarnation(f"{server}-agent")


def server(
    name: str,
    offset: int = 2_000,
    *,
    role: str = "replica",
    follows: str = "s1",
    chain: Chain = CHAIN,
    address: str = "",
    final: int = 0,
    fit: bool = True,
    why: str = "",
    origin: str = "o",
) -> ServerRecord:
    return ServerRecord(
        server=name, incarnation=incarnation(name), ttl_s=3.0,
        address=address or f"127.0.0.1:{7000 + int(name[1:])}",
        role=role, follows=follows if role == "replica" else "", origin=origin,  # type: ignore[arg-type]
        chain=chain, offset=offset, fit=fit, why=why, final=final,
    )  # fmt: skip


def primary(name: str = "s1", offset: int = 2_000) -> ServerRecord:
    return server(name, offset, role="primary")


def serving(name: str = "s1", epoch: int = 3, **more: object) -> GroupState:
    return GroupState(
        phase=GroupPhase.SERVING, epoch=epoch, origin="o", primary=incarnation(name),
        primary_server=name, run="r", served=epoch, chain=CHAIN, why="the group begins", **more,  # type: ignore[arg-type]
    )  # fmt: skip


def electing(epoch: int = 4, orchestrator: str = "s2", **more: object) -> GroupState:
    return GroupState(
        phase=GroupPhase.ELECTING, epoch=epoch, origin="o", primary=incarnation("s1"),
        primary_server="s1", run="r", served=epoch - 1, chain=CHAIN,
        orchestrator=incarnation(orchestrator), why="the primary's record is gone", **more,  # type: ignore[arg-type]
    )  # fmt: skip


def values(
    state: GroupState | None,
    *servers: ServerRecord,
    config: GroupConfig | None = VALKEY,
    receipts: Iterable[LossReceipt] = (),
    past: Iterable[PastPrimary] = (),
    group: str = "orders",
) -> Values:
    found: Values = {}
    if config is not None:
        found[config_key(group)] = encode_group_record(config)
    if state is not None:
        found[state_key(group)] = encode_group_record(state)
    for one in servers:
        found[server_key(group, one.server, one.incarnation)] = encode_group_record(one)
    for receipt in receipts:
        found[receipt_key(group, receipt.epoch, receipt.server)] = encode_group_record(receipt)
    for epoch in past:
        found[past_key(group, epoch.epoch)] = encode_group_record(epoch)
    return found


def named(name: str, epoch: int, *ports: int) -> Values:
    """The state names one of some servers, which listen at these ports."""
    members = [
        server(f"s{n}", role="primary" if f"s{n}" == name else "replica", follows=name,
               address=f"127.0.0.1:{port}")
        for n, port in enumerate(ports, start=1)
    ]  # fmt: skip
    return values(serving(name, epoch), *members)


def records(found: Values, group: str = "orders") -> GroupRecords:
    known = GroupRecords(group)
    items = tuple(Item(key, value, 1, 1) for key, value in sorted(found.items()))
    known.load(Listing(7, items))
    return known


def write(path: Path, found: Values) -> str:
    """Put records into a store's file; its URL."""

    async def work() -> None:
        store = Namespace(SqliteStore(path, by="lab"), "domicile")
        try:
            outcome = await store.commit([], [Put(*one) for one in found.items()])
            assert isinstance(outcome, Committed)
        finally:
            await store.close()

    asyncio.run(work())
    return f"sqlite:///{path}"


def simulated(
    scenario: Callable[[SimGroup], Awaitable[None]], config: GroupConfig, seed: int = 1
) -> Values:
    """What the store has of group `g` once the scenario is over."""
    group = SimGroup(seed, config)
    found: Values = {}

    async def main() -> None:
        group.start()
        async with asyncio.timeout(30.0):
            while await group.settled():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await scenario(group)
        found.update({item.key: item.value for item in (await group.backend.list(GROUPS)).items})

    try:
        group.world.run(main(), group.world.process("test"))
    finally:
        group.world.close()
    return found
