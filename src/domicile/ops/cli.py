"""The command `domicile`. Parses, calls, prints; what it shows is computed elsewhere in `ops`.

Exit codes: 0 fine, 1 failure, 2 usage, 3 a cluster that is away or does not serve every shard.
Standard output is for results; errors and logs go to standard error.
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from enum import Enum
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import msgspec
import typer

from domicile.errors import ConfigError, DomicileError

if TYPE_CHECKING:
    from domicile.node import Node
    from domicile.ops.status import Place, Reader, Status

T = TypeVar("T")

FAILED, USAGE, AWAY = 1, 2, 3
REFRESH_S = 1.0


def _examples(*commands: str) -> str:
    return "Examples:\n\n" + "\n\n".join(f"- `{command}`" for command in commands)


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


class LoopName(str, Enum):  # noqa: UP042 - StrEnum would change what typer shows
    """What to run on."""

    auto = "auto"
    asyncio = "asyncio"
    uvloop = "uvloop"


class LevelName(str, Enum):  # noqa: UP042
    """What to log."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"
    critical = "critical"


class FormName(str, Enum):  # noqa: UP042
    """How to log."""

    text = "text"
    json = "json"


Store = Annotated[
    str | None,
    typer.Argument(
        metavar="STORE",
        show_default=False,
        help="The store's URL, as in sqlite:///.domicile/dev.db; else that of --app, else "
        "DOMICILE_STORE.",
    ),
]
App = Annotated[
    str | None,
    typer.Option(show_default=False, help="Take store and cluster from the node module:name."),
]
Cluster = Annotated[
    str | None,
    typer.Option(show_default=False, help="The cluster's name, if not 'domicile'."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def main() -> None:
    """The entry point of the console script."""
    app()


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
    epilog=_examples(
        "domicile run app:node",
        "domicile run app:make_node --log-format json",
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
    loop: Annotated[
        LoopName, typer.Option(help="The event loop; auto is uvloop where it is installed.")
    ] = LoopName.auto,
    log_level: Annotated[LevelName, typer.Option(help="The least level logged.")] = LevelName.info,
    log_format: Annotated[FormName, typer.Option(help="For people or machines.")] = FormName.text,
    no_watchdog: Annotated[
        bool,
        typer.Option(
            "--no-watchdog",
            help="Do not end the process if it hangs past its lease, as under a debugger.",
        ),
    ] = False,
) -> None:
    """Run one node in this process until SIGTERM or Ctrl-C, then hand over and leave.

    Exits with 0 once it has left, 1 after an error, 2 if MODULE:NAME names no node. A second
    signal ends it at once. A node that hangs past its lease is ended by the watchdog.
    """
    from domicile.ops import logs
    from domicile.ops.serve import serve
    from domicile.ops.watchdog import ProcessWatchdog

    logs.set_up(log_level.value, log_format.value)
    node = _find(target)
    if not no_watchdog:
        node.watch_over(ProcessWatchdog())
    try:
        serve(node, loop.value)
    except DomicileError as error:
        _fail(str(error), FAILED)
    except KeyboardInterrupt:
        _fail("interrupted", 130)


@app.command(
    epilog=_examples(
        "domicile status sqlite:///.domicile/dev.db",
        "domicile status --app app:node --watch",
        "DOMICILE_STORE=sqlite:///.domicile/dev.db domicile status --json",
    )
)
def status(
    store: Store = None,
    app: App = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew every second.")] = False,
) -> None:
    """Show nodes, clients, shards and wishes, as the store has them.

    Asks no node. Exits with 0 if every shard is served, 3 if not or if there is no cluster; with
    --watch, Ctrl-C ends it with the code of what it showed last.
    """
    from domicile.ops.show import Shown, status_view

    url, name = _which(store, app, cluster)

    last: list[Status] = []

    async def look(reader: Reader) -> Status:
        with Shown(watch and not as_json) as shown:
            while True:
                seen = await reader.status()
                last[:] = [seen]
                if as_json:
                    _print_json(seen)
                else:
                    shown.show(status_view(seen))
                if not watch:
                    return seen
                await asyncio.sleep(REFRESH_S)

    try:
        _read(url, name, look)
    except KeyboardInterrupt:
        if not last:
            raise
    if not last[-1].served:
        raise typer.Exit(AWAY)


@app.command(
    epilog=_examples(
        "domicile where counter c1 sqlite:///.domicile/dev.db",
        "domicile where counter c1 --app app:node --json",
    )
)
def where(
    type: Annotated[str, typer.Argument(metavar="TYPE", help="The entity type's name.")],
    id: Annotated[str, typer.Argument(metavar="ID", help="The entity's id.")],
    store: Store = None,
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
    from domicile.ops.show import Shown, place_view

    url, name = _which(store, app, cluster)

    async def look(reader: Reader) -> Place:
        return await reader.where(type, id, role)

    place = _read(url, name, look)
    if as_json:
        _print_json(place)
    else:
        with Shown(live=False) as shown:
            shown.show(place_view(place))
    if not place.served:
        raise typer.Exit(AWAY)


@app.command(
    epilog=_examples(
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
) -> None:
    """Run a cluster of processes here, kill, freeze and drain some under load, and judge it.

    Everything lives in a temporary directory. Exits with 0 only if every promise was kept.
    """
    from domicile.ops.demo import Wanted, run_demo

    if svg is not None:
        _see_that_writable(svg)
    raise typer.Exit(run_demo(Wanted(seconds, nodes, seed, plain, keep, svg)))


def _see_that_writable(file: Path) -> None:
    """Now rather than after the run."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("ab").close()
    except OSError as error:
        _fail(f"--svg {file} can't be written: {error.strerror}; name another file", USAGE)


def _find(target: str) -> Node:
    from domicile.ops.apps import TargetError, find_node

    try:
        return find_node(target)
    except TargetError as error:
        _fail(str(error), USAGE)
    except DomicileError as error:
        _fail(f"{target.partition(':')[0]} could not be imported: {error}", FAILED)
    except Exception as error:
        # The user's own code failed: show where, without the frames of the import machinery.
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "importlib" not in frame.filename]
        own = [frame for frame in own if not frame.filename.startswith(str(Path(__file__).parent))]
        shown = "".join(traceback.format_list(own))
        if shown:
            typer.echo(f"Traceback (most recent call last):\n{shown}".rstrip(), err=True)
        detail = "".join(traceback.format_exception_only(error)).strip()
        _fail(f"{target.partition(':')[0]} could not be imported: {detail}", FAILED)


def _which(store: str | None, target: str | None, cluster: str | None) -> tuple[str, str]:
    if target is not None:
        node = _find(target)
        return store or node.store, cluster or node.cluster
    store = store or os.environ.get("DOMICILE_STORE")
    if not store:
        _fail(
            "say which store: domicile status sqlite:///path/to/file.db, or set DOMICILE_STORE, "
            "or --app module:name",
            USAGE,
        )
    return store, cluster or "domicile"


def _read(url: str, cluster: str, look: Callable[[Reader], Awaitable[T]]) -> T:
    """Look at a cluster; every failure ends the process with what to do next."""
    from domicile.ops.status import NoCluster, Reader

    async def reading() -> T:
        reader = Reader(url, cluster)
        try:
            return await look(reader)
        finally:
            await reader.close()

    try:
        return asyncio.run(reading())
    except ConfigError as error:
        _fail(str(error), USAGE)
    except LookupError as error:
        _fail(str(error.args[0]), FAILED)
    except (NoCluster, DomicileError) as error:
        _fail(str(error), AWAY)


def _print_json(value: object) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)
