"""The store on Redis and Valkey: the contract on real servers, and what only it does."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from redis.asyncio.connection import Connection
from redis_lab import RedisStores, free_port, lab, server, shared

from domicile.backends.registry import OpenOptions, shown_url, store_backend
from domicile.core.state.txn import Absent, Committed, Delete, Item, Put, Unknown
from domicile.errors import ConfigError, StoreError, StoreRewound, StoreUnavailable, WatchCompacted
from domicile.membership.clock import SystemClock
from domicile.ports.store import Store
from domicile.stores.redis import store as redis_store
from domicile.stores.redis.calls import READS, WRITES
from domicile.stores.redis.server import CONNECTIONS, RedisAddress
from domicile.stores.redis.store import RedisStore
from domicile.stores.redis.ticks import STALE_S
from domicile.testing.suites.store import StoreContract, after, put
from proving.redis_server import RedisProcess, redis_programs

PATIENCE_S = 120.0


class TestRedisStore(StoreContract):
    """On Valkey."""

    # Real time passes, too: a slow machine must end no lease.
    ttl_s = 120.0
    patience_s = 60.0
    races = 3

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RedisStores]:
        async with lab(shared()) as stores:
            yield stores


@pytest.mark.skipif("redis" not in redis_programs(), reason="no redis-server is installed")
class TestStoreOnRedis(TestRedisStore):
    """The same on Redis itself, where it is installed."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RedisStores]:
        with server(of=redis_programs()["redis"]) as process:
            async with lab(process) as stores:
                yield stores


@pytest.fixture
def process() -> Iterator[RedisProcess]:
    """A server that a test may stop, kill and restore."""
    with server() as started:
        yield started


