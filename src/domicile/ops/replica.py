"""The commands `domicile replica …`: what people and scripts see and change of replica groups.

They read and write the store and ask no agent; agents heed what is written (F13). A command that
changes a group leaves an audit record, in the same commit. `ops.group_commits` decides what is
committed, `ops.show_groups` draws.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import typer

from domicile.errors import ConfigError
from domicile.ops.console import (
    AWAY,
    FAILED,
    USAGE,
    App,
    AsJson,
    Cluster,
    StoreOption,
    answered,
    examples,
    fail,
    print_json,
    which,
)
from domicile.ops.operate import Why, Yes, confirm, run_operator, say_logged
from domicile.ops.replica_run import add_run
from domicile.ops.replica_serving import add_serving_commands

if TYPE_CHECKING:
    from rich.console import RenderableType

    from domicile.failover.view import GroupRecords, GroupView, LagClock
    from domicile.ops.operator import Operator
    from domicile.ops.operator_commits import AuditRecord, OperatorCommit, StoreSnapshot
    from domicile.ports.store import Store

T = TypeVar("T")

REFRESH_S = 1.0

LOOK_S = 0.1
"""How often `switchover` looks whether its server is level."""

PROGRESS_S = 0.5
"""What takes longer than this says what it waits for."""

AGAIN_S = 2.0
"""How often it says so, if that has changed."""

AFTER_S = 5.0
"""How long `switchover` waits for its end, beyond the time that a group gives one."""

GroupName = Annotated[str, typer.Argument(metavar="GROUP", help="The group's name.")]


def add_replica_commands(app: typer.Typer) -> None:
    """Add these commands to the application."""
    dev = "sqlite:///.domicile/dev.db"
    group = typer.Typer(
        no_args_is_help=True, help="Automatic failover of Valkey, Redis and PostgreSQL."
    )
    add_run(group)
    for name, command, shown in (
        ("status", show_groups, (f"status {dev}", f"status orders {dev} --watch")),
        ("primary", print_primary, (f"primary orders {dev}", f"primary orders {dev} --wait 10")),
        ("switchover", switch_over, (f"switchover orders {dev} --to orders-2",)),
        (
            "failover",
            force_failover,
            (f"failover orders {dev} --force", f"failover orders {dev} --force --yes --why fire"),
        ),
        ("pause", pause_group, (f"pause orders {dev} --why 'new disks'",)),
        ("resume", resume_group, (f"resume orders {dev}",)),
        (
            "configure",
            configure_group,
            (f"configure orders {dev} freeze_s=2",
             f"configure orders {dev} sync_count=2 restart_s=5"),
        ),
        ("history", show_history, (f"history orders {dev}", f"history orders {dev} --json")),
        ("remove", remove_server, (f"remove orders orders-3 {dev}",)),
    ):  # fmt: skip
        epilog = examples(*(f"domicile replica {example}" for example in shown))
        group.command(name, epilog=epilog)(command)
    add_serving_commands(group)
    app.add_typer(group, name="replica")


def show_groups(
    group: Annotated[
        str | None, typer.Argument(metavar="GROUP", show_default=False, help="Else all groups.")
    ] = None,
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew every second.")] = False,
) -> None:
    """Show the servers of a group, what it waits for, and what a failover would lose now.

    Positions are those of the agents' last reports. Exits with 0 if every group that is shown has a
    primary that accepts writes, 3 if not; with --watch, Ctrl-C ends it with the code of what it
    showed last.
    """
    from domicile.failover.view import LagClock, group_view
    from domicile.ops.show import ViewPrinter, keep_showing
    from domicile.ops.show_groups import groups_view

    if group is not None and "://" in group and store is None:
        group, store = None, group
    url, name = which(store, app, cluster, "replica status", group)
    clocks: dict[str, LagClock] = {}
    served: list[bool] = []

    async def look(store: Store) -> None:
        loop = asyncio.get_running_loop()

        async def seen() -> list[GroupView]:
            found: list[GroupView] = []
            moved = await _moved(store)
            for records in await _groups(store, group):
                clock = clocks.setdefault(records.group, LagClock())
                clock.note(records, loop.time())
                view = _timed(group_view(records), clock, loop.time())
                found.append(replace(view, moved=moved))
            served[:] = [all(one.served for one in found)]
            return found

        async def drawn() -> RenderableType:
            return groups_view(await seen())

        def away() -> None:
            served[:] = [False]

        with ViewPrinter(watch and not as_json) as shown:
            while as_json:
                print_json(await seen())
                if not watch:
                    return
                await asyncio.sleep(REFRESH_S)
            if not watch:
                shown.show(await drawn())
                return
            await keep_showing(drawn, shown, REFRESH_S, away)

    try:
        _read(url, name, look)
    except KeyboardInterrupt:
        if not served:
            raise
    if not served[-1]:
        raise typer.Exit(AWAY)


def print_primary(
    group: GroupName,
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for a primary while there is none.")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Print where a group's primary accepts connections, as host:port and nothing else.

    For scripts: it exits with 0 if there is a primary, 3 if there is none or the store is away, 1
    if there is no such group.
    """
    from domicile.failover.following import Group, GroupReach, Primary
    from domicile.membership.clock import SystemClock
    from domicile.ops.status import READ_S

    url, name = which(store, app, cluster, "replica primary", group)

    async def look(store: Store) -> Primary:
        await _groups(store, group)
        reach = GroupReach(store, SystemClock(), READ_S, wait)
        return await Group(group, lambda: reach).primary()

    found = _read(url, name, look)
    if as_json:
        print_json(found)
    else:
        typer.echo(found.address)


