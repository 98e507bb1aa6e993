"""Stores and journals of servers that speak TLS: the authority and the name are checked."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import postgres_lab
import pytest
import redis_lab
from certificates_lab import Authority, Files
from real_lab import run

from domicile import ConfigError, EventSourced, Node, Settings, handler
from domicile.backends.wiring import open_whole_store
from domicile.core.state.txn import Committed, Put
from domicile.errors import StoreError
from domicile.ports.store import OffersThreads

HOST = "localhost"
SETTINGS = Settings(shards=4, ttl_s=6.0, ask_timeout_s=60.0)
ROOT = os.getuid() == 0


class Coins(EventSourced[int, int], name="tls.coins"):
    """Adds up."""

    @staticmethod
    def initial(id: str) -> int:
        return 0

    @staticmethod
    def apply(state: int, event: int, /) -> int:
        return state + event

    @handler
    async def add(self, amount: int) -> int:
        return await self.persist(amount)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "theirs")


async def used(url: str) -> None:
    """Use a store, also by the thread that renews."""
    store = open_whole_store(url, by="tls").store
    try:
        await store.grant("l", 30.0)
        assert isinstance(await store.commit([], [Put(b"k", b"v", "l")]), Committed)
        assert isinstance(store, OffersThreads)
        beside = store.beside()
        assert beside is not None
        kept = await asyncio.wrap_future(beside.keep("l", b"k"))
        assert kept.item is not None
    finally:
        await store.close()


async def refused(url: str, text: str) -> None:
    """The store behind a URL is not used, and the error says what to do."""
    store = open_whole_store(url, by="tls").store
    try:
        with pytest.raises((ConfigError, StoreError), match=text):
            await store.get(b"k")
    finally:
        await store.close()


# PostgreSQL


def encrypted_programs() -> Path:
    """A PostgreSQL that was built with TLS: that of the wheel was not."""
    found = [*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    wheel = postgres_lab.programs()
    for bin in [*found, *([] if wheel is None else [wheel])]:
        program = bin / "postgres"
        if program.exists() and b"libssl.so" in program.read_bytes():
            return bin
    pytest.skip("no PostgreSQL that speaks TLS: install the package postgresql")


@pytest.fixture(scope="module")
def postgres(ours: Authority) -> Iterator[postgres_lab.PostgresServer]:
    bin = encrypted_programs()
    if find_spec("asyncpg") is None:
        pytest.skip("no asyncpg: install domicile[postgres]")
    with tempfile.TemporaryDirectory(prefix="domicile-tls-") as made:
        home = Path(made)
        home.chmod(0o755)
        files = _readable(ours.issue("database", host=HOST), home)
        server = postgres_lab.PostgresServer(
            bin, "-c", "ssl=on", "-c", f"ssl_cert_file={files.cert}",
            "-c", f"ssl_key_file={files.key}",
        )  # fmt: skip
        try:
            server.start()
            yield server
        finally:
            server.stop()


def _readable(files: Files, home: Path) -> Files:
    """Copies that the server's user owns: it refuses a key that others may read."""
    copies: list[Path] = []
    for one in files:
        copy = home / one.name
        shutil.copy(one, copy)
        copy.chmod(0o600)
        if ROOT:
            shutil.chown(copy, "nobody", "nogroup")
        copies.append(copy)
    return Files(*copies)


def encrypted(server: postgres_lab.PostgresServer, ca: Path, host: str = HOST) -> str:
    """The URL of a new database whose server has to show a certificate of an authority."""
    plain = server.new_database().replace("127.0.0.1", host)
    return f"{plain}?sslmode=verify-full&sslrootcert={ca}"


def test_a_cluster_and_its_journal_are_in_a_postgresql_that_is_verified(
    postgres: postgres_lab.PostgresServer, ours: Authority
) -> None:
    async def scenario() -> None:
        url = encrypted(postgres, ours.cert)
        await used(url)
        async with Node(url, journal=url, entities=[Coins], settings=SETTINGS) as node:
            assert await node.ref(Coins, "a").ask(Coins.add, 2) == 2
            plain = postgres.ask(
                "SELECT count(*) FROM pg_stat_ssl s JOIN pg_stat_activity a USING (pid) "
                "WHERE NOT s.ssl AND a.application_name LIKE 'domicile%'"
            )
            all = postgres.ask(
                "SELECT count(DISTINCT application_name) FROM pg_stat_activity "
                "WHERE application_name IN ('domicile store', 'domicile journal')"
            )
            assert (plain, all) == ("0", "2"), "each connection is encrypted"
        async with Node(url, journal=url, entities=[Coins], settings=SETTINGS) as node:
            assert await node.ref(Coins, "a").ask(Coins.add, 3) == 5

    run(scenario())


def test_a_postgresql_with_another_certificate_is_refused(
    postgres: postgres_lab.PostgresServer, ours: Authority, theirs: Authority
) -> None:
    async def scenario() -> None:
        wrong = encrypted(postgres, theirs.cert)
        step = "certificate that is not accepted.*sslrootcert="
        await refused(wrong, step)
        await refused(encrypted(postgres, ours.cert, "127.0.0.1"), step)
        good = encrypted(postgres, ours.cert)
        for what, store, journal in (("store", wrong, good), ("journal", good, wrong)):
            with pytest.raises(ConfigError, match=f"the {what} .*{step}"):
                async with Node(store, journal=journal, entities=[Coins], settings=SETTINGS):
                    pass

    run(scenario())


def test_a_postgresql_that_speaks_no_tls_is_refused(ours: Authority) -> None:
    plain = postgres_lab.shared_server()

    async def scenario() -> None:
        await refused(encrypted(plain, ours.cert), "speaks no TLS.*sslmode")

    if "on" in plain.ask("SHOW ssl"):
        pytest.skip("this server speaks TLS")
    run(scenario())


# Redis and Valkey


@asynccontextmanager
async def terminator(port: int, files: Files) -> AsyncIterator[int]:
    """TLS in front of a server that was built without it; its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    tasks: dict[asyncio.Task[None], None] = {}

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        for one in (copy(reader, back), copy(there, writer)):
            tasks[asyncio.create_task(one)] = None

    server = await asyncio.start_server(passed, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_a_redis_is_verified(ours: Authority, theirs: Authority) -> None:
    async def scenario() -> None:
        files = ours.issue("cache", host=HOST)
        async with terminator(redis_lab.shared().port, files) as port:

            def at(host: str, ca: Path, scheme: str = "rediss") -> str:
                return f"{scheme}://{host}:{port}/0?prefix=tls-{os.getpid()}&ca={ca}"

            await used(at(HOST, ours.cert))
            async with Node(at(HOST, ours.cert), entities=[], settings=SETTINGS):
                pass
            await refused(at(HOST, theirs.cert), r"TLS failed.*\?ca=FILE")
            await refused(at("127.0.0.1", ours.cert), r"TLS failed.*\?ca=FILE")

    run(scenario())
