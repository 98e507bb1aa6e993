"""The PostgreSQL store's own troubles: sessions, users, formats, time, batches, frozen servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from pooler_lab import (
    Settings,
    drops_settings,
    keeps_the_path_only,
    pooler,
    refuses_settings,
)
from postgres_lab import GUARDED, PostgresServer, programs, shared_server
from postgres_store_lab import PostgresStores, lab, until

from domicile.backends.registry import OpenOptions, shown_url, store_backend
from domicile.core.state.txn import Changes, Committed, Put, Unknown
from domicile.errors import ConfigError, StoreUnavailable
from domicile.ports.store import NeedsTicks
from domicile.stores.postgres import client as store_client
from domicile.stores.postgres import schema
from domicile.stores.postgres import store as store_module
from domicile.stores.postgres.line import ConnectionLine, LineJob
from domicile.stores.postgres.store import PostgresStore, WatchedRows
from domicile.testing.suites.store import after, put, returned

LIMIT_S = 120.0


@pytest.fixture(autouse=True)
def _server() -> None:
    shared_server()


def run(scenario: Callable[[PostgresStores], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), lab(shared_server()) as stores:
            await scenario(stores)

    asyncio.run(main())


@asynccontextmanager
async def admin() -> AsyncIterator[asyncpg.Connection[Any]]:
    connection = await asyncpg.connect(shared_server().url)
    try:
        yield connection
    finally:
        await connection.close()


def opened(url: str, **settings: Any) -> PostgresStore:
    settings = {"op_timeout_s": 30.0, **settings}
    return PostgresStore(url, shown=shown_url(url), by="test", **settings)


async def refused(url: str, **settings: Any) -> str:
    """What a first call says."""
    store = opened(url, **settings)
    try:
        with pytest.raises((ConfigError, StoreUnavailable)) as told:
            await store.get(b"k")
    finally:
        await store.close()
    return str(told.value)


def test_nothing_happens_before_the_first_call() -> None:
    async def main() -> None:
        store = opened("postgresql://nobody@127.0.0.1:1/nowhere")
        store.watch(b"", 0)
        await store.close()
        with pytest.raises(StoreUnavailable, match="closed"):
            await store.get(b"k")

    asyncio.run(main())


def test_what_is_wrong_with_a_database_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(stores: PostgresStores) -> None:
        url = stores.server.url
        async with admin() as raw:
            await raw.execute(f"CREATE ROLE {GUARDED} LOGIN PASSWORD 'right'")
            try:
                guarded = url.replace("domicile@", f"{GUARDED}:hidden-word@")
                told = await refused(guarded)
                assert "refuses this user" in told
                assert "PGPASSWORD" in told
                assert "hidden-word" not in told
                told = await refused(url.replace("domicile@", f"{GUARDED}:right@"))
                assert 'must own the schema "domicile_store"' in told
                assert "USAGE" in told
                # A password need not stand in the URL.
                bare = url.replace("domicile@", f"{GUARDED}@")
                file = tmp_path / "pgpass"
                file.write_text(f"*:*:*:{GUARDED}:right\n", encoding="utf-8")
                file.chmod(0o600)
                assert "must own the schema" in await refused(f"{bare}?passfile={file}")
                monkeypatch.setenv("PGPASSFILE", str(file))
                assert "must own the schema" in await refused(bare)
                monkeypatch.delenv("PGPASSFILE")
                monkeypatch.setenv("PGPASSWORD", "right")
                assert "must own the schema" in await refused(bare)
                monkeypatch.setenv("PGPASSWORD", "wrong")
                assert "refuses this user" in await refused(bare)
            finally:
                await raw.execute(f"DROP ROLE {GUARDED}")
            told = await refused(url.replace("/postgres", "/nowhere"))
            assert "names a database that is not there" in told
            assert "createdb" in told
            assert "start a node with it first" in await refused(url, reads_only=True)
            assert isinstance(await opened_put(stores), Committed)
            await raw.execute("UPDATE domicile_store.meta SET format = 99")
            assert "upgrade Domicile here" in await refused(url)
            assert "upgrade Domicile here" in await refused(url, reads_only=True)
        with pytest.raises(StoreUnavailable, match="can't be reached"):
            await opened("postgresql://domicile@127.0.0.1:1/postgres").get(b"k")

    run(scenario)


async def opened_put(stores: PostgresStores) -> object:
    return await stores.client("a").commit([], [Put(b"k", b"")])


def test_what_goes_wrong_later_may_pass() -> None:
    async def scenario(stores: PostgresStores) -> None:
        store = stores.client("a")
        await put(store, b"k", b"")
        async with admin() as raw:
            await raw.execute("UPDATE domicile_store.meta SET format = 99")
            await store.proxy.cut()
            told = ""
            while "upgrade" not in told:
                try:
                    await put(store, b"k", b"")
                except (StoreUnavailable, AssertionError) as error:
                    told = str(error)
            await raw.execute(f"UPDATE domicile_store.meta SET format = {schema.FORMAT}")
        await put(store, b"k", b"")

    run(scenario)


def test_a_user_without_rights_to_the_tables_can_do_everything() -> None:
    async def scenario(stores: PostgresStores) -> None:
        await put(stores.client("owner"), b"k", b"1")
        async with admin() as raw:
            await raw.execute("CREATE ROLE lowly LOGIN")
            try:
                await raw.execute("GRANT USAGE ON SCHEMA domicile_store TO lowly")
                for name in schema.USED:
                    [found] = await raw.fetch(
                        "SELECT oid::regprocedure::text AS it FROM pg_proc WHERE proname = $1", name
                    )
                    await raw.execute(f"GRANT EXECUTE ON FUNCTION {found['it']} TO lowly")
                url = stores.server.url.replace("domicile@", "lowly@")
                store = opened(url)
                watch = store.watch(b"", (await store.list(b"")).revision)
                assert await store.grant("l", 600.0) == 600.0
                revision = await put(store, b"k", b"2", "l")
                assert await store.renew("l") == 600.0
                await store.tick()
                assert (await anext(watch)).revision == revision
                await store.revoke("l")
                assert await store.get(b"k") is None
                await store.compact(revision)
                await store.close()
                direct = await asyncpg.connect(url)
                for statement in (
                    "TABLE domicile_store.item", "UPDATE domicile_store.meta SET time = 0",
                    "SELECT domicile_store.begin_write(NULL, NULL, NULL)",
                ):  # fmt: skip
                    with pytest.raises(asyncpg.InsufficientPrivilegeError):
                        await direct.execute(statement)
                await direct.close()
            finally:
                await raw.execute("DROP OWNED BY lowly")
                await raw.execute("DROP ROLE lowly")

    run(scenario)


@pytest.mark.parametrize(
    ("takes", "told"),
    [
        (drops_settings, "ignores settings of the session"),
        (keeps_the_path_only, "ignores settings of the session"),
        (refuses_settings, "refuses settings of the session"),
    ],
)
def test_a_pooler_of_transactions_is_refused(
    takes: Callable[[Settings], Settings | None], told: str
) -> None:
    async def scenario(stores: PostgresStores) -> None:
        async with pooler(stores.server.port, takes) as port:
            url = stores.server.url.replace(f":{stores.server.port}", f":{port}")
            said = await refused(url)
            assert told in said
            assert "PgBouncer" in said

    run(scenario)


def test_a_server_that_takes_no_writes_is_refused() -> None:
    async def scenario(stores: PostgresStores) -> None:
        async with admin() as raw:
            # What a standby says of itself.
            await raw.execute("ALTER ROLE domicile SET default_transaction_read_only = on")
            try:
                told = await refused(stores.server.url + "?target_session_attrs=any")
                assert "name the primary" in told
            finally:
                await raw.execute("SET default_transaction_read_only = off")
                await raw.execute("ALTER ROLE domicile RESET default_transaction_read_only")

    run(scenario)


def test_a_standby_is_refused_and_the_primary_is_found_also_after_a_promotion() -> None:
    """Of a URL with two servers; what was acknowledged is on the synchronous standby."""
    shared_server()
    bin = programs()
    assert bin is not None
    primary, standby = PostgresServer(bin), PostgresServer(bin)

    async def main() -> None:
        both = f"127.0.0.1:{standby.port},127.0.0.1:{primary.port}/"
        url = primary.url.replace(f"127.0.0.1:{primary.port}/", both)
        alone = primary.url.replace(f":{primary.port}/", f":{standby.port}/")
        first = opened(url)
        revision = await put(first, b"k", b"1")
        await asyncio.to_thread(standby.follow, primary)
        await asyncio.to_thread(primary.wait_for_standby)
        await asyncio.to_thread(primary.set, "synchronous_standby_names", "'*'")
        assert "name the primary" in await refused(alone)
        assert "takes no writes" in await refused(f"{alone}?target_session_attrs=any")
        second = await put(first, b"k", b"2")
        assert second > revision
        await asyncio.to_thread(primary.kill)
        await asyncio.to_thread(standby.set, "synchronous_standby_names", "''")
        await asyncio.to_thread(standby.promote)
        async with asyncio.timeout(120):
            while True:
                with suppress(StoreUnavailable):
                    found = await first.get(b"k")
                    break
        assert found is not None
        assert (found.revision, found.value) == (second, b"2")
        assert await put(first, b"k", b"3") > second
        await first.close()

    try:
        primary.start()
        asyncio.run(main())
    finally:
        standby.stop()
        primary.stop()


def test_an_older_format_is_brought_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(stores: PostgresStores) -> None:
        first = stores.client("a")
        revision = await put(first, b"k", b"1")
        monkeypatch.setattr(store_client, "FORMAT", schema.FORMAT + 1)
        monkeypatch.setitem(
            schema.UPGRADES, schema.FORMAT, "CREATE TABLE domicile_store.more (n int)"
        )
        both = [stores.client(name) for name in "bc"]
        found = await asyncio.gather(*[store.get(b"k") for store in both])
        assert [item.revision for item in found if item] == [revision, revision]
        async with admin() as raw:
            assert await raw.fetchval("SELECT count(*) FROM domicile_store.more") == 0
            assert await raw.fetchval("SELECT format FROM domicile_store.meta") == schema.FORMAT + 1

    run(scenario)


def test_commits_that_wait_side_by_side_go_together() -> None:
    async def scenario(stores: PostgresStores) -> None:
        store = stores.client("a")
        await put(store, b"k", b"")
        async with admin() as raw:
            before = await raw.fetchval("SELECT wall FROM domicile_store.meta")
            asked = [store.commit([], [Put(b"%d" % n, b"")]) for n in range(60)]
            found = await asyncio.gather(*asked)
            assert [one.revision for one in found if isinstance(one, Committed)] == sorted(
                {one.revision for one in found if isinstance(one, Committed)}
            )
            assert len(found) == 60
            # Each call stamps its commits with one reading of the clock.
            calls = await raw.fetchval(
                "SELECT count(DISTINCT at) FROM domicile_store.txn WHERE at > $1", before
            )
            assert calls <= 4

    run(scenario)


def test_a_commit_that_was_sent_when_the_store_closes_is_unknown() -> None:
    async def scenario(stores: PostgresStores) -> None:
        store, other = stores.client("a"), stores.client("b")
        await put(store, b"k", b"")
        await store.proxy.hold()
        sent = asyncio.ensure_future(store.commit([], [Put(b"k", b"sent")]))
        waits = asyncio.ensure_future(store.grant("l", 600.0))
        await asyncio.sleep(0)
        await until(lambda: len(store._writes()._line._jobs) == 1)
        await store.close()
        assert await sent == Unknown()
        with pytest.raises(StoreUnavailable):
            await waits
        await store.proxy.release()
        assert await other.get(b"k") is not None

    run(scenario)


def test_a_commit_that_is_late_does_not_end_those_that_went_with_it() -> None:
    """Each caller has its own time, and what never began is not sent."""

    class Connection:
        def is_closed(self) -> bool:
            return False

        def terminate(self) -> None: ...

    async def main() -> None:
        begun: list[int] = []
        answers = asyncio.Event()

        async def open(left_s: float) -> Any:
            return Connection()

        async def do(connection: Any, jobs: Sequence[LineJob]) -> Sequence[object]:
            begun.append(len(jobs))
            await answers.wait()
            return [f"done in {job.deadline}" for job in jobs]

        def job(left_s: float) -> LineJob:
            part = schema.operation_columns([], [Put(b"k", b"")])
            return LineJob(do, time.monotonic() + left_s, 0, part=part, unknown=Unknown())

        line = ConnectionLine(open, lambda error: StoreUnavailable(), lambda: None, "line")
        short, long = job(0.1), job(LIMIT_S)
        async with asyncio.timeout(LIMIT_S):
            both = [asyncio.ensure_future(line.do(one)) for one in (short, long)]
            assert await both[0] == Unknown()
            third = job(0.1)
            behind = asyncio.ensure_future(line.do(third))
            await until(lambda: time.monotonic() > third.deadline)
            answers.set()
            assert await both[1] == f"done in {long.deadline}"
            with pytest.raises(StoreUnavailable, match="did not begin"):
                await behind
            assert begun == [2]
            await line.close()

    asyncio.run(main())


def test_a_hint_that_comes_while_a_watch_reads_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(stores: PostgresStores) -> None:
        monkeypatch.setattr(store_module, "PULSE_S", 10 * LIMIT_S)
        store, other = stores.client("a"), stores.client("b")
        revision = await put(store, b"k", b"")
        read, heard_at = store.changes, store._heard_at

        async def changes(*what: Any) -> WatchedRows:
            found = await read(*what)
            if store._heard_at == heard_at:
                await put(other, b"k", b"while it was read")
                await until(lambda: store._heard_at > heard_at)
            return found

        monkeypatch.setattr(store, "changes", changes)
        found = await anext(store.watch(b"", revision))
        assert found.revision == revision + 1

    run(scenario)


def test_old_changes_are_trimmed() -> None:
    async def scenario(stores: PostgresStores) -> None:
        store = stores.client("a", kept_commits=10)
        for _ in range(2 * schema.TRIM_EVERY // 32):
            asked = [store.commit([], [Put(b"k%d" % n, b"")]) for n in range(32)]
            await asyncio.gather(*asked)
        async with admin() as raw:
            for table in ("change", "txn"):
                count = await raw.fetchval(f"SELECT count(*) FROM domicile_store.{table}")
                assert count < schema.TRIM_EVERY + 64
        revision = (await store.list(b"")).revision
        later = await put(store, b"k", b"1")
        assert (await anext(store.watch(b"", revision))).revision == later

    run(scenario)


def test_many_changes_come_whole_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "BATCH_ROWS", 7)

    async def scenario(stores: PostgresStores) -> None:
        store, other = stores.client("a"), stores.client("b")
        start = (await store.list(b"")).revision
        await other.commit([], [Put(b"n/%d" % n, b"") for n in range(20)])
        for n in range(20):
            await put(other, b"m/%d" % n, b"")
        last = await put(other, b"n/last", b"")
        watch = store.watch(b"n/", start)
        first, second = await anext(watch), await anext(watch)
        assert [change.key for change in first.changes] == [b"n/%d" % n for n in range(20)]
        assert second.revision == last

    run(scenario)


def test_time_goes_on_while_nobody_leads() -> None:
    """S4: a client that renews or watches sees that time stands still, and ticks."""

    async def scenario(stores: PostgresStores) -> None:
        holder, renewing, watching = (stores.client(name) for name in "abc")
        await renewing.grant("kept", 600.0)
        await holder.grant("l", 1.0)
        last = await put(holder, b"k", b"", "l")
        waiting = asyncio.create_task(after(watching.watch(b"", last)))
        await stores.settled()
        await holder.close()
        changes: Changes = await waiting
        assert [change.key for change in changes.changes] == [b"k"]

    run(scenario)


def test_who_ticks_stops_when_somebody_leads() -> None:
    async def scenario(stores: PostgresStores) -> None:
        store, leader = stores.client("a"), stores.client("b")
        assert isinstance(leader, NeedsTicks)
        await store.grant("l", 600.0)
        async with admin() as raw:
            # As if nobody had ticked for a while.
            await raw.execute("UPDATE domicile_store.meta SET wall = wall - 10")
        await store.renew("l")
        ticker = store._standby
        assert ticker._task is not None, "time stood still, so this client ticks"
        while not ticker._task.done():
            await leader.tick()
            await asyncio.sleep(leader.tick_s)

    run(scenario)


def test_a_server_that_stands_still_is_not_waited_for() -> None:
    async def scenario(stores: PostgresStores) -> None:
        store, other = stores.client("a", op_timeout_s=1.0), stores.client("b")
        await put(store, b"k", b"")
        await store.grant("l", 600.0)
        await store.renew("l")
        await store.proxy.hold()
        with pytest.raises(StoreUnavailable, match="did not answer"):
            await store.renew("l")
        assert await store.commit([], [Put(b"k", b"held")]) == Unknown()
        with pytest.raises(StoreUnavailable):
            await store.commit([], [Put(b"k", b"refused")])
        await store.proxy.release()
        assert await returned(lambda: store.renew("l")) == 600.0
        assert await other.get(b"k") is not None

    run(scenario)


def test_a_store_that_is_locked_lets_renewals_pass() -> None:
    """S10: `keep` locks the row of its lease only."""

    async def scenario(stores: PostgresStores) -> None:
        store = stores.client("a", op_timeout_s=2.0)
        await store.grant("l", 600.0)
        await put(store, b"k", b"", "l")
        async with admin() as raw:
            holding = raw.transaction()
            await holding.start()
            await raw.execute("SELECT * FROM domicile_store.meta FOR UPDATE")
            assert await store.renew("l") == 600.0
            assert await store.get(b"k") is not None
            with pytest.raises(StoreUnavailable, match=r"stayed locked|did not answer"):
                await store.grant("m", 600.0)
            await holding.rollback()
        assert await store.grant("m", 600.0) == 600.0

    run(scenario)


def test_a_failover_gives_every_lease_its_ttl_again() -> None:
    """Renewals that the new primary never got are made good, as etcd does at a change of leader."""

    async def scenario(stores: PostgresStores) -> None:
        store = stores.client("a")
        await store.grant("l", 600.0)
        await put(store, b"k", b"", "l")
        async with admin() as raw:
            await raw.execute("UPDATE domicile_store.lease SET deadline = deadline - 599.9; ")
            await raw.execute("UPDATE domicile_store.meta SET place = 'elsewhere/00000001'")
            assert await store.renew("l") == 600.0
            left = await raw.fetchval(
                "SELECT deadline - time FROM domicile_store.lease, domicile_store.meta"
            )
            assert left > 590
            place = await raw.fetchval("SELECT place FROM domicile_store.meta")
            assert place.endswith("/00000001")
            assert not place.startswith("elsewhere")

    run(scenario)


def test_ticks_need_no_disk_and_ends_of_leases_do() -> None:
    async def scenario(stores: PostgresStores) -> None:
        store = stores.client("a")
        await store.grant("l", 1.0)
        async with admin() as raw:
            seen: list[str] = []
            for _ in range(2):
                async with raw.transaction():
                    await raw.execute("SELECT domicile_store.tick(NULL, NULL, NULL, true, 0)")
                    seen.append(await raw.fetchval("SHOW synchronous_commit"))
                await raw.execute("UPDATE domicile_store.meta SET time = time + 1")
            assert seen == ["off", "on"]

    run(scenario)


def test_a_backend_is_opened_by_its_url() -> None:
    async def scenario(stores: PostgresStores) -> None:
        url = stores.server.url
        backend = store_backend(url)
        assert backend.default_journal(url) == url
        store = backend.open_store(url, OpenOptions("n1", "blue", url))
        client = (await put(store, b"blue/clients/1", b""), await put(store, b"k", b""))
        assert client[0] < client[1]
        await store.close()
        async with admin() as raw:
            assert (
                await raw.fetchval("SELECT by FROM domicile_store.txn WHERE revision = 1") == "n1"
            )

    run(scenario)


def test_a_renewal_ends_an_expired_lease_that_nobody_has_ended() -> None:
    """S3: a renewal past the deadline comes too late; that it does is stored with its answer."""

    async def scenario(stores: PostgresStores) -> None:
        store = stores.client("a")
        await store.grant("l", 600.0)
        await put(store, b"k", b"", "l")
        async with admin() as raw:
            await raw.execute("UPDATE domicile_store.meta SET time = time + 601")
            assert await store.renew("l") is None
            assert await raw.fetchval("SELECT count(*) FROM domicile_store.lease") == 0
            assert await raw.fetchval("SELECT count(*) FROM domicile_store.item") == 0
        assert await store.get(b"k") is None

    run(scenario)