def switch_over(
    group: GroupName,
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="SERVER", show_default=False, help="Else the most advanced server that is fit."
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(min=0, help="Seconds to wait until the server is level, while writes go on."),
    ] = 30.0,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Begin though it is behind: writes wait for it.")
    ] = False,
    why: Why = "",
) -> None:
    """Make another server the primary, without losing a write.

    It begins once the server is level with the primary: within a second of it. Then writes wait
    until the server has everything. If that takes too long, the old one serves on. Exits with 0
    once the new one serves, 1 if it does not.
    """
    from domicile.ops.group_commits import group_records, switch_commit, switch_target

    url, name = which(store, app, cluster, "replica switchover", group)

    async def work(operator: Operator) -> tuple[str, GroupView, float]:
        loop = asyncio.get_running_loop()
        records = group_records(await operator.look(), group)
        target = switch_target(records, to)
        agreed = switch_commit(records, target).what
        if not anyway:
            await _level(operator, group, target, wait)

        def make(picture: StoreSnapshot) -> OperatorCommit:
            return switch_commit(group_records(picture, group), target)

        began = loop.time()
        say_logged(*await operator.do("replica switchover", make, agreed, why))
        return target, await _settled(operator, group), loop.time() - began

    wanted, view, took_s = run_operator(url, name, work)
    if view.primary == wanted:
        typer.echo(f"{wanted} is the primary of {group}, epoch {view.epoch}, after {took_s:.1f} s")
        return
    if view.primary is not None:
        lacks = [one.lag for one in view.servers if one.server == wanted and one.lag]
        behind = f", {wanted} lacks {lacks[0]:,} bytes" if lacks else ""
        fail(
            f"{wanted} did not become primary, {view.primary} serves on: {view.why}{behind}", FAILED
        )
    fail(
        f"the switchover to {wanted} goes on: {view.waits}; see `domicile replica status {group}`",
        AWAY,
    )


def force_failover(
    group: GroupName,
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    force: Annotated[
        bool, typer.Option("--force", help="Accept the loss for which the election waits.")
    ] = False,
    yes: Yes = False,
    why: Why = "",
) -> None:
    """End an election that waits because a failover might lose acknowledged writes.

    Elections begin by themselves, and wait only where a write might be lost. Without --force it
    says what would be lost, and changes nothing.
    """
    from domicile.ops.group_commits import force_commit, group_records

    url, name = which(store, app, cluster, "replica failover", group)

    async def look(operator: Operator) -> tuple[str, str]:
        forcing = force_commit(group_records(await operator.look(), group))
        return forcing.loss, forcing.commit.what

    loss, agreed = run_operator(url, name, look)
    if not force:
        typer.echo(loss, err=True)
        fail(f"nothing was done; to accept that: domicile replica failover {group} --force", FAILED)
    confirm(loss, group, yes)

    def make(picture: StoreSnapshot) -> OperatorCommit:
        return force_commit(group_records(picture, group)).commit

    async def work(operator: Operator) -> GroupView:
        say_logged(*await operator.do("replica failover --force", make, agreed, why))
        return await _settled(operator, group)

    view = run_operator(url, name, work)
    if view.primary is None:
        fail(f"the failover goes on: {view.waits}; see `domicile replica status {group}`", AWAY)
    typer.echo(f"{view.primary} is the primary of {group}, epoch {view.epoch}")


