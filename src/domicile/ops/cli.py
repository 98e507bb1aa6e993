"""The command `domicile`. It parses, calls and prints; other modules of `ops` compute what it
shows.

Exit codes: 0 fine, 1 failure, 2 usage, 3 a cluster that is away or does not serve every shard.
Standard output is for results; errors and logs go to standard error.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from domicile.errors import DomicileError
from domicile.ops import doctor, kubernetes, operate, replica, ring
from domicile.ops.console import (
    AWAY,
    FAILED,
    INTERRUPTED,
    USAGE,
    App,
    AsJson,
    Cluster,
    FormName,
    Http,
    LevelName,
    LogFormat,
    LogLevel,
    LoopName,
    LoopOption,
    NoWatchdog,
    StoreOption,
    examples,
    fail,
    figures_reader,
    find_app,
    is_away,
    print_json,
    read,
    which,
    writable,
)
from domicile.ops.journal.commands import add_journal_commands
from domicile.ops.store.commands import add_store_commands
from domicile.ops.stuck.commands import add_stuck_commands

if TYPE_CHECKING:
    from rich.console import RenderableType

    from domicile.ops.status import ClusterReader, ClusterStatus, EntityPlace
    from domicile.process import Process

REFRESH_S = 1.0

app = typer.Typer(
    name="domicile",
    help="Every key has exactly one live home in a cluster.",
    epilog="Try it: `domicile demo` runs a cluster on this machine and breaks it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"domicile {version_of('domicile')}")
        raise typer.Exit


@app.callback()
def everything(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Every key has exactly one live home in a cluster."""


@app.command(
    epilog=examples(
        "domicile run app:node",
        "domicile run app:make_node --log-format json --http 127.0.0.1:9464",
        "DOMICILE_TTL_S=2 domicile run shop.main:node --loop asyncio",
    )
)
def run(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:NAME",
            help="A Node, or a function without arguments that returns one; the current directory "
            "is on the import path.",
        ),
    ],
    loop: LoopOption = LoopName.auto,
    log_level: LogLevel = LevelName.info,
    log_format: LogFormat = FormName.text,
    http: Http = None,
    no_watchdog: NoWatchdog = False,
) -> None:
    """Run one node in this process until SIGTERM or Ctrl-C, then hand over and leave.

    Exits with 0 once it has left, 1 after an error, 2 if MODULE:NAME names no node or the
    environment is wrong, 3 if the store is away or can't be one. A second signal ends it at once.
    A node that hangs past its lease is ended by the watchdog.
    """
    from domicile.ops import logs

    logs.set_up(log_level.value, log_format.value)
    _serve(find_app(target), loop, no_watchdog, http)


@app.command(
    epilog=examples(
        "domicile manager sqlite:///.domicile/dev.db",
        "domicile manager --app app:node --strategy ranges --log-format json",
        "DOMICILE_TTL_S=2 domicile manager sqlite:///.domicile/dev.db --node-id manager-1",
    )
)
def manager(
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    strategy: Annotated[
        str, typer.Option(help="Where shards belong: least_shards, consistent_ring or ranges.")
    ] = "least_shards",
    listen: Annotated[
        str, typer.Option(help="Where nodes reach it: host:port or host:first-last.")
    ] = "127.0.0.1:0",
    advertise: Annotated[
        str | None, typer.Option(show_default=False, help="What nodes dial, if that differs.")
    ] = None,
    node_id: Annotated[
        str | None, typer.Option(show_default=False, help="Its name, if not one made of the host.")
    ] = None,
    loop: LoopOption = LoopName.auto,
    log_level: LogLevel = LevelName.info,
    log_format: LogFormat = FormName.text,
    http: Http = None,
    no_watchdog: NoWatchdog = False,
) -> None:
    """Run a coordinator in this process, without entities, until SIGTERM or Ctrl-C.

    A second one waits and takes over when the first is gone. Nodes that must never coordinate say
    `Node(candidate=False)`. Exits with 0 once it has left, 1 after an error, 2 if an option or the
    environment is wrong, 3 if the store is away or can't be one.
    """
    from domicile.core.placement.strategies import NAMES
    from domicile.errors import ConfigError
    from domicile.manager import Manager
    from domicile.ops import logs
    from domicile.transports.tcp import TcpTransport

    logs.set_up(log_level.value, log_format.value)
    url, name = which(store, app, cluster, "manager")
    if strategy not in NAMES:
        fail(f"--strategy {strategy!r} is not one of {', '.join(NAMES)}", USAGE)
    try:
        TcpTransport(listen, advertise=advertise)  # only to have the addresses read
        made = Manager(
            url, cluster=name, strategy=strategy, listen=listen, advertise=advertise,
            node_id=node_id,
        )  # fmt: skip
    except ConfigError as error:
        fail(str(error), USAGE)
    _serve(made, loop, no_watchdog, http)


