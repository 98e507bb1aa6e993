"""Commands that change a cluster: `drain` and `target`, and the break-glass ones.

A break-glass command states its risk and wants the name of the thing typed, or `--yes`. Each
command must leave an audit record in the store. `ops.operator_commits` decides what is committed.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from domicile.core.placement.versions import same
from domicile.ops import operator_commits
from domicile.ops.console import (
    FAILED,
    INTERRUPTED,
    USAGE,
    App,
    Cluster,
    StoreOption,
    answered,
    examples,
    fail,
    which,
)

if TYPE_CHECKING:
    from domicile.core.ids import Incarnation
    from domicile.ops.operator import Operator
    from domicile.ops.operator_commits import AuditRecord, OperatorCommit, StoreSnapshot

T = TypeVar("T")

PROGRESS_S = 0.5

LOOK_S = 0.5
"""Seconds between two looks at a node that is being emptied."""

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Why = Annotated[
    str, typer.Option(show_default=False, help="The reason, for the audit record in the store.")
]
Shard = Annotated[str, typer.Argument(metavar="ROLE/SHARD", help="The shard, as in default/7.")]


def add_operator_commands(app: typer.Typer) -> None:
    """Add these commands to the application."""
    dev = "sqlite:///.domicile/dev.db"
    for name, command, shown in (
        (
            "drain",
            drain,
            (f"drain node-1 {dev} --wait 30", f"drain node-1 {dev} --undo", f"drain --self {dev}"),
        ),
        (
            "target",
            target,
            (f"target {dev}", f"target 2.1.0 {dev} --why rollback", f"target --clear {dev}"),
        ),
        (
            "declare-dead",
            declare_dead,
            (f"declare-dead node-1 {dev}", f"declare-dead 41c6f3aa {dev} --why pulled --yes"),
        ),
        ("free", free, (f"free default/7 {dev}", f"free default/7 {dev} --why stuck --yes")),
        (
            "unquarantine",
            unquarantine,
            (
                f"unquarantine default/7 {dev}",
                f"unquarantine default/7 default/9 {dev} --why fixed --yes",
                f"unquarantine --all {dev}",
            ),
        ),
        (
            "reset-history",
            reset_history,
            (f"reset-history {dev} --why restored", f"reset-history {dev} --gap 5000000 --yes"),
        ),
    ):
        epilog = examples(*(f"domicile {example}" for example in shown))
        app.command(name, epilog=epilog)(command)


def drain(
    node: Annotated[
        str | None, typer.Argument(metavar="NODE", show_default=False, help="The node's name.")
    ] = None,
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    undo: Annotated[bool, typer.Option("--undo", help="Let it have shards again.")] = False,
    own: Annotated[
        bool,
        typer.Option("--self", help="The node that POD_NAME names; the wish ends when it ends."),
    ] = False,
    wait: Annotated[
        float | None,
        typer.Option(min=0.0, show_default=False, help="Seconds to wait until it is empty."),
    ] = None,
    why: Why = "",
) -> None:
    """Wish a node empty: its shards move elsewhere, one by one and without a lost message.

    The wish stays until --undo, also over restarts of a node of that name; with --self it ends with
    the node. A drained node keeps its shards only while no other node of their role is there. With
    --wait it exits with 1 if the node is not empty in time.
    """
    if own:
        # Without NODE the first word is the store.
        url, name = which(node or store, app, cluster, "drain", "--self")
        _drain_self(url, name, 0.0 if wait is None else wait, undo, why)
        return
    if node is None:
        fail("say which node: domicile drain NODE, or --self in a pod", USAGE)
    url, name = which(store, app, cluster, "drain", node)
    # After the wish is stored the node may be empty before one could look.
    had_shards: list[bool] = []

    def wish(picture: StoreSnapshot) -> OperatorCommit:
        had_shards.append(operator_commits.has_shards(picture, node))
        return operator_commits.drain_commit(picture, node, undo=undo)

    _do(url, name, "drain --undo" if undo else "drain", wish, why)
    if undo:
        typer.echo(f"{node} may have shards again")
    elif had_shards[-1]:
        typer.echo(f"{node} is being emptied")
    else:
        typer.echo(f"{node} is empty already, and stays so until `domicile drain {node} --undo`")
    if wait is not None and not undo:
        _await_empty(url, name, node, wait)


def _drain_self(url: str, cluster: str, wait_s: float, undo: bool, why: str) -> None:
    """For a pod that is about to end: return once its node is empty."""
    node = os.environ.get("POD_NAME", "")
    if not node or undo:
        fail(
            "--self needs POD_NAME, which the downward API sets, and goes without --undo: the wish "
            "ends with the node",
            USAGE,
        )
    members = _look(url, cluster).members.nodes.values()
    if all(record.node != node for record in members):
        typer.echo(f"no node is registered as {node}: there is nothing to empty")
        return
    _do(url, cluster, "drain --self", lambda now: operator_commits.own_drain_commit(now, node), why)
    _await_empty(url, cluster, node, wait_s)


def _await_empty(url: str, cluster: str, node: str, wait_s: float) -> None:
    async def wait(operator: Operator) -> str:
        ends = time.monotonic() + wait_s
        while operator_commits.has_shards(picture := await operator.look(), node):
            if not operator_commits.has_takers(picture, node):
                return f"{node} keeps its shards: no other node of their role can take them"
            if time.monotonic() >= ends:
                return ""
            await asyncio.sleep(LOOK_S)
        return f"{node} is empty"

    said = run_operator(url, cluster, wait)
    if not said:
        fail(
            f"{node} still has shards after {wait_s:g} s; `domicile status` shows what moves, and "
            "what holds it up",
            FAILED,
        )
    typer.echo(said)


def target(
    version: Annotated[
        str | None,
        typer.Argument(
            metavar="VERSION",
            show_default=False,
            help="The version that shall receive shards; left out, it is shown.",
        ),
    ] = None,
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    clear: Annotated[
        bool, typer.Option("--clear", help="No target: the newest version receives.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Even if it is no number, PEP 440 version or ISO time, and no node's."
        ),
    ] = False,
    why: Why = "",
) -> None:
    """Show or set the version whose nodes receive shards while versions are mixed.

    For a rollback, set the version to go back to before the first node is replaced. Without a
    target the newest version receives.
    """
    if version is not None and "://" in version and store is None:
        version, store = None, version
    if clear and version is not None:
        fail("say a version or --clear, not both", USAGE)
    url, name = which(store, app, cluster, "target", version)
    picture = _look(url, name)
    if version is None and not clear:
        typer.echo(picture.target or "no target version: the newest one receives shards")
        return
    present = {record.version for record in picture.members.nodes.values() if record.roles}
    if version is not None and not force:
        wanted = version
        answered(lambda: operator_commits.check_version(wanted, present))
    _do(url, name, "target", lambda _: operator_commits.target_commit(version), why)
    if version is None:
        typer.echo("no target version: the newest one receives shards")
        return
    typer.echo(f"target version {version}")
    if present == {""}:
        typer.echo(
            "note: the registered nodes have no version, so this changes nothing for them; give "
            "them one by Node(version=...)",
            err=True,
        )
    elif present and not any(same(version, one) for one in present):
        shown = ", ".join(sorted(one or "(none)" for one in present))
        typer.echo(f"note: no node of that version is registered; there are: {shown}", err=True)


def declare_dead(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NODE_OR_INCARNATION",
            help="A node's name, an incarnation, or its first six or more digits.",
        ),
    ],
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    yes: Yes = False,
    why: Why = "",
) -> None:
    """Assert that an incarnation can never run again: its shards are free at once.

    For a process that is silent but whose record stays, as under fencing = "health" or with a long
    lease. If it does run again, two homes run until it sees that its record is gone.
    """
    from domicile.ops.operator import who
    from domicile.ports.health import Verdict

    url, label = which(store, app, cluster, "declare-dead", name)

    async def look(operator: Operator) -> tuple[StoreSnapshot, Incarnation, Verdict]:
        picture = await operator.look()
        dead = operator_commits.find_node_record(picture, name)
        return picture, dead, operator.verdict(dead)

    picture, dead, verdict = run_operator(url, label, look)
    shown = operator_commits.title(picture.members, dead)
    evidence = f"declared dead by {who()}" + (f": {why}" if why else "")

    def make(now: StoreSnapshot) -> OperatorCommit:
        return operator_commits.death_commit(
            now, operator_commits.find_node_record(now, dead), evidence
        )

    risk = (
        f"You assert that {shown} can never run again (A6).\n"
        "Its record goes, and its shards get new homes at once. If it is only slow, frozen or cut "
        "off,\ntwo homes run until it notices; journals refuse its writes (I1b), but nothing else "
        "does.\nMake sure first: its machine is off, or its process has ended."
    )
    if verdict is Verdict.ALIVE:
        risk += "\nWARNING: its process is running on this machine: it holds its lock (L6). End it."
    confirm(risk, name, yes)
    _do(url, label, "declare-dead", make, why)
    typer.echo(f"{shown} is declared dead; its shards are free")


def free(
    shard: Shard,
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    yes: Yes = False,
    why: Why = "",
) -> None:
    """Take a shard from an owner that neither releases it nor dies.

    The coordinator gives it a new home as if the owner had released it. A home that was chosen
    already stays chosen; else drain the owner first, or it may get the shard again.
    """
    url, name = which(store, app, cluster, "free", shard)
    key = answered(lambda: operator_commits.parse_shard(shard))
    picture = _look(url, name)
    deed = answered(lambda: operator_commits.free_commit(picture, key))
    confirm(
        f"You take {deed.what}, without its consent.\n"
        "The owner stops as soon as it sees the new entry; until then two homes may run for a "
        "moment.\nJournals refuse what the old one writes (I1b); what its handlers do elsewhere, "
        "they do twice.\nIf the node should get nothing at all, `domicile drain` or "
        "`declare-dead` is the better tool.",
        shard,
        yes,
    )
    _do(
        url,
        name,
        "free",
        lambda picture: operator_commits.free_commit(picture, key),
        why,
        deed.what,
    )
    typer.echo(f"{deed.what}: freed; a coordinator gives it a new home")


def unquarantine(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ROLE/SHARD | STORE",
            show_default=False,
            help="The shards, as in default/7, and the store's URL; else that of --app, else "
            "DOMICILE_STORE.",
        ),
    ] = None,
    app: App = None,
    cluster: Cluster = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every shard with a quarantine.")
    ] = False,
    yes: Yes = False,
    why: Why = "",
) -> None:
    """End the quarantines of shards and of the entities in them at once.

    An entity, or its shard, is quarantined after several owners in a row died while it ran. It
    is tried again by itself, with growing pauses; this command need not wait for that.
    """
    shards = [word for word in words or () if "://" not in word]
    stores = [word for word in words or () if "://" in word]
    if len(stores) > 1 or everything == bool(shards):
        fail("say which shards, as in default/7, or --all, and one store", USAGE)
    typed = ["--all"] if everything else shards
    url, name = which(stores[0] if stores else None, app, cluster, "unquarantine", *typed)
    keys = [answered(lambda one=one: operator_commits.parse_shard(one)) for one in shards]  # type: ignore[misc]
    picture = _look(url, name)
    if everything:
        keys = answered(lambda: operator_commits.put_away_shards(picture))
    keys = list(dict.fromkeys(keys))
    what = answered(lambda: operator_commits.unquarantine_commit(picture, keys)).what
    confirm(
        f"{what}: quarantined because the last owners died with it.\n"
        "If an entity still kills its process, the next owners die as well, and with them\n"
        "the homes of other shards for a while. Fix or remove what did it first.",
        shards[0] if len(keys) == 1 and shards else f"{len(keys)} shards",
        yes,
    )
    for first in range(0, len(keys), operator_commits.MOST_CLEARED):
        some = keys[first : first + operator_commits.MOST_CLEARED]
        _do(
            url,
            name,
            "unquarantine",
            lambda now, some=some: operator_commits.unquarantine_commit(now, some),  # type: ignore[misc]
            why,
        )
    typer.echo(f"{what}: cleared; a coordinator has everything in it served")


def reset_history(
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    gap: Annotated[
        int, typer.Option(min=1, max=10**12, help="By how much every epoch rises.")
    ] = operator_commits.EPOCH_GAP,
    force: Annotated[
        bool, typer.Option("--force", help="Even though nodes are registered.")
    ] = False,
    yes: Yes = False,
    why: Why = "",
) -> None:
    """Raise all epochs after the store was restored from a backup or lost commits.

    An epoch that was used after the backup must not be used again, or journals and peers could
    take an old owner for the new one. Stop all nodes first.
    """
    url, name = which(store, app, cluster, "reset-history")
    picture = _look(url, name)
    there = [operator_commits.title(picture.members, one) for one in sorted(picture.members.nodes)]
    if there and not force:
        fail(
            f"nodes are registered: {', '.join(there)}. Stop them first; records of processes "
            "that are gone vanish with their leases, or by `domicile declare-dead`. --force "
            "raises the epochs under their feet",
            FAILED,
        )
    agreed = f"epochs of all shards + {gap}"
    risk = (
        f"You raise the epoch of every shard of cluster {name!r} by {gap:,}, and forget owners "
        "that\nare not registered. Right after a backup was restored or the store lost commits "
        "(S5), and\nneedless at any other time. The gap must exceed the moves since the backup."
    )
    if there:
        risk += f"\nWARNING: running nodes restart all their entities: {', '.join(there)}."
    confirm(risk, name, yes)
    progress = Progress("blocks")

    async def work(operator: Operator) -> tuple[bytes, AuditRecord]:
        return await operator.raise_epochs(gap, agreed, why, progress.told)

    try:
        say_logged(*run_operator(url, name, work))
    finally:
        progress.end()
    typer.echo(f"{agreed}; start the nodes")


# inside


class Progress:
    """A line on standard error, for what takes longer than a moment."""

    def __init__(self, unit: str) -> None:
        self._unit, self._began, self._shown = unit, time.monotonic(), False

    def told(self, done: int, total: int) -> None:
        """So much of the work is done."""
        if time.monotonic() - self._began > PROGRESS_S and sys.stderr.isatty():
            self._shown = True
            typer.echo(f"\r{done}/{total} {self._unit}", err=True, nl=False)

    def end(self) -> None:
        """End the line."""
        if self._shown:
            typer.echo("", err=True)


def run_operator(url: str, cluster: str, work: Callable[[Operator], Awaitable[T]]) -> T:
    """Run `work` as an operator; every failure ends the process with what to do next."""
    from domicile.ops.operator import Operator
    from domicile.ops.status import open_existing

    async def working() -> T:
        operator = Operator(open_existing(url, "operator"), cluster)
        try:
            return await work(operator)
        finally:
            await operator.close()

    try:
        return answered(lambda: asyncio.run(working()))
    except KeyboardInterrupt:
        fail("interrupted: see with `domicile status` whether it was done", INTERRUPTED)


def _look(url: str, cluster: str) -> StoreSnapshot:
    async def look(operator: Operator) -> StoreSnapshot:
        return await operator.look()

    return run_operator(url, cluster, look)


def _do(
    url: str,
    cluster: str,
    command: str,
    make: Callable[[StoreSnapshot], OperatorCommit],
    why: str,
    agreed: str | None = None,
) -> None:
    async def work(operator: Operator) -> tuple[bytes, AuditRecord]:
        what = make(await operator.look()).what if agreed is None else agreed
        return await operator.do(command, make, what, why)

    say_logged(*run_operator(url, cluster, work))


def confirm(risk: str, name: str, yes: bool) -> None:
    """State the risk; go on only if the name is typed, or with `--yes`."""
    typer.echo(risk, err=True)
    if yes:
        return
    if not sys.stdin.isatty():
        fail("this needs a confirmation and there is no terminal to ask: say --yes", USAGE)
    try:
        typed = input(f"Type {name} to go on: ")
    except (EOFError, KeyboardInterrupt):
        typer.echo("", err=True)
        fail("interrupted: nothing was done", INTERRUPTED)
    if typed.strip() != name:
        fail(f"that is not {name}: nothing was done", FAILED)


def say_logged(key: bytes, record: AuditRecord) -> None:
    """Print the key of the audit record."""
    reason = f" ({record.why})" if record.why else ""
    typer.echo(f"logged as {key.decode()}: {record.by}, {record.command}: {record.what}{reason}",
               err=True)  # fmt: skip
