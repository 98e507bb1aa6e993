"""Commands for journals: `domicile journal info | show | tail | verify | copy | export | import |
accept`.

The command line adds them. They read; only `import` and `accept` write to a journal, and no command
may change one that nodes use without saying so. Events are decoded without the program: a name and
its fields.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, TypeVar, cast

import msgspec
import typer

from domicile.ops.console import (
    AWAY,
    FAILED,
    INTERRUPTED,
    USAGE,
    App,
    AsJson,
    Cluster,
    StoreOption,
    answered,
    examples,
    fail,
    find_app,
    print_json,
    which,
)
from domicile.ops.operate import Why, Yes

if TYPE_CHECKING:
    from domicile.core.ids import EntityKey
    from domicile.ops.journal.accept import AcceptableJournal, Acceptance
    from domicile.ops.operator import Operator
    from domicile.ops.operator_commits import AuditRecord
    from domicile.ports.journal import (
        InspectableJournal,
        Journal,
        JournalFigures,
        JournalNames,
    )

T = TypeVar("T")

PAGE_BYTES = 1 << 20
PAGE_EVENTS = 500
POLL_S = 0.5
READ_S = 10.0
MOST_SHOWN = 20
PROGRESS_S = 1.0

JournalOption = Annotated[
    str | None,
    typer.Option(
        "--journal", show_default=False, help="The journal's URL, if not the one of the store."
    ),
]


def add_journal_commands(app: typer.Typer) -> None:
    """Add these commands to the application."""
    group = typer.Typer(
        no_args_is_help=True, help="Look into a journal, check it, copy it, move it."
    )
    dev, file = "sqlite:///.domicile/dev.db", "sqlite:///.domicile/dev.db.journal"
    for name, command, shown in (
        ("info", info, (f"info {dev}", f"info --journal {file} --json")),
        ("show", show, (f"show account alice {dev}", f"show account alice {dev} --at 7")),
        ("tail", tail, (f"tail {dev}", f"tail {dev} --from-start --once --json")),
        ("verify", verify, (f"verify {dev}", f"verify --journal {file}")),
        ("copy", copy, (f"copy {file} sqlite:///backup.journal",)),
        (
            "export",
            export,
            (
                f"export backup.jsonl {dev}",
                "export - --journal postgresql://host/db | gzip > b.gz",
            ),
        ),
        (
            "import",
            import_lines,
            (
                "import backup.jsonl --journal postgresql://host/db",
                "import - --journal sqlite:///new.journal < backup.jsonl",
            ),
        ),
        ("accept", accept, (f"accept {dev} --why restored", f"accept {dev} --role default --yes")),
    ):
        epilog = examples(*(f"domicile journal {example}" for example in shown))
        group.command(name, epilog=epilog)(command)
    app.add_typer(group, name="journal")


def info(
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    journal: JournalOption = None,
    as_json: AsJson = False,
) -> None:
    """Show the backend, history, format and size of a journal, and its shards with their epochs."""

    async def look(opened: Journal) -> JournalFigures:
        return await _figures(_inspectable(opened), name)

    url, name = _which(store, app, cluster, journal, "info")
    seen = _read(url, name, look)
    if as_json:
        print_json(seen)
        return
    typer.echo(f"backend   {seen.backend}, format {seen.format}")
    typer.echo(f"history   {seen.history}")
    typer.echo(f"entities  {seen.entities:,}")
    typer.echo(f"events    {seen.events:,}, {seen.bytes:,} bytes")
    typer.echo(f"shards    {len(seen.fences)}")
    for one in seen.fences:
        typer.echo(
            f"  {one.role}/{one.shard}  epoch {one.epoch}  offset {one.offset}  owner {one.owner}"
        )


def show(
    type: Annotated[str, typer.Argument(metavar="TYPE", help="The entity type's name.")],
    id: Annotated[str, typer.Argument(metavar="ID", help="The entity's id.")],
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    journal: JournalOption = None,
    at: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="The last event to show.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the events of one entity, or its stored state, as they are in the journal.

    Values that can be erased are not shown. Exits with 1 if the journal has nothing of the entity.
    """
    from domicile.core.ids import EntityKey
    from domicile.ports.journal import InspectableJournal, Wanted

    entity = EntityKey(type, id)
    url, name = _which(store, app, cluster, journal, "show", type, id)

    async def look(opened: Journal) -> None:
        upto = shown = 0
        while True:
            [found] = await opened.recover([Wanted(entity, upto, snapshot=False)], PAGE_BYTES)
            if found.state is not None and upto == 0:
                if at is not None and at < found.seq:
                    fail(
                        f"{type} {id!r} has no earlier states: the journal keeps its newest one "
                        f"only, number {found.seq}; --at is for entities with events",
                        FAILED,
                    )
                _print_line(as_json, {"seq": found.seq, "state": _state(entity, found.state)})
                shown += 1
            first = found.seq - len(found.events)
            for seq, data in enumerate(found.events, first + 1):
                if at is not None and seq > at:
                    return
                _print_line(as_json, {"seq": seq, **_fields(entity, data)})
                shown += 1
            if not found.more:
                if not shown and found.seq:
                    typer.echo(f"{type} {id!r} has no events: deleted, or only keys", err=True)
                if not shown and not found.seq:
                    await _nothing_of(opened)
                return
            upto = found.seq

    async def _nothing_of(opened: Journal) -> None:
        hint = "look for another id"
        if isinstance(opened, InspectableJournal):
            names = await opened.names()
            if not names.types:
                fail(_nothing(name, names), AWAY)
            if type not in names.types:
                hint = f"its entity types are {', '.join(names.types)}"
        fail(f"the journal has nothing of {type} {id!r} in cluster {name!r}: {hint}", FAILED)

    _read(url, name, look)