def _serve(member: Process, loop: LoopName, no_watchdog: bool, http: str | None) -> None:
    from domicile.ops.serve import serve
    from domicile.ops.watchdog import ProcessWatchdog

    if not no_watchdog:
        member.watch_over(ProcessWatchdog())
    if http is not None:
        try:
            member.answer_at(http)
        except DomicileError as error:
            fail(f"--http: {error}", USAGE)
    try:
        serve(member, loop.value)
    except DomicileError as error:
        fail(str(error), AWAY if is_away(error) else FAILED)
    except KeyboardInterrupt:
        fail("interrupted", INTERRUPTED)


@app.command(
    epilog=examples(
        "domicile status sqlite:///.domicile/dev.db",
        "domicile status --app app:node --watch",
        "DOMICILE_STORE=sqlite:///.domicile/dev.db domicile status --json",
    )
)
def status(
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew every second.")] = False,
    store_only: Annotated[
        bool, typer.Option("--store-only", help="Do not ask the nodes how busy they are.")
    ] = False,
) -> None:
    """Show nodes, clients, shards, operators' wishes and late handlers.

    All of it is read from the store, except how busy the nodes are: they are asked that, and get a
    second to answer. Exits with 0 if every shard is served, 3 if not or if there is no cluster;
    with --watch, Ctrl-C ends it with the code of what it showed last.
    """
    from domicile.ops.show import ViewPrinter, keep_showing, status_view

    url, name = which(store, app, cluster, "status")
    figures = None if store_only else figures_reader(url, name, app)

    served: list[bool] = []

    async def look(reader: ClusterReader) -> None:
        async def seen() -> ClusterStatus:
            found = await reader.status()
            if figures is not None:
                found = replace(found, nodes=await figures.add_to(found.nodes))
            served[:] = [found.served]
            return found

        async def drawn() -> RenderableType:
            return status_view(await seen())

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
        read(url, name, look)
    except KeyboardInterrupt:
        if not served:
            raise
    if not served[-1]:
        raise typer.Exit(AWAY)


@app.command(
    epilog=examples(
        "domicile where counter c1 sqlite:///.domicile/dev.db",
        "domicile where counter c1 --app app:node --json",
    )
)
def where(
    type: Annotated[str, typer.Argument(metavar="TYPE", help="The entity type's name.")],
    id: Annotated[str, typer.Argument(metavar="ID", help="The entity's id.")],
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    role: Annotated[
        str | None,
        typer.Option(show_default=False, help="The type's role, if its nodes have several."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the home of one entity: shard, owner, epoch, state, address.

    The entity need not exist. Exits with 0 if its shard is served, 3 if not.
    """
    from domicile.ops.show import ViewPrinter, place_view

    url, name = which(store, app, cluster, "where", type, id)

    async def look(reader: ClusterReader) -> EntityPlace:
        return await reader.where(type, id, role)

    place = read(url, name, look)
    if as_json:
        print_json(place)
    else:
        with ViewPrinter(live=False) as shown:
            shown.show(place_view(place))
    if not place.served:
        raise typer.Exit(AWAY)


@app.command(
    epilog=examples(
        "domicile demo", "domicile demo --seed 7 --plain", "domicile demo --svg demo.svg"
    )
)
def demo(
    seconds: Annotated[
        float, typer.Option(min=1, max=600, help="About how long the load runs.")
    ] = 20.0,
    nodes: Annotated[int, typer.Option(min=3, max=16, help="Node processes at the start.")] = 3,
    seed: Annotated[int, typer.Option(help="Chooses the victims and the load.")] = 1,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of a live view.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep logs and histories.")] = False,
    svg: Annotated[
        Path | None,
        typer.Option(show_default=False, dir_okay=False, help="Draw the report into this file."),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(show_default=False, help="The URL of an empty store, instead of a file."),
    ] = None,
) -> None:
    """Run a bank on processes here, kill, freeze and drain some under load, and count the coins.

    All files are in a temporary directory. Exits with 0 only if every promise was kept.
    """
    from domicile.ops.demo.run import DemoOptions, run_demo

    if svg is not None:
        writable("--svg", svg)
    raise typer.Exit(run_demo(DemoOptions(seconds, nodes, seed, plain, keep, svg, store)))


operate.add_operator_commands(app)
add_stuck_commands(app)
add_journal_commands(app)
add_store_commands(app)
doctor.add_doctor_command(app)
kubernetes.add_kubernetes_commands(app)
ring.add_ring_commands(app)
replica.add_replica_commands(app)
