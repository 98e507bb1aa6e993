"""Who is woken by a write: watches hear of commits at once, and of leases not at all (I8)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path

import pytest
from sqlite_lab import until

from domicile import Settings
from domicile.backends.wiring import open_backends
from domicile.core.ids import Incarnation
from domicile.core.state.keys import client_key, node_key
from domicile.core.state.txn import Put
from domicile.stores.sqlite import jobs as sqlite_jobs
from domicile.stores.sqlite import threads as sqlite_threads
from domicile.stores.sqlite.jobs import StoreReader
from domicile.stores.sqlite.store import SqliteStore

RENEWALS = 60
ONE = Incarnation("1" * 32)


def test_grants_and_renewals_wake_no_other_process_and_commits_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    look = StoreReader._look

    def counted(self: StoreReader, *args: object) -> object:
        nonlocal looks
        looks += 1
        return look(self, *args)  # type: ignore[arg-type]

    async def scenario() -> None:
        nonlocal looks
        watching, writing = (SqliteStore(tmp_path / "s.db", by=name) for name in "ab")
        try:
            await writing.commit((), (Put(b"k", b"0"),))
            watch = watching.watch(b"", 1)
            told = asyncio.ensure_future(anext(aiter(watch)))
            await writing.grant("lease", 30.0)
            await asyncio.sleep(0.2)
            looks = 0
            for number in range(RENEWALS):
                await writing.renew("lease")
                await writing.grant(f"lease-{number}", 30.0)
                await asyncio.sleep(0.01)
            assert looks < RENEWALS / 4, "but for a look now and then"
            assert not told.done()
            await writing.commit((), (Put(b"k", b"1"),))
            assert [one.key for one in (await told).changes] == [b"k"]
        finally:
            await watching.close()
            await writing.close()

    monkeypatch.setattr(StoreReader, "_look", counted)
    asyncio.run(scenario())


def test_what_a_look_has_found_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings, visits, log = 0, 20, StoreReader.log

    def logged(self: StoreReader, *args: object) -> object:
        nonlocal readings
        readings += 1
        return log(self, *args)  # type: ignore[arg-type]

    async def scenario() -> None:
        watching, writing = (SqliteStore(tmp_path / "s.db", by=name) for name in "ab")
        seen: list[tuple[bytes, bool]] = []

        async def watch() -> None:
            async for changes in watching.watch(b"clients/", 1):
                seen.extend((change.key, change.item is not None) for change in changes.changes)

        try:
            await writing.commit((), (Put(b"k", b"0"),))
            task = asyncio.ensure_future(watch())
            await asyncio.sleep(0.2)
            assert readings == 1
            for number in range(visits):
                lease, key = f"lease-{number}", f"clients/{number}".encode()
                await writing.grant(lease, 30.0)
                await writing.commit((), (Put(key, b"", lease),))
                await writing.commit((), (Put(b"nothing", b"to this watch"),))
                await writing.revoke(lease)
                await until(lambda so_far=2 * number + 2: len(seen) == so_far)
            assert seen == [
                (f"clients/{number}".encode(), there)
                for number in range(visits)
                for there in (True, False)
            ]
            assert readings <= 2, "one more if the first look came behind the first commits"
            task.cancel()
        finally:
            await watching.close()
            await writing.close()

    monkeypatch.setattr(StoreReader, "log", logged)
    asyncio.run(scenario())


def test_a_lease_that_ends_soon_is_known_to_others_in_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        watching, writing = (SqliteStore(tmp_path / "s.db", by=name) for name in "ab")
        try:
            await writing.commit((), (Put(b"k", b"0"),))
            watch = aiter(watching.watch(b"", 1))
            told = asyncio.ensure_future(anext(watch))
            await asyncio.sleep(0.1)
            await writing.grant("brief", 0.1)
            await writing.commit((), (Put(b"k", b"1", "brief"),))
            await writing.close()
            assert (await told).changes[0].item is not None
            assert (await asyncio.wait_for(anext(watch), 5.0)).changes[0].item is None
        finally:
            await watching.close()
            await writing.close()

    asyncio.run(scenario())


def test_what_nobody_hurries_for_wakes_no_other_process_and_is_seen_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rings: list[str] = []
    ring = sqlite_jobs.ring_file

    def rung(path: Path) -> None:
        rings.append(path.name)
        ring(path)

    async def scenario() -> None:
        watching, writing = (
            SqliteStore(tmp_path / "s.db", by=name, unhurried=b"clients/") for name in "ab"
        )
        seen: list[bytes] = []

        async def watch() -> None:
            async for changes in watching.watch(b"", 1):
                seen.extend(change.key for change in changes.changes)

        async def rings_of(awaitable: Awaitable[object]) -> int:
            before = len(rings)
            await awaitable
            return len(rings) - before

        try:
            await writing.commit((), (Put(b"k", b"0"),))
            task = asyncio.ensure_future(watch())
            await until(lambda: bool(watching._reader._hears))
            await writing.grant("lease", 30.0)
            come = writing.commit((), (Put(b"clients/1", b"", "lease"),))
            assert await rings_of(come) == 0
            assert await rings_of(writing.revoke("lease")) == 0
            await until(lambda: seen == [b"clients/1"] * 2)
            await writing.grant("lease", 30.0)
            both = writing.commit((), (Put(b"clients/2", b"", "lease"), Put(b"k", b"1")))
            assert await rings_of(both) == 1
            beyond = writing.commit((), (Put(b"clients0", b""),))
            assert await rings_of(beyond) == 1
            before = writing.commit((), (Put(b"clients", b"", "lease"),))
            assert await rings_of(before) == 1
            assert await rings_of(writing.revoke("lease")) == 1, "the other key goes, too"
            await until(lambda: len(seen) == 8)
            task.cancel()
        finally:
            await watching.close()
            await writing.close()

    monkeypatch.setattr(sqlite_jobs, "ring_file", rung)
    asyncio.run(scenario())


def test_records_of_clients_are_what_nobody_hurries_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rings: list[Path] = []

    async def scenario() -> None:
        url = f"sqlite:///{tmp_path / 's.db'}"
        store = open_backends(url, cluster="a-cluster", settings=Settings()).store
        try:
            await store.grant("lease", 30.0)
            for key, rung in ((client_key(ONE), 0), (node_key(ONE), 1)):
                rings.clear()
                await store.commit((), (Put(key, b"", "lease"),))
                assert len(rings) == rung
        finally:
            await store.close()

    monkeypatch.setattr(sqlite_jobs, "ring_file", rings.append)
    asyncio.run(scenario())


@pytest.mark.parametrize("what", ["removed", "replaced", "out of reach at first"])
def test_a_bell_that_is_not_heard_is_listened_to_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Without it every watch would look 50 times a second, or hear of commits a second late."""
    bell = tmp_path / "s.db-bell"
    made = sqlite_threads._inotify
    tries: list[int] = []

    def first_fails(path: Path) -> int:
        tries.append(-1 if what == "out of reach at first" and not tries else made(path))
        return tries[-1]

    monkeypatch.setattr(sqlite_threads, "_inotify", first_fails)

    async def scenario() -> None:
        store = SqliteStore(tmp_path / "s.db", by="a")
        try:
            await store.commit((), (Put(b"k", b"0"),))
            told = asyncio.ensure_future(anext(aiter(store.watch(b"", 1))))
            await until(lambda: bool(tries))
            if what == "removed":
                bell.unlink()
            elif what == "replaced":
                (tmp_path / "other").touch()
                (tmp_path / "other").replace(bell)
            await until(lambda: len(tries) == 2)
            assert tries[1] >= 0
            await until(lambda: store._reader._hears)
            assert bell.exists()
            assert not told.done()
            told.cancel()
        finally:
            await store.close()

    asyncio.run(scenario())
