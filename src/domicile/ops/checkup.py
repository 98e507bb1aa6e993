"""What `domicile doctor` looks at: a cluster's store, its server, speed, contents and journal.

Called by `doctor`. It looks first and creates nothing. Only in a store that has something it writes
a few small values under a lease of its own, which it ends. Each finding that needs something to be
done says what.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from domicile.backends.registry import OpenOptions, journal_backend, shown_url, store_backend
from domicile.backends.wiring import WholeStore, open_whole_store
from domicile.core.ids import Incarnation
from domicile.core.state.cluster_view import ClusterView, Unreadable
from domicile.core.state.txn import MAX_VALUE_BYTES, Committed, Listing, Put
from domicile.errors import ConfigError, DomicileError, StoreError
from domicile.ops.status import NoCluster, existing, part
from domicile.ops.waiting import told_if_slow
from domicile.ports.findings import Finding, InspectableStore, Severity
from domicile.ports.health import Health, Verdict
from domicile.ports.journal import JournalAbsent, JournalUnknown
from domicile.ports.store import Store
from domicile.settings import Settings

T = TypeVar("T")

SAMPLES = 10
LARGE_BYTES = 64 * 1024 * 1024
PROBE = "/doctor/"
"""Keys that are written begin with this behind the cluster's name; no process reads them."""


async def examine(
    url: str, cluster: str, settings: Settings, journal: str | None, *, reads_only: bool = False
) -> tuple[list[Finding], bool]:
    """Everything that was found, and whether the store is there at all."""
    found: list[Finding] = []
    try:
        existing(store_backend(url), url)
        whole = open_whole_store(
            url, by="doctor", op_timeout_s=settings.op_timeout_s, reads_only=reads_only,
            creates=False,
        )  # fmt: skip
    except (ConfigError, NoCluster) as error:
        return [Finding(Severity.ERROR, "store", str(error))], False
    try:
        try:
            with told_if_slow(url):
                took_s, listing = await _timed(lambda: whole.store.list(b""))
        except (StoreError, ConfigError) as error:
            found.append(Finding(Severity.ERROR, "store", str(error)))
            if isinstance(whole.store, InspectableStore):
                # The server may say more of itself than that its store can't be read.
                with suppress(StoreError, ConfigError), told_if_slow(url):
                    found += await whole.store.findings()
            return found, False
        found.append(Finding(Severity.OK, "reached", f"a first listing took {_ms(took_s)}"))
        if isinstance(whole.store, InspectableStore):
            found += await _asked(whole.store.findings)
        found += await _speed(whole.store, cluster, settings)
        if listing.items and not reads_only:
            found += await _asked(lambda: _written(whole.store, cluster, settings), "access")
        elif not reads_only:
            said = "nothing is stored here yet, so nothing was written to measure commits"
            found.append(Finding(Severity.NOTE, "commits", said, "ask again once a node runs"))
        found += _size(listing)
        found += _contents(whole, listing, cluster, settings)
    finally:
        await whole.store.close()
    found += await _journal(url, cluster, settings, journal)
    return found, True


async def _asked(
    ask: Callable[[], Awaitable[Sequence[Finding]]], subject: str = "store"
) -> Sequence[Finding]:
    try:
        return await ask()
    except (StoreError, ConfigError) as error:
        return [Finding(Severity.ERROR, subject, str(error))]


# speed


async def _speed(store: Store, cluster: str, settings: Settings) -> list[Finding]:
    key = f"{cluster}{PROBE}none".encode()
    try:
        reads = [(await _timed(lambda: store.get(key)))[0] for _ in range(SAMPLES)]
    except (StoreError, ConfigError) as error:
        return [Finding(Severity.ERROR, "access", str(error))]
    return [_judged("reads", reads, settings)]


async def _written(store: Store, cluster: str, settings: Settings) -> list[Finding]:
    """L2: a renewal must be answered within `op_timeout_s`, and twice within ttl − margin."""
    id = secrets.token_hex(8)
    lease, key = f"doctor-{id}", f"{cluster}{PROBE}{id}".encode()
    found: list[Finding] = []
    granted_s = await store.grant(lease, settings.ttl_s)
    try:
        renewals = [(await _timed(lambda: store.renew(lease)))[0] for _ in range(SAMPLES)]
        commits: list[float] = []
        for number in range(SAMPLES):
            put = Put(key, b"%d" % number, lease)
            took_s, outcome = await _timed(lambda put=put: store.commit([], [put]))  # type: ignore[misc]
            if not isinstance(outcome, Committed):
                said = f"a commit ended as {type(outcome).__name__}"
                found.append(Finding(Severity.ERROR, "commits", said, "look at the store's log"))
            commits.append(took_s)
    finally:
        await store.revoke(lease)
    found += [_judged("renewals", renewals, settings), _judged("commits", commits, settings)]
    if granted_s > settings.ttl_s:
        said = f"the store grants {granted_s:g} s where ttl_s={settings.ttl_s:g} was asked for"
        found.append(Finding(Severity.NOTE, "ttl", f"{said}: dead nodes are noticed later"))
    return found