def pause_group(
    group: GroupName,
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    why: Why = "",
) -> None:
    """Begin maintenance: no change of primary begins until `resume`.

    A primary that stops or fails is not replaced meanwhile. A change that has begun is finished.
    """
    _pause(group, store, app, cluster, why, paused=True)
    typer.echo(
        f"{group} is paused: a primary that fails is not replaced until `domicile replica resume "
        f"{group}`"
    )


def resume_group(
    group: GroupName,
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    why: Why = "",
) -> None:
    """End maintenance: a primary that fails is replaced again."""
    _pause(group, store, app, cluster, why, paused=False)
    typer.echo(f"{group} is not paused any more")


def _pause(
    group: str, store: str | None, app: str | None, cluster: str | None, why: str, *, paused: bool
) -> None:
    from domicile.ops.group_commits import pause_commit

    word = "pause" if paused else "resume"
    url, name = which(store, app, cluster, f"replica {word}", group)

    def make(picture: StoreSnapshot) -> OperatorCommit:
        return pause_commit(picture, group, paused=paused)

    async def work(operator: Operator) -> tuple[bytes, AuditRecord]:
        return await operator.do(f"replica {word}", make, group, why)

    say_logged(*run_operator(url, name, work))


def configure_group(
    group: GroupName,
    changes: Annotated[
        list[str],
        typer.Argument(
            metavar="STORE | NAME=VALUE",
            show_default=False,
            help="freeze_s, restart_s, switch_s or sync_count with its new value, several at once; "
            "before them the store's URL, unless DOMICILE_STORE has it.",
        ),
    ],
    app: App = None,
    cluster: Cluster = None,
    why: Why = "",
) -> None:
    """Change the configuration that all servers of a group share, while it runs.

    The first agent of a group stores it; what other files say later is ignored. Write the new
    values into the servers' files too. Driver and mode can't be changed.
    """
    from domicile.ops.group_commits import config_changes, configure_commit

    store = next((one for one in changes if "://" in one), None)
    try:
        wanted = config_changes([one for one in changes if one != store])
    except ConfigError as error:
        fail(str(error), USAGE)
    url, name = which(store, app, cluster, "replica configure", group)

    def make(picture: StoreSnapshot) -> OperatorCommit:
        return configure_commit(picture, group, wanted)

    async def look(operator: Operator) -> str:
        return make(await operator.look()).what

    agreed = run_operator(url, name, look)

    async def work(operator: Operator) -> tuple[bytes, AuditRecord]:
        return await operator.do("replica configure", make, agreed, why)

    say_logged(*run_operator(url, name, work))
    typer.echo(agreed)


