"""The two processes beside a server, from settings: its guard, and its agent.

`domicile replica run` calls these; a program may run either in a process of its own. An agent is
one incarnation after the other. Each incarnation has its own store and its own connection to the
guard, and ends with that connection: then the guard has closed the server, or the guard is gone. An
incarnation removes what its predecessors left in the store: the lock on the state folder proves
that they are gone (F1), and the guard has closed the server. So a restarted agent need not wait for
a lease to end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

from domicile.core.ids import NOBODY
from domicile.core.state.txn import At, Delete
from domicile.errors import ConfigError, StoreError
from domicile.failover.agent import Agent
from domicile.failover.answers import agent_pages
from domicile.failover.driver import ReplicaDriver, ServerProcess
from domicile.failover.elsewhere import check_resolved
from domicile.failover.guard.kernel_timer import NoTimer, kernel_timer
from domicile.failover.guard.line import GuardLine
from domicile.failover.guard.server_guard import ServerGuard
from domicile.failover.records import (
    ServerRecord,
    config_key,
    decode_group_record,
    server_key,
)
from domicile.failover.replica_settings import ReplicaSettings
from domicile.failover.state_folder import NoteFile, StateFolder
from domicile.membership.clock import SystemClock
from domicile.membership.store_calls import StoreCalls
from domicile.observe.http import HttpServer
from domicile.observe.metrics import Metrics
from domicile.ports.meter import Meter
from domicile.ports.store import Store, writes_one_key

log = logging.getLogger("domicile")

AGAIN_S = 0.2
"""After an incarnation has ended, the next one begins so soon."""

RETRY_S = 0.05

SLOW_S = 1.0
"""What takes longer is told."""

STRANGER_S = 3.0
"""So long another server at the own server's address may take to end, before a guard refuses."""

TAKE_OVER_S = 1.0
"""So long an agent may take to put itself in its predecessor's place, before others elect."""


async def serve_guard(settings: ReplicaSettings, asked: asyncio.Event) -> None:
    """Be the guard of one server until asked to leave; then close the server and stop it.

    In the main thread of a process (F2). `ConfigError` if the server has another guard.
    """
    kind, place, folder = settings.kind(), settings.place(), StateFolder(settings.state)
    _go_first()
    timer, process = kernel_timer(), kind.process(place)
    if timer is None:
        log.warning("%s: this platform can't end a guard that stands still", settings.id)
    if process is None:
        log.warning(
            "%s: attach mode: if this guard is killed, nobody closes the server until it is back",
            settings.id,
        )
    with folder.held("guard"):
        if process is not None:
            await _nobody_else(settings, process)
        guard = ServerGuard(
            kind.gate(place, settings.mode),
            process,
            socket=folder.socket,
            clock=SystemClock(),
            stop_budget_s=settings.lease().stop_budget_s,
            timer=NoTimer() if timer is None else timer,
        )
        await _until_asked(guard.run(), asked)


def _go_first() -> None:
    """Have this thread run before ordinary ones, where that is permitted; not what it starts (F2).

    On a machine with much more work than it can do it would else come too late to its deadline,
    and be killed by its timer. It needs little: mostly it waits.
    """
    if sys.platform == "linux":
        policy, priority = os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1)
        try:
            os.sched_setscheduler(0, policy, priority)
        except OSError as error:
            log.debug("the guard has no right to run first (CAP_SYS_NICE): %s", error.strerror)


@asynccontextmanager
async def _told_if_slow(what: str, server: str) -> AsyncGenerator[None]:
    """Say what takes longer than a moment."""
    alarm = asyncio.get_running_loop().call_later(SLOW_S, log.info, what, server)
    try:
        yield
    finally:
        alarm.cancel()


async def _nobody_else(settings: ReplicaSettings, process: ServerProcess) -> None:
    """`ConfigError` if another server answers where this one shall: it must not be touched.

    One whose guard has just been killed may need a moment to end.
    """
    until = asyncio.get_running_loop().time() + STRANGER_S
    while who := await process.stranger():
        if asyncio.get_running_loop().time() >= until:
            raise ConfigError(
                f"{settings.id}: {who}, and Domicile is to start the server there. Stop it, and "
                "the unit of the distribution that starts it; or correct server.url"
            )
        await asyncio.sleep(RETRY_S)


async def _until_asked(work: Coroutine[Any, Any, None], asked: asyncio.Event) -> None:
    """Do something until asked to leave, and let it end itself; raises what ended it."""
    working = asyncio.create_task(work, name="work")
    asking = asyncio.create_task(asked.wait(), name="asked to leave")
    try:
        await asyncio.wait((working, asking), return_when=asyncio.FIRST_COMPLETED)
    finally:
        asking.cancel()
        working.cancel()
        await asyncio.wait((working,))
    if not working.cancelled():
        working.result()


