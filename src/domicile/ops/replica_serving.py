"""The commands `domicile replica proxy` and `answer`: processes that follow a group for others.

They read the store and change nothing. `failover.proxy` and `failover.answers` do the work.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from domicile.errors import ConfigError, DomicileError, StoreError
from domicile.ops.console import (
    AWAY,
    FAILED,
    INTERRUPTED,
    USAGE,
    App,
    Cluster,
    FormName,
    LevelName,
    LogFormat,
    LogLevel,
    LoopName,
    LoopOption,
    StoreOption,
    examples,
    fail,
    is_away,
    which,
)

if TYPE_CHECKING:
    from domicile.failover.following import GroupFollower
    from domicile.failover.proxy import ProxyLimits
    from domicile.ports.store import Store

log = logging.getLogger("domicile")

READ_S = 2.0
"""How long one read of the store may take: less than a primary's ttl."""

GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The group's name.")]
PagesAt = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        show_default=False,
        help="Serve /primary, /replica and /metrics there.",
    ),
]


def add_serving_commands(group: typer.Typer) -> None:
    """Add these commands to the group `replica`."""
    dev = "sqlite:///.domicile/dev.db"
    for name, command, shown in (
        (
            "proxy",
            run_proxy,
            (f"proxy orders {dev} --listen 127.0.0.1:6380",
             f"proxy orders {dev} --listen 127.0.0.1:6380 --http 127.0.0.1:9465"),
        ),
        ("answer", run_answers, (f"answer orders {dev} --http 127.0.0.1:9465",)),
    ):  # fmt: skip
        epilog = examples(*(f"domicile replica {example}" for example in shown))
        group.command(name, epilog=epilog)(command)


def run_proxy(
    group: GroupArgument,
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where clients connect to.")
    ] = "127.0.0.1:0",
    http: PagesAt = None,
    wait: Annotated[
        float, typer.Option(min=0.1, max=600, help="Seconds a new client waits for a primary.")
    ] = 10.0,
    connections: Annotated[
        int, typer.Option(min=1, max=100_000, help="The most clients at a time.")
    ] = 1_000,
    loop: LoopOption = LoopName.auto,
    log_level: LogLevel = LevelName.info,
    log_format: LogFormat = FormName.text,
) -> None:
    """Lead TCP connections to the primary of a group, until SIGTERM or Ctrl-C.

    Connections are cut when the primary changes; new ones wait for the next one. Exits with 0 once
    it was asked to end, 2 if an option is wrong, 3 if the store can't be read.
    """
    from domicile.failover.proxy import ProxyLimits

    url, name = which(store, app, cluster, "replica proxy", group)
    limits = ProxyLimits(connections=connections, wait_s=wait)
    _serve(url, name, group, listen, limits, http, loop, log_level, log_format)


def run_answers(
    group: GroupArgument,
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    http: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where load balancers ask.")
    ] = "127.0.0.1:0",
    loop: LoopOption = LoopName.auto,
    log_level: LogLevel = LevelName.info,
    log_format: LogFormat = FormName.text,
) -> None:
    """Answer load balancers over HTTP: which server is the primary, which are replicas.

    /primary and /replica say where they are; /primary/SERVER and /replica/SERVER say 200 if that
    server, by its id or its address, is one, and 503 if not. Until SIGTERM or Ctrl-C.
    """
    url, name = which(store, app, cluster, "replica answer", group)
    _serve(url, name, group, None, None, http, loop, log_level, log_format)


def _serve(
    url: str,
    cluster: str,
    group: str,
    listen: str | None,
    limits: ProxyLimits | None,
    http: str | None,
    loop: LoopName,
    log_level: LevelName,
    log_format: FormName,
) -> None:
    from domicile.ops import logs
    from domicile.ops.serve import loop_factory
    from domicile.ops.status import NoCluster

    logs.set_up(log_level.value, log_format.value)
    try:
        with asyncio.Runner(loop_factory=loop_factory(loop.value)) as runner:
            runner.run(_follow(url, cluster, group, listen, limits, http))
    except ConfigError as error:
        fail(str(error), USAGE)
    except NoCluster as error:
        fail(str(error), AWAY)
    except DomicileError as error:
        fail(str(error), AWAY if is_away(error) else FAILED)
    except KeyboardInterrupt:
        fail("interrupted", INTERRUPTED)


async def _follow(
    url: str,
    cluster: str,
    group: str,
    listen: str | None,
    limits: ProxyLimits | None,
    http: str | None,
) -> None:
    from domicile.failover.answers import FollowerPages, follower_metrics
    from domicile.failover.following import GroupFollower
    from domicile.failover.proxy import GroupProxy
    from domicile.incarnation.signals import LeaveSignals
    from domicile.membership.clock import SystemClock
    from domicile.observe.http import HttpServer
    from domicile.observe.metrics import Metrics
    from domicile.ops.status import open_existing
    from domicile.stores.namespace import Namespace

    store = Namespace(open_existing(url, "follower", reads_only=True).store, cluster)
    clock, meter = SystemClock(), Metrics()
    follower = GroupFollower(group, store, clock, op_timeout_s=READ_S)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        signals = stack.enter_context(LeaveSignals())
        work = [follower.run]
        if listen is not None:
            proxy = GroupProxy(follower, listen, limits=limits, meter=meter)
            await proxy.start()
            stack.push_async_callback(proxy.close)
            log.info("a proxy for group %s listens at %s", group, proxy.address)
            work.append(proxy.run)
        if http is not None:
            metrics = follower_metrics(follower, meter, clock.now)
            server = HttpServer(http, FollowerPages(follower, {"/metrics": metrics}))
            await server.start()
            stack.push_async_callback(server.close)
            log.info("answers for group %s at http://%s/primary", group, server.address)
        # Only now, when nothing above has failed: they would never be awaited.
        tasks = [asyncio.ensure_future(one()) for one in work]
        asked = asyncio.ensure_future(signals.asked.wait())
        telling = asyncio.ensure_future(_tell_unknown(follower, store))
        try:
            await asyncio.wait([*tasks, asked], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in (*tasks, asked, telling):
                one.cancel()
            await asyncio.wait([*tasks, asked, telling])
        for one in tasks:
            if not one.cancelled():
                one.result()


async def _tell_unknown(follower: GroupFollower, store: Store) -> None:
    """Say that there is no such group, once the store has been read. It may be founded later."""
    from domicile.failover.records import GROUPS
    from domicile.failover.view import group_names

    while follower.confirmed_at is None:
        await follower.after(follower.version)
    if follower.records.known:
        return
    try:
        names = group_names((await store.list(GROUPS)).items)
    except StoreError:
        names = []
    known = f"; groups there: {', '.join(names)}" if names else ""
    log.warning(
        "there is no group %r in this store and cluster%s. It is waited for",
        follower.records.group, known,
    )  # fmt: skip