def show_history(
    group: GroupName,
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Show the epochs of a group with their primaries, what was lost, and operators' commands."""
    from domicile.ops.group_commits import GroupHistory, group_history
    from domicile.ops.show import ViewPrinter
    from domicile.ops.show_groups import history_view

    url, name = which(store, app, cluster, "replica history", group)

    async def work(operator: Operator) -> GroupHistory:
        return group_history(await operator.look(), group)

    found = run_operator(url, name, work)
    if as_json:
        print_json(found)
        return
    with ViewPrinter(live=False) as shown:
        shown.show(history_view(found))


def remove_server(
    group: GroupName,
    server: Annotated[str, typer.Argument(metavar="SERVER", help="The server's id.")],
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    yes: Yes = False,
    why: Why = "",
) -> None:
    """Forget a server that is gone for good: the receipts of what it lost are deleted.

    Its record goes by itself with its agent's lease. It refuses while the server has an agent, and
    while a write quorum lists it. The files with lost writes stay where they are.
    """
    from domicile.ops.group_commits import group_records, loss_text, remove_commit

    url, name = which(store, app, cluster, "replica remove", group, server)

    def make(picture: StoreSnapshot) -> OperatorCommit:
        return remove_commit(group_records(picture, group), server)

    def left(picture: StoreSnapshot) -> list[str]:
        records = group_records(picture, group)
        return [loss_text(one) for one in records.receipts.values() if one.server == server]

    async def look(operator: Operator) -> tuple[str, list[str]]:
        picture = await operator.look()
        return make(picture).what, left(picture)

    agreed, lost = run_operator(url, name, look)
    confirm("These receipts of lost writes are forgotten:\n  " + "\n  ".join(lost), server, yes)

    async def work(operator: Operator) -> list[tuple[bytes, AuditRecord]]:
        logged: list[tuple[bytes, AuditRecord]] = []
        wanted = agreed
        # A commit takes only so many deletions (S7). Each one leaves fewer.
        for _ in range(len(lost)):
            logged.append(await operator.do("replica remove", make, wanted, why))
            picture = await operator.look()
            if not left(picture):
                break
            wanted = make(picture).what
        return logged

    for one in run_operator(url, name, work):
        say_logged(*one)
    typer.echo(f"{server} is forgotten in {group}")


# inside


def _read(url: str, cluster: str, look: Callable[[Store], Awaitable[T]]) -> T:
    """Read a cluster's part of a store; every failure ends the process with what to do next."""
    from domicile.ops.status import open_existing
    from domicile.stores.namespace import Namespace

    async def reading() -> T:
        store = Namespace(open_existing(url, "replica", reads_only=True).store, cluster)
        try:
            return await look(store)
        finally:
            await store.close()

    return answered(lambda: asyncio.run(reading()))


async def _groups(store: Store, group: str | None) -> list[GroupRecords]:
    """One group, or all; raises `LookupError` or `NoCluster`."""
    from domicile.failover.records import GROUPS, group_prefix
    from domicile.ops.group_commits import existing_groups, group_records
    from domicile.ops.operator_commits import StoreSnapshot

    prefix = GROUPS if group is None else group_prefix(group)
    listing = await store.list(prefix)
    if not listing.items and group is not None:
        listing = await store.list(GROUPS)
    picture = StoreSnapshot(listing)
    return existing_groups(picture) if group is None else [group_records(picture, group)]


async def _moved(store: Store) -> str:
    """Why agents refuse this store; empty if they do not."""
    from domicile.core.state.keys import MOVED_KEY
    from domicile.core.state.records import MoveRecord, decode_record
    from domicile.ops.status import moved_text

    item = await store.get(MOVED_KEY)
    try:
        return "" if item is None else moved_text(decode_record(item.value, MoveRecord))
    except msgspec.MsgspecError as error:
        return f"to or from another store, by a mark that can't be read here: {error}"


def _timed(view: GroupView, clock: LagClock, now: float) -> GroupView:
    """The same view with lags in seconds, as far as they were observed."""
    servers = tuple(
        replace(one, lag_s=clock.behind_s(one.offset, now)) if one.lag is not None else one
        for one in view.servers
    )
    return replace(view, servers=servers)


class _Waiting:
    """Says on standard error what a command waits for, once that takes longer than a moment."""

    def __init__(self) -> None:
        self._said, self._said_at = "", asyncio.get_running_loop().time() + PROGRESS_S - AGAIN_S

    def told(self, what: str) -> None:
        """It waits for this now."""
        now = asyncio.get_running_loop().time()
        if what != self._said and now >= self._said_at + AGAIN_S:
            self._said, self._said_at = what, now
            typer.echo(f"waiting: {what}", err=True)


async def _level(operator: Operator, group: str, to: str, wait_s: float) -> None:
    """Wait, before writes are held back, until a switchover holds them back for a moment only.

    `LookupError` if the server is not level in time; nothing is changed then.
    """
    from domicile.failover.view import LagClock, group_view
    from domicile.ops.group_commits import group_records, not_level

    loop, clock, waiting = asyncio.get_running_loop(), LagClock(), _Waiting()
    until = loop.time() + wait_s
    while True:
        records = group_records(await operator.look(), group)
        clock.note(records, loop.time())
        view = group_view(records)
        offsets = [one.offset for one in view.servers if one.server == to and one.incarnation]
        behind_s = clock.behind_s(offsets[-1], loop.time()) if offsets else None
        why = not_level(view, to, behind_s)
        if not why:
            return
        if loop.time() >= until:
            switch_s = 0.0 if records.config is None else records.config.switch_s
            raise LookupError(
                f"{why}, after {wait_s:g} s; nothing was done. Choose another server, wait longer "
                f"with --wait, or say --anyway: then writes wait for it, {switch_s:g} s at most"
            )
        waiting.told(why)
        await asyncio.sleep(LOOK_S)


async def _settled(operator: Operator, group: str) -> GroupView:
    """The group once a change of primary has ended, or when it takes too long."""
    from domicile.failover.view import group_view
    from domicile.ops.group_commits import group_records

    loop = asyncio.get_running_loop()
    records = group_records(await operator.look(), group)
    limit_s = AFTER_S + (0.0 if records.config is None else records.config.switch_s)
    until, waiting = loop.time() + limit_s, _Waiting()
    while (view := group_view(records)).primary is None and loop.time() < until:
        waiting.told(view.waits)
        await asyncio.sleep(0.05)
        records = group_records(await operator.look(), group)
    return view
