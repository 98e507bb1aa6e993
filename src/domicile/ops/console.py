"""What all commands share: options, exit codes, which cluster is meant, and how failures end.

Used by the command modules of `ops` only. Every failure must say what to do next and end the
process with one of the exit codes.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Awaitable, Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import msgspec
import typer

from domicile import config
from domicile.errors import ConfigError, DomicileError, StoreError

if TYPE_CHECKING:
    from domicile.node import Node
    from domicile.ops.figures import FiguresReader
    from domicile.ops.status import ClusterReader

T = TypeVar("T")

FAILED, USAGE, AWAY, INTERRUPTED = 1, 2, 3, 130

_STORES = "domicile.stores"
_COMMANDS = str(Path(__file__).parent)
_LIBRARY = str(Path(__file__).parents[1])
_INSTALLED = ("<", *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")))
"""Prefixes of the files of frames that are not the user's; `<string>` is generated code."""


class LoopName(str, Enum):  # noqa: UP042 - StrEnum would change what typer shows
    """The event loop to run on."""

    auto = "auto"
    asyncio = "asyncio"
    uvloop = "uvloop"


class LevelName(str, Enum):  # noqa: UP042
    """The lowest level to log."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"
    critical = "critical"


class FormName(str, Enum):  # noqa: UP042
    """The form of log lines."""

    text = "text"
    json = "json"


StoreOption = Annotated[
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
LoopOption = Annotated[
    LoopName, typer.Option(help="The event loop; auto is uvloop where it is installed.")
]
LogLevel = Annotated[LevelName, typer.Option(help="The least level logged.")]
LogFormat = Annotated[FormName, typer.Option(help="For people or machines.")]
Http = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        show_default=False,
        help="Serve /metrics, /healthz and /readyz there, whatever the settings say.",
    ),
]
NoWatchdog = Annotated[
    bool,
    typer.Option(
        "--no-watchdog",
        help="Do not end the process if it hangs past its lease, as under a debugger.",
    ),
]


def examples(*commands: str) -> str:
    """The end of a command's help."""
    return "Examples:\n\n" + "\n\n".join(f"- `{command}`" for command in commands)


def which(
    store: str | None, target: str | None, cluster: str | None, *typed: str | None
) -> tuple[str, str]:
    """The store's URL and the cluster's name that a command line means.

    `typed` is the command and its arguments, for the hint if the store is missing.
    """
    if target is not None:
        node = find_app(target)
        return store or node.store, cluster or node.cluster
    store = store or os.environ.get("DOMICILE_STORE")
    if not store:
        command, *rest = [word for word in typed if word is not None]
        # A command of a group, as `replica status`, is two words.
        words = shlex.join((*command.split(), *rest))
        fail(
            f"say which store: domicile {words} sqlite:///path/to/file.db, or set DOMICILE_STORE, "
            "or --app module:name",
            USAGE,
        )
    return store, cluster or "domicile"


def figures_reader(url: str, cluster: str, target: str | None) -> FiguresReader:
    """What asks the nodes of a cluster how busy they are, with the token and certificates of
    `target` or of the environment."""
    from domicile.backends.wiring import dialler
    from domicile.ops.figures import FiguresReader

    if target is not None:
        node = find_app(target)
        settings, token = node.settings, node.token
    else:
        try:
            settings, token = config.from_environment(), config.token_of(None)
        except ConfigError as error:
            fail(f"wrong environment: {error}; or say --store-only and ask no node", USAGE)
    return answered(
        lambda: FiguresReader(dialler(url, cluster=cluster, settings=settings), cluster, token)
    )


def find_app(target: str) -> Node:
    """The node of `module:name`; errors of the user's own module are shown as such."""
    from domicile.ops.apps import FactoryError, TargetError, find_node

    try:
        return find_node(target)
    except TargetError as error:
        fail(str(error), USAGE)
    except FactoryError as error:
        _blame(error.raised, f"{target}() failed")
    except Exception as error:
        _blame(error, f"{target.partition(':')[0]} could not be imported")


def _blame(error: Exception, what: str) -> NoReturn:
    """End with the error that the user's own code raised, and its place."""
    if isinstance(error, ConfigError) and str(error) == _wrong_environment():
        fail(f"wrong environment: {error}", USAGE)
    frames, refused = own_frames(error)
    shown = "".join(traceback.format_list(frames)).rstrip()
    if shown:
        typer.echo(shown if refused else f"Traceback (most recent call last):\n{shown}", err=True)
    detail = str(error)
    if not isinstance(error, DomicileError):
        detail = "".join(traceback.format_exception_only(error)).strip()
    fail(f"{what}: {detail}", FAILED)


def own_frames(error: Exception) -> tuple[list[traceback.FrameSummary], bool]:
    """The user's part of a traceback, and whether Domicile itself refused something.

    In that case the user's last frame is enough: Domicile's own frames do not help the user.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and not frame.filename.startswith(_COMMANDS)
    ]
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARY)]
    if own == frames:
        return own, False
    users = [frame for frame in own if not frame.filename.startswith(_INSTALLED)]
    return [
        traceback.FrameSummary(one.filename, one.lineno, one.name, line=one.line)
        for one in (users or own)[-1:]
    ], True


def _wrong_environment() -> str:
    """What is wrong with the settings of the environment; empty: nothing."""
    try:
        config.from_environment()
    except ConfigError as error:
        return str(error)
    return ""


def is_away(error: DomicileError) -> bool:
    """Whether an error of any kind means that the store is away or is not a store."""
    if isinstance(error, StoreError):
        return True
    steps = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith(_STORES) for frame, _ in steps)


def read(url: str, cluster: str, look: Callable[[ClusterReader], Awaitable[T]]) -> T:
    """Read a cluster; every failure ends the process with what to do next."""
    from domicile.ops.status import ClusterReader, open_existing

    async def reading() -> T:
        reader = ClusterReader(open_existing(url, "status", reads_only=True), cluster)
        try:
            return await look(reader)
        finally:
            await reader.close()

    return answered(lambda: asyncio.run(reading()))


def answered(work: Callable[[], T]) -> T:
    """Run `work` on a cluster; its errors become exit codes."""
    from domicile.ops.operator_commits import Ambiguous
    from domicile.ops.status import NoCluster

    try:
        return work()
    except (ConfigError, Ambiguous) as error:
        fail(str(error), USAGE)
    except LookupError as error:
        fail(str(error.args[0]), FAILED)
    except (NoCluster, DomicileError) as error:
        fail(str(error), AWAY)


def writable(option: str, file: Path) -> None:
    """Check before the run that a file can be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("ab").close()
    except OSError as error:
        fail(f"{option} {file} can't be written: {error.strerror}; name another file", USAGE)


def print_json(value: object) -> None:
    """One line of JSON."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def fail(message: str, code: int) -> NoReturn:
    """End with an error."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)