async def serve_agent(
    settings: ReplicaSettings,
    open_store: Callable[[], Store],
    *,
    meter: Metrics,
    asked: asyncio.Event,
) -> None:
    """Be the agent of one server until asked to leave; then close the server and leave the group.

    With `settings.http` it serves pages about its server meanwhile. `ConfigError` if this server
    does not fit the group, or the pages can't be served.
    """
    folder = StateFolder(settings.state)
    kind = settings.kind()
    place = settings.place()
    await check_resolved(settings.store, settings.server_ports())
    with folder.held("agent"):
        notes = folder.notes(settings.id)
        async with _told_if_slow("%s: the settings of the server are looked at", settings.id):
            warnings = await kind.check(place, settings.mode)
        for warning in warnings:
            log.warning("%s: %s", settings.id, warning)
        driver, present = kind.driver(place, settings.mode), _Present()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(driver.close)
            if settings.http:
                pages = agent_pages(lambda: present.agent, meter, SystemClock().now)
                server = HttpServer(settings.http, pages)
                await server.start()
                stack.push_async_callback(server.close)
                log.info("%s: metrics and answers at http://%s", settings.id, server.address)
            await _until_asked(
                _live(settings, folder, notes, driver, open_store, meter, present), asked
            )


@dataclass(slots=True)
class _Present:
    """The incarnation of now; None between two of them."""

    agent: Agent | None = None


async def _live(
    settings: ReplicaSettings,
    folder: StateFolder,
    notes: NoteFile,
    driver: ReplicaDriver,
    open_store: Callable[[], Store],
    meter: Meter,
    present: _Present,
) -> None:
    said = ""
    while True:
        try:
            line = await GuardLine.connected(folder.socket)
        except OSError as error:
            what = f"no guard at {folder.socket} ({error.strerror})"
            if what != said:
                log.warning("%s: %s: it is waited for", settings.id, what)
            said = what
        else:
            said = ""
            store = open_store()
            try:
                if writes_one_key(store):
                    raise ConfigError(
                        "a replica group commits several keys at once, and this store commits one "
                        "key at a time: keep the group's records in another store, as in "
                        "etcd://a:2379 or sqlite:///path/to/file.db"
                    )
                await _incarnation(settings, notes, driver, line, store, meter, present)
            finally:
                await store.close()
        await asyncio.sleep(AGAIN_S)


async def _incarnation(
    settings: ReplicaSettings,
    notes: NoteFile,
    driver: ReplicaDriver,
    line: GuardLine,
    store: Store,
    meter: Meter,
    present: _Present,
) -> None:
    lease = settings.lease()
    agent = Agent(
        settings.group,
        settings.group_config(),
        address=settings.reached_at(),
        store=store,
        driver=driver,
        guard=line,
        notes=notes,
        clock=SystemClock(),
        meter=meter,
        settings=lease,
        random=Random(os.urandom(16)),
        probe_s=settings.probe_s,
    )
    reading = asyncio.create_task(line.keep_reading(), name="guard's answers")
    server = notes.load().server
    present.agent = agent
    log.info("%s: incarnation %s begins in group %s", server, agent.incarnation, settings.group)
    living = asyncio.create_task(agent.run(), name="agent")
    calls = StoreCalls(store, lease.op_timeout_s)
    clearing = asyncio.create_task(
        _end_predecessors(agent, server, notes.load().folder, store, calls), name="earlier agents"
    )
    telling = asyncio.create_task(_tell_whether_it_answers(settings, calls), name="store")
    try:
        await asyncio.wait((reading, living), return_when=asyncio.FIRST_COMPLETED)
        if not living.done():
            log.warning("%s: the guard is gone, so this incarnation is over", server)
    finally:
        present.agent = None
        for task in (living, clearing, telling):
            task.cancel()
        await asyncio.wait((living, clearing, telling))
        # Last: while it ends, the agent has the guard close the server.
        reading.cancel()
        await asyncio.wait((reading,))
    if not living.cancelled():
        living.result()
        log.warning("%s: this incarnation is over: %s", server, agent.reason or "fenced")


async def _tell_whether_it_answers(settings: ReplicaSettings, calls: StoreCalls) -> None:
    """An incarnation that begins waits for its store: the log says so, and when that is over."""
    said = ""
    while True:
        try:
            await calls.bounded(calls.store.get(config_key(settings.group)))
        except StoreError as error:
            if not said:
                log.warning("%s: the store is waited for: %s", settings.id, error)
            said = str(error)
            await asyncio.sleep(AGAIN_S)
        else:
            if said:
                log.info("%s: the store answers", settings.id)
            return


async def _end_predecessors(
    agent: Agent, server: str, folder: str, store: Store, calls: StoreCalls
) -> None:
    """Remove the records of this server's earlier agents, once this one has joined.

    After it has joined, or others would elect without it. And only when the state does not name
    such an agent, or the server can't serve on in its epoch: else this agent takes the epoch over.
    """
    machine = agent.machine
    until = 0.0
    while True:
        await asyncio.sleep(RETRY_S)
        if machine.me not in machine.members or machine.seen is None:
            continue
        until = until or asyncio.get_running_loop().time() + TAKE_OVER_S
        state = machine.state
        named = state is not None and state.primary_server == server and state.primary != machine.me
        if named and asyncio.get_running_loop().time() < until:
            continue
        prefix = server_key(agent.group, server, NOBODY)
        try:
            listing = await calls.bounded(store.list(prefix))
            for item in listing.items:
                record = decode_group_record(item.value, ServerRecord)
                # Of another folder: another server with this id by mistake, and it lives.
                if record.incarnation != machine.me and record.folder == folder:
                    log.info("%s: the record of its earlier agent is removed", server)
                    await calls.try_commit([At(item.key, item.revision)], [Delete(item.key)])
        except (StoreError, ValueError) as error:
            log.info("%s: earlier agents' records stay until they expire: %s", server, error)
        return
