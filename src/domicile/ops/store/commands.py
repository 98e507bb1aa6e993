"""Commands for whole stores: copy the clusters of one to another, and open an old one again.

Used by `cli` only. `copy` does the work; this module asks, tells and ends with an exit code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from domicile.ops.console import (
    AWAY,
    FAILED,
    INTERRUPTED,
    USAGE,
    AsJson,
    Cluster,
    StoreOption,
    answered,
    examples,
    fail,
    print_json,
    which,
)
from domicile.ops.operate import Progress, Why, Yes, confirm
from domicile.ops.waiting import told_if_slow

if TYPE_CHECKING:
    from domicile.backends.wiring import WholeStore
    from domicile.ops.store.copy import CopyDone

T = TypeVar("T")

CALL_S = 10.0
"""Seconds that one call of a store may take."""


def add_store_commands(app: typer.Typer) -> None:
    """Add the group `store` to the application."""
    group = typer.Typer(no_args_is_help=True, help="Move clusters from one store to another.")
    dev, there = "sqlite:///.domicile/dev.db", "redis://10.0.0.5:6379/0"
    for name, command, shown in (
        (
            "copy",
            copy_clusters,
            (f"copy {dev} {there}", f"copy {there} {dev} --replace --why rollback"),
        ),
        ("reopen", reopen_cluster, (f"reopen {dev}", f"reopen {dev} --cluster blue --yes")),
    ):
        group.command(name, epilog=examples(*(f"domicile store {example}" for example in shown)))(
            command
        )
    app.add_typer(group, name="store")


def copy_clusters(
    source: Annotated[str, typer.Argument(metavar="FROM", help="The store's URL.")],
    to: Annotated[str, typer.Argument(metavar="TO", help="The URL of the other store.")],
    cluster: Annotated[
        str | None,
        typer.Option(show_default=False, help="Which cluster, if FROM has several."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All clusters of the store.")] = False,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Even if TO has the cluster already. Epochs never go back."),
    ] = False,
    wait: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds to wait for killed processes' records.")
    ] = 20.0,
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Copy a stopped cluster to another store, of any kind. Stop all its processes first.

    Afterwards processes refuse the old store, which stays as it is. Journals are not copied: with
    a store that has none, durable entities name theirs. Exits with 1 if something is in the way,
    and may be repeated.
    """
    from domicile.backends.registry import shown_url
    from domicile.ops.store.copy import ClusterCopy, clusters_in

    if cluster is not None and every:
        fail("say --cluster or --all, not both", USAGE)
    if source == to:
        fail("FROM and TO are the same store", USAGE)
    progress = Progress("keys")
    said: dict[str, None] = {}

    def told(what: str, done: int, total: int) -> None:
        if what == "copied":
            progress.told(done, total)
        elif what not in said:
            said[what] = None
            typer.echo(what, err=True)

    async def work(there: WholeStore, here: WholeStore) -> list[CopyDone]:
        with told_if_slow(source):
            known = clusters_in((await there.store.list(b"")).items)
        names = known if every else [cluster or (known[0] if len(known) == 1 else "")]
        if not known or (names[0] and names[0] not in known):
            wanted = f"cluster {cluster!r}" if cluster else "cluster"
            fail(f"no {wanted} in {shown_url(source)}: it holds {', '.join(known) or 'none'}", AWAY)
        if not names[0]:
            fail(f"say --all or --cluster: {shown_url(source)} holds {', '.join(known)}", USAGE)
        with told_if_slow(to):
            await here.store.list(b"")
        found: list[CopyDone] = []
        for name in names:
            found.append(
                await ClusterCopy(
                    there, here, name, replace=replace, wait_s=wait, why=why, told=told
                ).run()
            )
        return found

    try:
        found = _working([source, to], lambda stores: work(*stores))
    finally:
        progress.end()
    if as_json:
        print_json(found)
        return
    for one in found:
        typer.echo(
            f"{one.cluster}: {one.keys:,} keys written, {one.removed:,} removed, "
            f"{one.shards:,} shards with epochs up to {one.epoch:,}; compared, all equal"
        )
    typer.echo(f"Start the processes with {shown_url(to)}; they refuse {shown_url(source)} now.")


def reopen_cluster(
    store: StoreOption = None, cluster: Cluster = None, yes: Yes = False, why: Why = ""
) -> None:
    """Let processes use a store again whose cluster was copied to another one.

    Only if no process ever used the copy, or if the copy failed. Otherwise copy the cluster back
    with --replace.
    """
    from domicile.backends.registry import shown_url
    from domicile.ops.store.copy import reopen

    url, name = which(store, None, cluster, "store reopen")
    confirm(
        f"You let processes of cluster {name!r} use {shown_url(url)} again.\n"
        "If any process has used the copy since, or still does, shards get two homes, and what\n"
        "was decided there is lost.",
        name,
        yes,
    )
    mark = _working([url], lambda stores: reopen(stores[0], name, why))
    typer.echo(f"{name}: open again; it had been moved to {mark.store}")


def _working(urls: list[str], work: Callable[[list[WholeStore]], Awaitable[T]]) -> T:
    """Open stores and work with them; every failure ends the process with what to do next."""
    from domicile.backends.registry import store_backend
    from domicile.backends.wiring import open_whole_store
    from domicile.ops.status import existing
    from domicile.ops.store.copy import CopyRefused

    async def working() -> T:
        existing(store_backend(urls[0]), urls[0])
        opened: list[WholeStore] = []
        try:
            for place, url in enumerate(urls):
                if store_backend(url).reach == "process":
                    existing(store_backend(url), url)
                # Only the store that is copied to may be a new one.
                opened.append(
                    open_whole_store(url, by="operator", op_timeout_s=CALL_S, creates=place > 0)
                )
            return await work(opened)
        finally:
            for whole in opened:
                await whole.store.close()

    try:
        return answered(lambda: asyncio.run(working()))
    except CopyRefused as error:
        fail(str(error), FAILED)
    except KeyboardInterrupt:
        fail(
            "interrupted: repeat the command, or see its state with `domicile status`", INTERRUPTED
        )
