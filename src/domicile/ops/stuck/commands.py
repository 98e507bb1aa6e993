"""Commands for handlers that do not end: `inspect` shows them, `kick` ends them (DX-09).

The command line adds them. They parse and print; `ops.stuck.inspecting` and `ops.operator` do the
work.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from domicile.ops.console import (
    AWAY,
    FAILED,
    App,
    AsJson,
    Cluster,
    StoreOption,
    examples,
    fail,
    print_json,
    read,
    which,
)
from domicile.ops.operate import PROGRESS_S, Why, run_operator, say_logged

if TYPE_CHECKING:
    from domicile.diagnose.records import KickOutcome
    from domicile.ops.operator import Kicking, Operator
    from domicile.ops.operator_commits import AuditRecord
    from domicile.ops.status import ClusterReader
    from domicile.ops.stuck.inspecting import EntityInspected, NodeInspected

WAIT_S = 15.0
"""Seconds that `kick` waits for the owner's answer."""

Role = Annotated[
    str | None,
    typer.Option(show_default=False, help="The type's role, if its nodes have several."),
]


def add_stuck_commands(app: typer.Typer) -> None:
    """Add these commands to the application."""
    dev = "sqlite:///.domicile/dev.db"
    shown = (f"inspect node-1 {dev}", f"inspect cart c1 {dev}", f"inspect node-1 {dev} --json")
    app.command("inspect", epilog=examples(*(f"domicile {one}" for one in shown)))(inspect)
    shown = (f"kick cart c1 {dev}", f"kick cart c1 {dev} --why hangs", f"kick cart c1 {dev} -n")
    app.command("kick", epilog=examples(*(f"domicile {one}" for one in shown)))(kick)


def inspect(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NODE_OR_TYPE",
            help="A node's name or incarnation, or an entity type's name.",
        ),
    ],
    id: Annotated[
        str | None,
        typer.Argument(metavar="ID", show_default=False, help="The entity's id, after a type."),
    ] = None,
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    role: Role = None,
    as_json: AsJson = False,
) -> None:
    """Show one node or one entity in detail, with the stacks of handlers that do not end.

    From the store: nodes report there which of their handlers have run for more than `stuck_s` (2
    seconds). So it needs no answer from the node.
    """
    if id is not None and "://" in id and store is None:
        id, store = None, id
    url, label = which(store, app, cluster, "inspect", name, id)

    async def look(reader: ClusterReader) -> NodeInspected | EntityInspected:
        from domicile.ops.stuck.inspecting import inspect_entity, inspect_node

        if id is None:
            return await inspect_node(reader, name)
        return await inspect_entity(reader, name, id, role)

    seen = read(url, label, look)
    if as_json:
        print_json(seen)
    else:
        from domicile.ops.show import ViewPrinter
        from domicile.ops.stuck.show import inspected_view

        with ViewPrinter(live=False) as shown:
            shown.show(inspected_view(seen))


def kick(
    type: Annotated[str, typer.Argument(metavar="TYPE", help="The entity type's name.")],
    id: Annotated[str, typer.Argument(metavar="ID", help="The entity's id.")],
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    role: Role = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Only say what would be kicked.")
    ] = False,
    why: Why = "",
) -> None:
    """End the running handlers of one entity, so that its next message can start.

    They are cancelled, and their callers are told that they may have run. A handler that ignores
    its cancellation is given up by a second kick: it is never resumed, and the entity starts again.
    A function in a thread can't be interrupted. Exits with 0 if the entity is free, 1 if it is not,
    3 if its home did not answer.
    """
    from domicile.core.ids import EntityKey

    url, label = which(store, app, cluster, "kick", type, id)
    entity, waiting = EntityKey(type, id), _Waiting()

    async def prepare(operator: Operator) -> Kicking:
        return await operator.prepare_kick(entity, role)

    kicking = run_operator(url, label, prepare)
    if dry_run:
        typer.echo(f"would kick {kicking.what}; nothing was done")
        return

    async def work(operator: Operator) -> tuple[tuple[bytes, AuditRecord], KickOutcome | None]:
        return await operator.kick(kicking, why, WAIT_S, waiting.told)

    try:
        logged, outcome = run_operator(url, label, work)
    finally:
        waiting.end()
    say_logged(*logged)
    if outcome is None:
        fail(
            f"the home of {type} {id!r} did not answer within {WAIT_S:g} s, and the wish was taken "
            "back: its event loop stands still, or it is cut off from the store. See `domicile "
            "status`; a process that hangs is replaced once its lease ends",
            AWAY,
        )
    text, free = told(f"{type} {id!r}", outcome)
    if not free:
        fail(text, FAILED)
    typer.echo(text)


def told(entity: str, outcome: KickOutcome) -> tuple[str, bool]:
    """The outcome of a kick as a text, and whether the entity is free now."""
    if not outcome.ran:
        return f"nothing of {entity} was suspended; there was nothing to end", True
    parts: list[str] = []
    if outcome.ended:
        parts.append(f"{_count(outcome.ended, 'handler')} cancelled")
    if outcome.dropped:
        parts.append(
            f"{_count(outcome.dropped, 'handler')} given up, never to be resumed; it starts anew"
        )
    if outcome.ignoring:
        parts.append(
            f"{_count(outcome.ignoring, 'handler')} did not end when cancelled: kick once more to "
            "give it up"
        )
    if outcome.blocking:
        parts.append(
            f"{_count(outcome.blocking, 'function')} in a thread, which can't be interrupted: "
            "fix what it waits for, or restart its node"
        )
    text = f"{entity}: " + "; ".join(parts)
    if outcome.waiting:
        text += f" ({_count(outcome.waiting, 'message')} waiting)"
    return text, not outcome.ignoring and not outcome.blocking


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


class _Waiting:
    """A line on standard error while the owner has not answered."""

    def __init__(self) -> None:
        self._shown = False

    def told(self, node: str, waited_s: float) -> None:
        """There is no answer yet."""
        if waited_s > PROGRESS_S and sys.stderr.isatty():
            self._shown = True
            typer.echo(f"\rwaiting for {node}: {waited_s:.0f} s", err=True, nl=False)

    def end(self) -> None:
        """End the line."""
        if self._shown:
            typer.echo("", err=True)