def _judged(what: str, took_s: Sequence[float], settings: Settings) -> Finding:
    middle, worst = sorted(took_s)[len(took_s) // 2], max(took_s)
    limit_s = settings.op_timeout_s
    said = f"half within {_ms(middle)}, all {len(took_s)} within {_ms(worst)}; the limit is "
    said += f"{limit_s:g} s (op_timeout_s)"
    if worst > limit_s:
        step = "find out what delays the store, or raise ttl_s"
        return Finding(Severity.ERROR, what, said, step)
    if worst > limit_s / 3:
        step = "find out what delays the store, or raise ttl_s: two renewals must fit into a ttl"
        return Finding(Severity.WARNING, what, said, step)
    return Finding(Severity.OK, what, said)


async def _timed(call: Callable[[], Awaitable[T]]) -> tuple[float, T]:
    began = time.perf_counter()
    result = await call()
    return time.perf_counter() - began, result


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms"


# contents


def _size(listing: Listing) -> list[Finding]:
    size = sum(len(item.key) + len(item.value) for item in listing.items)
    said = f"{_count(len(listing.items), 'key')} with {size / 1024:,.1f} KiB"
    largest = max(listing.items, key=lambda item: len(item.value), default=None)
    if largest is not None and len(largest.value) > MAX_VALUE_BYTES // 2:
        said += f"; {_key(largest.key)} has {len(largest.value) / 1024:,.0f} KiB"
        step = f"a value may have {MAX_VALUE_BYTES // 1024} KiB; see what makes it grow"
        return [Finding(Severity.WARNING, "size", said, step)]
    if size > LARGE_BYTES:
        step = "every process reads all of it when it starts; use a store for each cluster"
        return [Finding(Severity.WARNING, "size", said, step)]
    return [Finding(Severity.OK, "size", said)]


def _contents(
    whole: WholeStore, listing: Listing, cluster: str, settings: Settings
) -> list[Finding]:
    try:
        mine = part(listing, shown_url(whole.url), cluster)
    except NoCluster as error:
        return [Finding(Severity.NOTE, "cluster", str(error), "start a node with `domicile run`")]
    view = ClusterView()
    unread = [fact.key for fact in view.load(mine) if isinstance(fact, Unreadable)]
    found = [_members(view)]
    if unread:
        found.append(
            Finding(
                Severity.ERROR, "cluster",
                f"{len(unread)} keys can't be read, the first is {_key(unread[0])}",
                "look for a process of another version, or of another program",
            )
        )  # fmt: skip
    if view.moved is not None:
        where = "was moved to" if view.moved.direction == "to" else "is an unfinished copy of"
        step = "name the other store" if view.moved.direction == "to" else "copy it again"
        said = f"the cluster {where} {view.moved.store}: processes refuse this store"
        found.append(Finding(Severity.WARNING, "cluster", said, step))
    if view.rewound:
        said = "the store is a copy that was made just now, or a process found that it lost commits"
        said += "; takeovers wait for a ttl"
        step = "start the nodes; if it lasts while they run, see that one may coordinate"
        found.append(Finding(Severity.WARNING, "history", said, step))
    found += _stale(view, whole.health, settings)
    return found


def _members(view: ClusterView) -> Finding:
    said = f"{_count(len(view.nodes), 'node')}, {_count(len(view.clients), 'client')}, "
    if view.nodes and view.leader is None:
        step = "wait a ttl; if it lasts, see that a node runs with candidate=True"
        return Finding(Severity.WARNING, "cluster", f"{said}and nobody coordinates", step)
    leader = "no coordinator" if view.leader is None else f"coordinated by {view.leader.node}"
    return Finding(Severity.OK, "cluster", said + leader)


def _stale(view: ClusterView, health: Health | None, settings: Settings) -> list[Finding]:
    found: list[Finding] = []
    dead = [] if health is None else _dead(view.nodes, health)
    if dead:
        names = ", ".join(view.nodes[one].node for one in dead)
        said = f"{names}: the process is gone, and its record is still there"
        step = 'it ends with its lease; with fencing = "health" use `domicile declare-dead`'
        found.append(Finding(Severity.NOTE, "records", said, step))
    others = sorted({node.ttl_s for node in view.nodes.values() if node.ttl_s != settings.ttl_s})
    if others:
        ttls = ", ".join(f"{ttl_s:g}" for ttl_s in others)
        said = f"nodes have ttl_s={ttls}, this command looks with {settings.ttl_s:g}"
        step = "say --app, or set DOMICILE_TTL_S as for the nodes"
        found.append(Finding(Severity.NOTE, "settings", said, step))
    return found


def _dead(nodes: Iterable[Incarnation], health: Health) -> list[Incarnation]:
    return [one for one in nodes if health.verdict(one) is Verdict.DEAD]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _key(key: bytes) -> str:
    return key.decode(errors="backslashreplace")


# journal


async def _journal(url: str, cluster: str, settings: Settings, named: str | None) -> list[Finding]:
    journal = store_backend(url).default_journal(url) if named is None else named
    if journal is None:
        said = "this store comes without one, and none was named"
        step = "nodes with durable entities name theirs: `journal=`; look at it with --journal"
        return [Finding(Severity.NOTE, "journal", said, step)]
    shown = shown_url(journal)
    try:
        backend = journal_backend(journal)
        file = backend.sqlite_file(journal)
        if file is not None and not file.exists():
            said = f"there is none at {file} yet: no durable entity has written"
            return [Finding(Severity.NOTE, "journal", said)]
        options = OpenOptions(
            "doctor", cluster, url, op_timeout_s=settings.op_timeout_s, reads_only=True
        )
        opened = backend.open_journal(journal, options)
        try:
            took_s, _ = await _timed(lambda: opened.claim([]))
        finally:
            await opened.close()
    except JournalAbsent as error:
        if named is None:
            said = f"there is none in {shown} yet: no durable entity has written"
            return [Finding(Severity.NOTE, "journal", said)]
        return [Finding(Severity.ERROR, "journal", f"{shown}: {error}")]
    except (DomicileError, JournalUnknown) as error:
        return [Finding(Severity.ERROR, "journal", f"{shown}: {error}")]
    return [Finding(Severity.OK, "journal", f"{shown} answered after {_ms(took_s)}")]
