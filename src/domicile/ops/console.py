"""What all commands share: options, exit codes, which cluster is meant, and how failures end.

Used by the command modules of `ops` only. Every failure says what to do next and ends the process
with one of the exit codes.
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import msgspec
import typer

from domicile.errors import ConfigError, DomicileError

if TYPE_CHECKING:
    from domicile.node import Node
    from domicile.ops.status import Reader

T = TypeVar("T")

FAILED, USAGE, AWAY, INTERRUPTED = 1, 2, 3, 130


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
Loop = Annotated[
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


def which(store: str | None, target: str | None, cluster: str | None) -> tuple[str, str]:
    """The store's URL and the cluster's name that a command line means."""
    if target is not None:
        node = find(target)
        return store or node.store, cluster or node.cluster
    store = store or os.environ.get("DOMICILE_STORE")
    if not store:
        fail(
            "say which store: domicile status sqlite:///path/to/file.db, or set DOMICILE_STORE, "
            "or --app module:name",
            USAGE,
        )
    return store, cluster or "domicile"


def find(target: str) -> Node:
    """The node of `module:name`; what the user's own module raises is shown as its own."""
    from domicile.ops.apps import TargetError, find_node

    try:
        return find_node(target)
    except TargetError as error:
        fail(str(error), USAGE)
    except DomicileError as error:
        fail(f"{target.partition(':')[0]} could not be imported: {error}", FAILED)
    except Exception as error:
        # The user's own code failed: show where, without the frames of the import machinery.
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "importlib" not in frame.filename]
        own = [frame for frame in own if not frame.filename.startswith(str(Path(__file__).parent))]
        shown = "".join(traceback.format_list(own))
        if shown:
            typer.echo(f"Traceback (most recent call last):\n{shown}".rstrip(), err=True)
        detail = "".join(traceback.format_exception_only(error)).strip()
        fail(f"{target.partition(':')[0]} could not be imported: {detail}", FAILED)


def read(url: str, cluster: str, look: Callable[[Reader], Awaitable[T]]) -> T:
    """Look at a cluster; every failure ends the process with what to do next."""
    from domicile.ops.status import Reader

    async def reading() -> T:
        reader = Reader(url, cluster)
        try:
            return await look(reader)
        finally:
            await reader.close()

    return answered(lambda: asyncio.run(reading()))


def answered(work: Callable[[], T]) -> T:
    """Do something with a cluster; its errors become exit codes."""
    from domicile.core.breakglass import Ambiguous
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
    """See now rather than after the run that a file can be written."""
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