def tail(
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    journal: JournalOption = None,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="All events, not only new ones.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="End at the last event.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show events of all shards as they are committed, until Ctrl-C."""
    from domicile.core.ids import ShardKey

    url, name = _which(store, app, cluster, journal, "tail")

    async def look(opened: Journal) -> None:
        seen = _inspectable(opened)
        if not await seen.fences() and name not in (names := await seen.names()).clusters:
            fail(_nothing(name, names), AWAY)
        places: dict[ShardKey, int] = {}
        is_first = True
        while True:
            for fence in await seen.fences():
                if fence.layout:
                    continue
                shard = ShardKey(fence.role, fence.shard)
                if shard not in places:
                    places[shard] = fence.offset if is_first and not from_start else 0
                while places[shard] < fence.offset:
                    page = await opened.scan(shard, places[shard], PAGE_EVENTS)
                    for event in page.events:
                        _print_line(
                            as_json,
                            {
                                "shard": f"{shard.role}/{shard.shard}",
                                "offset": event.offset,
                                "type": event.entity.type,
                                "id": event.entity.id,
                                "seq": event.seq,
                                **_fields(event.entity, event.data),
                            },
                        )
                    places[shard] = page.upto
            if once:
                return
            is_first = False
            await asyncio.sleep(POLL_S)

    _read(url, name, look)


def verify(
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    journal: JournalOption = None,
) -> None:
    """Check that numbers have no gaps, that offsets end where fences say, and heads fit events.

    Nodes may run meanwhile. Exits with 1 if something does not agree.
    """
    url, name = _which(store, app, cluster, journal, "verify")

    async def look(opened: Journal) -> tuple[JournalFigures, Sequence[str]]:
        found = _inspectable(opened)
        seen = await _figures(found, name)
        typer.echo("reading all events", err=True)
        return seen, await found.faults()

    seen, faults = _read(url, name, look)
    for fault in faults:
        typer.echo(fault)
    if faults:
        fail(
            f"{len(faults)} things do not agree: keep the file as it is, stop the nodes, and "
            "restore a copy that passes",
            FAILED,
        )
    typer.echo(f"{seen.entities:,} entities, {seen.events:,} events: all agree")


def copy(
    source: Annotated[str, typer.Argument(metavar="FROM", help="The journal's URL.")],
    to: Annotated[str, typer.Argument(metavar="TO", help="The URL of a new journal.")],
) -> None:
    """Copy a SQLite journal as of one moment, while nodes write to it.

    The copy has another history. It appears under its name only when it is whole.
    """
    from domicile.backends.registry import journal_backend, shown_url

    backend = answered(lambda: journal_backend(source))
    if answered(lambda: journal_backend(to)) is not backend:
        fail("a journal is copied to one of the same kind", USAGE)
    typer.echo(f"copying {shown_url(source)}", err=True)
    answered(lambda: backend.copy_journal(source, to))
    typer.echo(f"copied to {shown_url(to)}")


def export(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Where to; - is standard output.")],
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    journal: JournalOption = None,
) -> None:
    """Write all that a journal has of a cluster as lines, as of one moment, while nodes write.

    `domicile journal import` takes them, also into a journal of another kind.
    """
    from domicile.ops.journal.lines import VERSION, FirstLine, write_lines
    from domicile.ports.journal_rows import TransferableJournal

    url, name = _which(store, app, cluster, journal, "export", file)
    progress = RowProgress("exported")

    def look(out: BinaryIO) -> Callable[[Journal], Awaitable[int]]:
        async def looking(opened: Journal) -> int:
            if not isinstance(opened, TransferableJournal):
                fail("a journal of this kind can't be exported", FAILED)
            names = await _inspectable(opened).names()
            if name not in names.clusters:
                fail(_nothing(name, names), AWAY)
            first = FirstLine(VERSION, name, await opened.history())
            return await write_lines(opened, first, out, progress.told)

        return looking

    with _new_file(file) as out:
        count = _read(url, name, look(out))
        progress.end()
    typer.echo(f"exported {count:,} rows of cluster {name!r}", err=True)


def import_lines(
    file: Annotated[str, typer.Argument(metavar="FILE", help="An export; - is standard input.")],
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    journal: JournalOption = None,
) -> None:
    """Make a journal of an export. It must have nothing of the cluster yet; then it is verified.

    All of it is imported, or nothing. Without --cluster the cluster keeps its name.
    """
    from domicile.ops.journal.lines import ReadLines
    from domicile.ports.journal_rows import TransferableJournal

    url, name = _which(store, app, cluster, journal, "import", file, may_be_new=True)
    progress = RowProgress("imported")
    with _old_file(file) as source:
        lines = answered(lambda: ReadLines(source, file, progress.told))
        name = name if cluster is not None or app is not None else lines.first.cluster

        async def take(opened: Journal) -> tuple[JournalFigures, Sequence[str]]:
            if not isinstance(opened, TransferableJournal):
                fail("a journal of this kind can't be imported into", FAILED)
            await opened.fill(lines.rows())
            typer.echo("imported; reading all of it once more", err=True)
            found = _inspectable(opened)
            return await _figures(found, name), await found.faults()

        seen, faults = _read(url, name, take, reads_only=False)
    progress.end()
    for fault in faults:
        typer.echo(fault)
    if faults:
        fail(
            f"{len(faults)} things do not agree, in the export as well: do not use this journal, "
            "and verify the one that was exported",
            FAILED,
        )
    typer.echo(
        f"imported {seen.entities:,} entities, {seen.events:,} events of cluster {name!r}: all "
        "agree"
    )
    typer.echo(
        "If the cluster has kept its events in another journal: stop its nodes, then run "
        "`domicile journal accept` with this one",
        err=True,
    )


class RowProgress:
    """A line on standard error, once something has taken longer than a second."""

    def __init__(self, done: str) -> None:
        self._done, self._began, self._shown = done, time.monotonic(), 0.0

    def told(self, count: int) -> None:
        """So many rows are done."""
        now = time.monotonic()
        if sys.stderr.isatty() and now - max(self._shown, self._began) > PROGRESS_S:
            self._shown = now
            typer.echo(f"\r{self._done} {count:,} rows", err=True, nl=False)

    def end(self) -> None:
        """End the line."""
        if self._shown:
            typer.echo("", err=True)


@contextmanager
def _new_file(name: str) -> Generator[BinaryIO]:
    """A file that gets its name when it is whole and on the disk; or standard output."""
    if name == "-":
        try:
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        except OSError as error:
            # What is left in the buffer can't be written either, when the process ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            fail(
                f"standard output can't be written: {error.strerror}; the export is cut off", FAILED
            )
        return
    path = Path(name)
    part = path.with_name(path.name + ".part")
    if path.exists():
        fail(f"{path} is there already; name a file that is not, or remove it", USAGE)
    try:
        with part.open("wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        part.rename(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        fail(
            f"{path} can't be written: {error.strerror}; make room, or name another file; nothing "
            "was left behind",
            FAILED,
        )
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextmanager
def _old_file(name: str) -> Generator[BinaryIO]:
    """A file that is read; or standard input."""
    if name == "-":
        yield sys.stdin.buffer
        return
    try:
        source = Path(name).open("rb")  # noqa: SIM115 - closed below; only opening is guarded here
    except OSError as error:
        fail(f"{name} can't be read: {error.strerror}", USAGE)
    with source:
        yield source


def accept(
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    journal: JournalOption = None,
    role: Annotated[
        list[str] | None,
        typer.Option(show_default=False, help="A role whose journal it is; several: repeat it."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Even though nodes are registered.")
    ] = False,
    yes: Yes = False,
    why: Why = "",
) -> None:
    """Let a journal that was restored, imported or made anew take the place of the one before.

    Nodes refuse a journal that the store does not know, or that has lost events. Stop all nodes,
    put the journal in its place, check it with `domicile journal verify`, then run this.
    """
    from domicile.backends.registry import shown_url
    from domicile.ops.journal.accept import accept_journal, look_at_journal
    from domicile.ops.operate import Progress, confirm, run_operator, say_logged
    from domicile.ops.operator_commits import title

    url, name = which(store, app, cluster, "journal", "accept")
    place, _ = _which(url, app, cluster, journal, "accept")

    async def look(operator: Operator) -> tuple[list[str], Acceptance]:
        picture = await operator.look()
        members = picture.members
        there = [title(members, one) for one in sorted(members.nodes) if members.nodes[one].roles]

        async def found(opened: AcceptableJournal) -> Acceptance:
            return await look_at_journal(picture, opened, role or ())

        return there, await _with_journal(place, name, found)

    there, seen = run_operator(url, name, look)
    if not seen.is_needed:
        typer.echo(f"nothing to do: the store knows this journal, history {seen.history}")
        return
    if there and not force:
        fail(
            f"nodes are registered: {', '.join(there)}. Stop them first: they have entities of the "
            "old journal in memory. Records of processes that are gone vanish with their leases, "
            "or by `domicile declare-dead`",
            FAILED,
        )
    confirm(_accepting(shown_url(place), name, seen, there), name, yes)
    progress = Progress("blocks")

    async def work(operator: Operator) -> tuple[bytes, AuditRecord]:
        async def done(opened: AcceptableJournal) -> tuple[bytes, AuditRecord]:
            return await accept_journal(operator, opened, seen, why, progress.told)

        return await _with_journal(place, name, done)

    try:
        say_logged(*run_operator(url, name, work))
    finally:
        progress.end()
    typer.echo(f"accepted for {', '.join(seen.roles)}; empty all projections, then start the nodes")


def _accepting(place: str, cluster: str, seen: Acceptance, there: list[str]) -> str:
    """What accepting a journal does, and what may be lost."""
    events = sum(one.offset for one in seen.fences)
    lines = [
        f"Cluster {cluster!r} shall keep the events of {', '.join(seen.roles)} in {place}.",
        f"This journal has history {seen.history}, {len(seen.fences)} shards and "
        f"{events:,} offsets in them.",
    ]
    for role in seen.roles:
        known = seen.known.get(role)
        if known == seen.history:
            lines.append(f"The store knows it as the journal of {role}, and that it was longer.")
        elif known is not None:
            lines.append(f"The store knows history {known} for {role}: what only that one has, and")
            lines.append("the keys of asks in it, are lost to this cluster.")
    if seen.missing:
        lost = sum(seen.missing.values())
        lines.append(
            f"At least {lost:,} events of {len(seen.missing)} shards are missing here. What came "
            "after the"
        )
        lines.append("last claim or orderly stop of a shard is missing as well, and not counted.")
        for shard, count in list(seen.missing.items())[:MOST_SHOWN]:
            lines.append(f"  {shard.role}/{shard.shard}  {count:,} missing")
        if len(seen.missing) > MOST_SHOWN:
            lines.append(f"  and {len(seen.missing) - MOST_SHOWN} more shards")
    lines.append(
        "All fences of this journal and all epochs of these roles rise, so that no former owner can"
    )
    lines.append("write to it. The journal gets a new history. No event is changed or removed.")
    if there:
        lines.append(f"WARNING: running nodes restart all their entities: {', '.join(there)}.")
    return "\n".join(lines)


async def _with_journal(
    url: str, cluster: str, work: Callable[[AcceptableJournal], Awaitable[T]]
) -> T:
    """Do something with a journal that may be written to, and close it."""
    from domicile.backends.registry import OpenOptions, journal_backend
    from domicile.errors import StoreUnavailable
    from domicile.ports.journal import InspectableJournal, JournalUnknown, is_comparable

    options = OpenOptions("journal", cluster, op_timeout_s=READ_S)
    opened = answered(lambda: journal_backend(url)).open_journal(url, options)
    try:
        if not is_comparable(opened) or not isinstance(opened, InspectableJournal):
            fail("a journal of this kind ends with its process; there is nothing to accept", FAILED)
        return await work(cast("AcceptableJournal", opened))
    except JournalUnknown as error:
        raise StoreUnavailable(
            f"{error}. Repeat the command when the journal answers: nodes refuse it until the "
            "command has ended"
        ) from error
    finally:
        await opened.close()


def _which(
    store: str | None,
    target: str | None,
    cluster: str | None,
    journal: str | None,
    *typed: str,
    may_be_new: bool = False,
) -> tuple[str, str]:
    """The journal's URL and the cluster's name that a command line means."""
    from domicile.backends.registry import journal_backend, store_backend

    if target is not None:
        node = find_app(target)
        store, cluster = store or node.store, cluster or node.cluster
        journal = journal or node.journal
    store = store or os.environ.get("DOMICILE_STORE")
    if journal is None and store:
        at = store
        journal = answered(lambda: store_backend(at).default_journal(at))
    if journal is None:
        fail(
            f"say which journal: domicile journal {' '.join(typed)} sqlite:///path/to/file.db, or "
            "--journal with its URL, or --app module:name",
            USAGE,
        )
    url = journal
    backend = answered(lambda: journal_backend(url))
    file = backend.sqlite_file(url)
    if file is not None and not file.exists() and not may_be_new:
        given = None if store is None else answered(lambda: store_backend(store).sqlite_file(store))
        if given is not None and given.suffix == ".journal" and given.exists():
            fail(
                f"{given} is a journal, and a store is wanted here: name it by --journal {store}",
                AWAY,
            )
        fail(f"there is no journal at {file}: start a node with durable entities first", AWAY)
    return url, cluster or "domicile"


def _read(
    url: str, cluster: str, look: Callable[[Journal], Awaitable[T]], *, reads_only: bool = True
) -> T:
    """Look into a journal; every failure ends the process with what to do next."""
    from domicile.backends.registry import OpenOptions, journal_backend
    from domicile.ports.journal import JournalUnknown

    async def reading() -> T:
        options = OpenOptions("journal", cluster, op_timeout_s=READ_S, reads_only=reads_only)
        opened = journal_backend(url).open_journal(url, options)
        try:
            return await look(opened)
        finally:
            await opened.close()

    try:
        return answered(lambda: asyncio.run(reading()))
    except JournalUnknown as error:
        fail(str(error), AWAY)
    except KeyboardInterrupt:
        fail("interrupted", INTERRUPTED)


def _inspectable(opened: Journal) -> InspectableJournal:
    from domicile.ports.journal import InspectableJournal

    if not isinstance(opened, InspectableJournal):
        fail("a journal of this kind is in the memory of one process: no tool can see it", FAILED)
    return opened


async def _figures(opened: InspectableJournal, cluster: str) -> JournalFigures:
    seen = await opened.figures()
    if seen is None:
        fail(_nothing(cluster, await opened.names()), AWAY)
    return seen


def _nothing(cluster: str, names: JournalNames) -> str:
    listed = ", ".join(names.clusters) or "no cluster"
    return (
        f"the journal has nothing of cluster {cluster!r}, it holds {listed}: say another --cluster "
        "or --journal"
    )


def _fields(entity: EntityKey, data: bytes | None) -> dict[str, Any]:
    """An event without its class: its name and fields, as far as they can be read."""
    from domicile.persist.forgettable import owner_of

    if data is None:
        return {"event": None, "fields": "deleted"}
    try:
        if owner_of(entity) is not None:
            return {"event": "forgettable", "fields": _hidden(data)}
        name, fields = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, ValueError, TypeError, AttributeError):
        return {"event": "?", "fields": data.hex()}
    return {"event": str(name), "fields": _readable(fields)}


def _state(entity: EntityKey, data: bytes) -> Any:
    """A whole state without its class, as far as it can be read."""
    from domicile.persist.forgettable import owner_of

    try:
        if owner_of(entity) is not None:
            return _hidden(data)
        _, state = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, ValueError, TypeError, AttributeError):
        return data.hex()
    return _readable(state)


def _hidden(data: bytes) -> dict[str, str]:
    """Values that can be erased, by their references: a terminal and its log keep none of them."""
    stored = msgspec.msgpack.decode(data)
    return {str(reference): f"<hidden, {len(one)} bytes>" for reference, one in stored.items()}


def _readable(value: Any) -> Any:
    """What JSON can show, for whatever MessagePack can store."""
    from domicile.persist.forgettable import REFERENCE

    match value:
        case dict():
            items = cast(Mapping[Any, Any], value).items()
            return {_name(key): _readable(one) for key, one in items}
        case list() | tuple():
            return [_readable(one) for one in cast(Sequence[Any], value)]
        case msgspec.msgpack.Ext() if value.code == REFERENCE:
            reference = int.from_bytes(value.data, "big")
            return f"<forgettable {reference}>" if reference else "<erased>"
        case msgspec.msgpack.Ext():
            return f"<extension {value.code}: {bytes(value.data).hex()}>"
        case _:
            return value


def _name(key: Any) -> str:
    return key if isinstance(key, str) else _json(_readable(key))


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _print_line(as_json: bool, line: dict[str, Any]) -> None:
    if as_json:
        print_json(line)
        return
    if "state" in line:
        typer.echo(f"{line['seq']}  state {_json(line['state'])}")
        return
    place = "" if "shard" not in line else f"{line['shard']}@{line['offset']}  "
    place += "" if "type" not in line else f"{line['type']} {line['id']}  "
    event = f"{line['event']} {_json(line['fields'])}" if line["event"] else "deleted"
    typer.echo(f"{place}{line['seq']}  {event}")