def run(process: RedisProcess, scenario: Callable[[RedisStores], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), lab(process) as stores:
            await scenario(stores)

    asyncio.run(main())


def store_at(url: str, **more: float | str | bool | int) -> RedisStore:
    return RedisStore(RedisAddress.parse(url, shown_url(url)), **more)  # type: ignore[arg-type]


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# keys, values, limits


def test_keys_values_and_leases_may_have_any_bytes() -> None:
    async def scenario(stores: RedisStores) -> None:
        store = stores.client("a")
        every = bytes(range(256))
        leases = ["5:x:", "a b", "ä:1:", "-"]
        for n, lease in enumerate(leases):
            await store.grant(lease, 60.0)
            await put(store, every + bytes([n]), b"3 4 - \r\n" + every, lease)
        await put(store, b"", b"")
        await put(store, b"\xff\xff", b"last")
        listing = await store.list(b"")
        keys = [item.key for item in listing.items]
        assert keys == sorted(keys)
        assert listing.items[1].value == b"3 4 - \r\n" + every
        assert [item.key for item in (await store.list(b"\xff")).items] == [b"\xff\xff"]
        assert len((await store.list(every)).items) == len(leases)
        for n, lease in enumerate(leases):
            await store.revoke(lease)
            assert len((await store.list(every)).items) == len(leases) - n - 1

    run(shared(), scenario)


def test_a_lease_with_thousands_of_keys_ends_in_one_commit() -> None:
    async def scenario(stores: RedisStores) -> None:
        store, other = stores.client("a"), stores.client("b")
        await store.grant("l", 60.0)
        many = 3_000
        for first in range(0, many, 60):
            await store.commit([], [Put(b"k%d" % n, b"", "l") for n in range(first, first + 60)])
        last = (await other.list(b"")).revision
        assert len((await other.list(b"")).items) == many
        await store.revoke("l")
        changes = await anext(other.watch(b"", last))
        assert (changes.revision, len(changes.changes)) == (last + 1, many)

    run(shared(), scenario)


def test_the_log_keeps_so_many_commits_and_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(stores: RedisStores) -> None:
        few = RedisStore(stores.address(stores.process.port), kept_commits=5)
        watch = few.watch(b"", (await few.list(b"")).revision)
        revisions = [await put(few, b"k", b"%d" % n) for n in range(20)]
        with pytest.raises(WatchCompacted):
            await anext(watch)
        with pytest.raises(WatchCompacted):
            await anext(few.watch(b"", revisions[13]))
        assert (await anext(few.watch(b"", revisions[14]))).revision == revisions[15]
        assert stores.process.ask("XLEN", stores.keys[6]) == 5
        monkeypatch.setattr("domicile.stores.redis.calls.KEPT_BYTES", 10_000)
        thick = RedisStore(stores.address(stores.process.port))
        for _ in range(12):
            await put(thick, b"k", bytes(4_000))
        assert stores.process.ask("XLEN", stores.keys[6]) == 3
        await few.close()
        await thick.close()

    run(shared(), scenario)


def test_a_watch_that_fell_far_behind_reads_page_after_page() -> None:
    async def scenario(stores: RedisStores) -> None:
        store, other = stores.client("a"), stores.client("b")
        start = (await store.list(b"")).revision
        for n in range(150):
            await put(other, b"elsewhere" if n % 3 else b"here/%d" % n, b"")
        watch = store.watch(b"here/", start)
        seen = [await anext(watch) for _ in range(50)]
        keys = [changes.changes[0].key for changes in seen]
        assert keys == [b"here/%d" % n for n in range(0, 150, 3)]
        waiting = asyncio.create_task(after(watch))
        await stores.settled()
        last = await put(other, b"here/", b"")
        assert (await waiting).revision == last

    run(shared(), scenario)


def test_stores_with_different_prefixes_share_a_server() -> None:
    async def scenario(stores: RedisStores) -> None:
        one, other = stores.client("a"), store_at(f"{stores.process.url}?prefix={stores.prefix}-2")
        await put(one, b"k", b"one")
        assert await other.get(b"k") is None
        assert await put(other, b"k", b"other") == 1
        assert (await one.list(b"")).items == (Item(b"k", b"one", 1, 1),)
        await other.close()

    run(shared(), scenario)


def test_a_unix_socket_serves_too(process: RedisProcess, tmp_path: Path) -> None:
    path = process.home / "valkey.sock"

    async def scenario() -> None:
        store = store_at(f"redis://{path}?db=1&prefix=x")
        assert await put(store, b"k", b"") == 1
        await store.close()

    process.kill()
    process._settings = ("--unixsocket", str(path))
    process.start()
    asyncio.run(scenario())


# rewinds, deaths


@pytest.mark.parametrize("overtaken", [False, True])
def test_a_server_that_starts_on_an_older_file_has_rewound(
    process: RedisProcess, overtaken: bool
) -> None:
    """A restored backup of the append-only file, as an operator would put it back (S5)."""

    async def scenario(stores: RedisStores) -> None:
        store, other = stores.client("a"), stores.client("b")
        await store.grant("l", 60.0)
        await put(store, b"k", b"kept", "l")
        process.kill()
        shutil.copytree(process.home / "appendonlydir", process.home / "backup")
        await stores.revive()
        lost = [await put(store, b"k", b"lost %d" % n, "l") for n in range(3)][-1]
        assert (await other.list(b"")).revision == lost
        process.kill()
        shutil.rmtree(process.home / "appendonlydir")
        (process.home / "backup").rename(process.home / "appendonlydir")
        await stores.revive()
        fresh = stores.client("fresh")
        if overtaken:
            while await put(fresh, b"k", b"instead", "l") <= lost:
                pass
        with pytest.raises(StoreRewound, match="list again"):
            await other.renew("l")
        with pytest.raises(StoreRewound):
            await store.commit([], [Put(b"k", b"more")])
        item = await fresh.get(b"k")
        assert item is not None
        assert item.value == (b"instead" if overtaken else b"kept")
        # A client goes on in the history that is there now.
        assert isinstance(await store.commit([], [Put(b"k", b"more")]), Committed)

    run(process, scenario)


def test_a_store_that_closes_while_it_connects_leaves_no_connection(
    process: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(stores: RedisStores) -> None:
        began, goes_on = asyncio.Event(), asyncio.Event()
        connect = Connection._connect

        async def slow(connection: Connection) -> None:
            began.set()
            await goes_on.wait()
            await connect(connection)

        monkeypatch.setattr(Connection, "_connect", slow)
        store = store_at(process.url)
        asked = asyncio.ensure_future(store.commit([], [Put(b"late", b"")]))
        await began.wait()
        await store.close()
        goes_on.set()
        with pytest.raises(StoreUnavailable, match="closed"):
            await asked
        (connection,) = store.server._pool._available_connections
        assert not connection.is_connected
        with pytest.raises(StoreUnavailable, match="closed"):
            store.beside()

    run(process, scenario)


def test_an_emptied_server_has_rewound(process: RedisProcess) -> None:
    async def scenario(stores: RedisStores) -> None:
        store, other = stores.client("a"), stores.client("b")
        last = await put(store, b"k", b"")
        await other.get(b"k")
        waiting = asyncio.create_task(after(other.watch(b"", last)))
        await stores.settled()
        process.ask("FLUSHALL")
        # No call of this client: the watch itself compares the history.
        with pytest.raises(StoreRewound):
            await waiting
        with pytest.raises(StoreRewound):
            await store.get(b"k")
        assert await store.get(b"k") is None

    run(process, scenario)


def test_a_stopped_server_answers_late_or_never_and_goes_on(process: RedisProcess) -> None:
    async def scenario(stores: RedisStores) -> None:
        store, other = stores.client("a"), stores.client("b")
        ttl_s = await store.grant("l", 3.0)
        last = await put(store, b"k", b"", "l")
        follower = asyncio.create_task(after(other.watch(b"", last)))
        await stores.settled()
        process.freeze()
        try:
            began = time.monotonic()
            assert await store.commit([Absent(b"x")], [Put(b"x", b"")]) == Unknown()
            with pytest.raises(StoreUnavailable, match="did not answer within 2 s"):
                await store.renew("l")
            assert time.monotonic() - began < 60
            with pytest.raises(StoreUnavailable):
                await follower
        finally:
            process.thaw()
        # S4: that the server stood still ends no lease.
        await until(lambda: _renews(store, "l", ttl_s))
        assert await store.get(b"k") is not None

    run(process, scenario)


async def _renews(store: Store, lease: str, ttl_s: float) -> bool:
    with suppress(StoreUnavailable):
        assert await store.renew(lease) == ttl_s
        return True
    return False


def test_the_leases_of_a_dead_process_end_though_nobody_else_is_told_to_tick() -> None:
    """S4: a process that sees stale store time advances it; with two of them, one stops."""

    async def scenario(stores: RedisStores) -> None:
        holder, *others = [stores.client(name) for name in "abc"]
        ttl_s = await holder.grant("l", 1.0)
        last = await put(holder, b"k", b"", "l")
        await holder.close()
        waiting = asyncio.create_task(after(others[0].watch(b"", last)))
        for other in others:
            await other.grant("m", 60.0)
        began = time.monotonic()
        assert [change.key for change in (await waiting).changes] == [b"k"]
        assert time.monotonic() - began > ttl_s / 2
        ticking = [other for other in others if isinstance(other, RedisStore)]
        await until(lambda: _true(sum(other._pace.ticks for other in ticking) == 1))

    run(shared(), scenario)


async def _true(value: bool) -> bool:
    return value


def test_a_script_that_the_server_has_forgotten_is_brought_again() -> None:
    async def scenario(stores: RedisStores) -> None:
        store = stores.client("a")
        first = await put(store, b"k", b"")
        stores.process.ask("SCRIPT", "FLUSH")
        assert await put(store, b"k", b"") == first + 1

    run(shared(), scenario)


def test_a_reader_reads_and_writes_nothing(process: RedisProcess) -> None:
    process.ask(
        "ACL", "SETUSER", "reader", "on", ">secret", "~{domicile}:*", "+evalsha_ro", "+eval_ro",
        "+xread", "+hget", "+hmget", "+hlen", "+xlen", "+xrange", "+zrangebylex", "+zcount",
        "+time",
    )  # fmt: skip

    async def scenario() -> None:
        address = f"redis://reader:secret@127.0.0.1:{process.port}/0"
        reader = store_at(address, reads_only=True)
        assert (await reader.list(b"")).items == ()
        assert process.ask("DBSIZE") == 0
        writer = store_at(process.url)
        await writer.grant("l", 60.0)
        first = await put(writer, b"k", b"1", "l")
        assert await reader.get(b"k") == Item(b"k", b"1", first, first)
        watch = reader.watch(b"", first)
        waiting = asyncio.create_task(after(watch))
        await put(writer, b"k", b"2")
        assert (await waiting).revision == first + 1
        with pytest.raises(StoreError):
            await reader.commit([], [Delete(b"k")])
        await reader.close()
        await writer.close()

    asyncio.run(scenario())


# what a server must be


async def refused(url: str) -> str:
    store = store_at(url)
    try:
        with pytest.raises((ConfigError, StoreUnavailable)) as told:
            await store.get(b"k")
    finally:
        await store.close()
    assert "secret" not in str(told.value)
    return f"{type(told.value).__name__}: {told.value}"


def test_what_a_wrong_user_is_told(process: RedisProcess) -> None:
    port = process.port
    process.ask("ACL", "SETUSER", "few", "on", ">secret", "~*", "+evalsha", "+eval", "+info")
    process.ask("ACL", "SETUSER", "deaf", "on", ">secret", "~*", "+get")
    process.ask("CONFIG", "SET", "requirepass", "right")
    for user in ("", "default:secret@", "nobody:secret@"):
        said = asyncio.run(refused(f"redis://{user}127.0.0.1:{port}/0"))
        assert said.startswith("ConfigError: ")
        assert "user or password are wrong or missing" in said
    for user in ("few", "deaf"):
        said = asyncio.run(refused(f"redis://{user}:secret@127.0.0.1:{port}/0"))
        assert said.startswith("ConfigError: ")
        assert "ACL SETUSER" in said


def test_a_password_is_read_from_a_file_for_each_connection(
    process: RedisProcess, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    url = f"redis://app@127.0.0.1:{process.port}/0?password_file={file}"
    process.ask("ACL", "SETUSER", "app", "on", ">first", "~*", "&*", "+@all")
    said = asyncio.run(refused(url))
    assert said.startswith("ConfigError: ")
    assert f"the password file {file} can't be read" in said
    file.write_text("secret\n", encoding="utf-8")
    assert "user or password are wrong or missing" in asyncio.run(refused(url))
    file.write_text("first\n", encoding="utf-8")

    async def scenario() -> None:
        store = store_at(url)
        await put(store, b"k", b"1")
        # Another password, and every connection ends: the next one reads it anew.
        process.ask("ACL", "SETUSER", "app", "resetpass", ">second")
        file.write_text("second\n", encoding="utf-8")
        process.ask("CLIENT", "KILL", "USER", "app")
        until = asyncio.get_running_loop().time() + 30
        while True:
            try:
                await store.get(b"k")
            except StoreUnavailable:
                assert asyncio.get_running_loop().time() < until
            else:
                break
        await store.close()

    asyncio.run(scenario())


def test_what_a_replica_and_a_cluster_node_tell(process: RedisProcess) -> None:
    with server("--replicaof", f"127.0.0.1 {process.port}") as replica:
        said = asyncio.run(refused(replica.url))
        assert "on a replica, which takes no writes; name its primary" in said
    # Its port among nodes is 10,000 above the other one, unless it is given: too high for some.
    with server("--cluster-enabled", "yes", "--cluster-port", str(free_port())) as node:
        assert "hash slot not served" in asyncio.run(refused(node.url)).lower()
        node.ask("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        # One node that has the store's slot works, as all keys are in one slot.

        async def works() -> None:
            store = store_at(node.url)
            await until(lambda: _works(store))
            await store.close()

        asyncio.run(works())


async def _works(store: RedisStore) -> bool:
    with suppress(StoreUnavailable):
        return await put(store, b"k", b"") > 0
    return False


def test_a_server_that_evicts_is_refused(process: RedisProcess) -> None:
    process.ask("CONFIG", "SET", "maxmemory", "100mb", "maxmemory-policy", "allkeys-lru")
    said = asyncio.run(refused(process.url))
    assert said.startswith("ConfigError: ")
    assert "`maxmemory-policy noeviction`" in said


def test_a_server_that_was_replaced_while_nobody_asked_is_looked_at_again(
    process: RedisProcess,
) -> None:
    async def scenario(stores: RedisStores) -> None:
        store = store_at(process.url)
        try:
            await put(store, b"k", b"")
            process.kill()
            process._settings = ("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
            # The loop turns meanwhile, and sees the end of the connection.
            await asyncio.to_thread(process.start)
            with pytest.raises(StoreUnavailable, match="maxmemory-policy noeviction"):
                await store.get(b"k")
        finally:
            await store.close()

    run(process, scenario)


def test_a_full_server_does_nothing_by_halves(process: RedisProcess) -> None:
    async def scenario(stores: RedisStores) -> None:
        store = stores.client("a")
        last = await put(store, b"k", b"")
        process.ask("CONFIG", "SET", "maxmemory", "1mb")
        with pytest.raises(StoreUnavailable, match="raise `maxmemory`"):
            await store.commit([], [Put(b"%d" % n, bytes(1000)) for n in range(9)])
        process.ask("CONFIG", "SET", "maxmemory", "0")
        assert (await store.list(b"")).revision == last

    run(process, scenario)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("appendfsync", "everysec"), "appendfsync everysec"),
        (("appendonly", "no"), "no append-only file"),
    ],
)
def test_a_server_that_may_lose_commits_is_named_loudly(
    process: RedisProcess,
    caplog: pytest.LogCaptureFixture,
    settings: tuple[str, str],
    words: str,
) -> None:
    async def scenario() -> None:
        store = store_at(process.url)
        for _ in range(3):
            await put(store, b"k", b"")
        await store.close()

    asyncio.run(scenario())
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    process.ask("CONFIG", "SET", *settings)
    asyncio.run(scenario())
    (told,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert words in told.message
    assert "appendfsync always" in told.message


def test_nobody_at_the_port_and_another_programs_keys(process: RedisProcess) -> None:
    process.ask("SET", "{taken}:meta", "text")
    said = asyncio.run(refused(f"{process.url}?prefix=taken"))
    assert "another program has keys with this prefix" in said
    url = process.url
    process.kill()
    said = asyncio.run(refused(url))
    assert said.startswith("StoreUnavailable: ")
    assert "can't be reached" in said
    process.start()


def test_the_scripts_differ_in_what_they_may_do() -> None:
    assert WRITES.text.startswith("#!lua\n")
    assert READS.text.startswith("#!lua flags=no-writes\n")


def test_the_users_of_the_page_can_do_what_it_says(process: RedisProcess) -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "run-on-redis.md"
    commands = [line for line in page.read_text("utf-8").splitlines() if line.startswith("ACL SET")]
    assert len(commands) == 2
    for command in commands:
        process.ask(*command.split())

    async def scenario() -> None:
        app = store_at(f"redis://app:secret@127.0.0.1:{process.port}/0")
        reader = store_at(f"redis://reader:secret@127.0.0.1:{process.port}/0", reads_only=True)
        await app.grant("l", 60.0)
        first = await put(app, b"k", b"", "l")
        watch = reader.watch(b"", first)
        assert await app.renew("l") == 60.0
        for _ in range(3):
            await put(app, b"k", b"", "l")
        await app.compact(first)
        await app.revoke("l")
        assert [(await anext(watch)).revision for _ in range(4)][-1] == first + 4
        for store in (app, reader):
            assert await store.findings()
            assert (await store.list(b"")).items == ()
            await store.close()

    asyncio.run(scenario())


def test_the_log_of_commits_says_who_wrote_what_and_when(process: RedisProcess) -> None:
    now = SystemClock().now

    async def scenario() -> tuple[str, float, float]:
        url = process.new_database()
        backend = store_backend(url)
        store = backend.open_store(url, OpenOptions("writer"))
        try:
            await store.grant("lease", 60.0)
            began = now()
            await store.commit([], [Put(b"kept", b"1"), Put(b"held", b"2", "lease")])
            await store.commit([], [Delete(b"kept")])
            ended = now()
            await store.revoke("lease")
            for number in range(300):
                await store.commit([], [Put(b"many", b"%d" % number)])
            return url, began, ended
        finally:
            await store.close()

    url, began, ended = asyncio.run(scenario())
    backend = store_backend(url)
    found = backend.commits(url, 0)
    assert found is not None
    assert [commit.revision for commit in found] == list(range(1, 304))
    first, second, third = found[:3]
    assert first.puts == [(b"kept", b"1", None), (b"held", b"2", "lease")]
    assert (second.puts, second.deletes, second.by) == ([], [b"kept"], "writer")
    assert (third.deletes, third.expiry) == ([b"held"], False)
    # The server's clock counts microseconds, ours may be set a little apart from it.
    assert began - 0.1 <= first.at <= second.at <= ended + 0.1
    more = backend.commits(url, 300)
    assert more is not None
    assert [commit.puts[0][1] for commit in more] == [b"297", b"298", b"299"]

    async def forget() -> None:
        store = store_at(url)
        await store.compact(302)
        await store.close()

    asyncio.run(forget())
    left = backend.commits(url, 0)
    assert left is not None
    assert [commit.revision for commit in left] == [303]


def test_calls_get_a_connection_in_their_order() -> None:
    callers, rounds = 8 * CONNECTIONS, 20
    done = [0] * callers

    async def scenario(stores: RedisStores) -> None:
        store = stores.client("a")
        await store.list(b"")

        async def call(number: int) -> None:
            while sum(done) < callers * rounds:
                await store.get(b"k")
                done[number] += 1

        await asyncio.gather(*[call(number) for number in range(callers)])

    run(shared(), scenario)
    assert min(done) > rounds / 2, f"some were passed again and again: {sorted(done)}"


# what a renewal tells the store, while its wait for the log goes on for ever


def test_a_renewal_shows_that_nobody_ticks(
    process: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "BLOCK_S", 1_000.0)

    async def scenario(stores: RedisStores) -> None:
        leader, other = stores.client("leader"), stores.client("other")
        await leader.grant("dead", 1.0)
        await leader.grant("mine", 600.0)
        await leader.commit([], [Put(b"held", b"", "dead")])
        seen = (await other.list(b"")).revision
        watch = other.watch(b"held", seen)
        waiting = asyncio.ensure_future(anext(watch))
        await stores.settled()
        await leader.close()
        await asyncio.sleep(2 * STALE_S)
        # This renewal moves store time by one tick; to end the lease it takes four.
        beside = other.beside()
        await asyncio.wrap_future(beside.keep("mine", b"held"))
        assert (await waiting).changes[0].item is None

    run(process, scenario)


def test_a_renewal_that_meets_a_rewind_ends_the_watches(
    process: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "BLOCK_S", 1_000.0)

    async def scenario(stores: RedisStores) -> None:
        store = stores.client("one")
        await store.grant("mine", 600.0)
        backup = await stores.snapshot()
        await store.commit([], [Put(b"later", b"")])
        beside = store.beside()
        waiting = asyncio.ensure_future(
            anext(store.watch(b"later", (await store.list(b"")).revision))
        )
        await stores.settled()
        await stores.rewind(backup)
        with pytest.raises(StoreRewound):
            await asyncio.wrap_future(beside.keep("mine", b"later"))
        with pytest.raises(StoreRewound):
            await waiting

    run(process, scenario)
