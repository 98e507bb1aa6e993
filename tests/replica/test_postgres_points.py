"""What the driver of PostgreSQL promises beyond the contract, on real servers."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from postgres_group_lab import (
    FOUND,
    PostgresServers,
    level,
    needs,
    run_on,
    serve,
    wait_until,
)

from domicile.failover.drivers.postgres.config_files import slot_name
from domicile.failover.drivers.postgres.local_server import children
from domicile.failover.drivers.postgres.server_family import lives
from domicile.failover.records import WriteQuorum

VERSIONS = [pytest.param(version, marks=needs(version)) for version in (15, 18)]
NEWEST = max(FOUND, default=18)

WITHOUT_END = "DO $$ BEGIN INSERT INTO public.kept VALUES ('late'); LOOP END LOOP; END $$"


def directory(servers: PostgresServers, number: int) -> int:
    """Which directory a server's data is: a copy makes another one."""
    data = servers.places[number].data
    assert data is not None
    return data.stat().st_ino


async def diverge(servers: PostgresServers, writes: int) -> int:
    """The first server goes on alone, the second serves epoch 2; up to where they agree."""
    assert await servers.write(0, "common")
    kept = await level(servers)
    await servers.driver(1).stand()
    for number in range(writes):
        assert await servers.write(0, f"alone-{number}")
    await servers.lock(0)
    await servers.driver(1).promote(2)
    await servers.unlock(1, 2)
    assert await servers.write(1, "next")
    return kept


@pytest.mark.parametrize("version", VERSIONS)
def test_an_old_primary_is_rewound_and_not_copied(version: int) -> None:
    async def scenario(servers: PostgresServers) -> None:
        await serve(servers, 1)
        kept = await diverge(servers, 3)
        before = directory(servers, 0)
        first = servers.driver(0)
        await first.stand()
        await first.follow(servers.address(1), kept)
        await level(servers, 1, 0)
        assert directory(servers, 0) == before
        assert await servers.values(0) == ["common", "next"]
        # It keeps its own port, and is a full replica: it could be promoted.
        assert (await first.look()).follows == servers.address(1)

    run_on(version, scenario)


@needs(NEWEST)
def test_two_timelines_with_one_number_are_not_taken_for_one() -> None:
    """Both servers begin timeline 2 or 3 at the same place, and neither knows of the other."""

    async def scenario(servers: PostgresServers) -> None:
        await serve(servers, 1)
        assert await servers.write(0, "common")
        kept = await level(servers)
        first, second = servers.driver(0), servers.driver(1)
        await second.stand()
        await servers.lock(0)
        await first.stand()
        for epoch, driver, number in ((2, first, 0), (3, second, 1)):
            await driver.promote(epoch)
            await servers.unlock(number, epoch)
            for each in range(3):
                assert await servers.write(number, f"epoch-{epoch}-{each}")
        mine, theirs = (
            await servers.local[0].lineage(1 << 62, 16 << 20),
            await servers.local[1].lineage(1 << 62, 16 << 20),
        )
        assert mine[-1].timeline == theirs[-1].timeline
        await servers.lock(0)
        await first.stand()
        await first.follow(servers.address(1), kept)
        await level(servers, 1, 0)
        assert await servers.values(0) == ["common", *[f"epoch-3-{each}" for each in range(3)]]
        assert await servers.values(0) == await servers.values(1)

    run_on(NEWEST, scenario)


@needs(NEWEST)
def test_a_follower_has_a_slot_and_a_replica_keeps_none() -> None:
    async def slots(servers: PostgresServers, number: int) -> dict[str, bool]:
        session = await servers.session(number, "domicile")
        rows = await session.fetch("SELECT slot_name, active FROM pg_replication_slots")
        return {row["slot_name"]: row["active"] for row in rows}

    async def scenario(servers: PostgresServers) -> None:
        await serve(servers, 1)
        assert await slots(servers, 0) == {slot_name("server-1"): True}
        kept = await diverge(servers, 1)
        await servers.driver(0).stand()
        await servers.driver(0).follow(servers.address(1), kept)
        assert await slots(servers, 1) == {slot_name("server-0"): True}
        assert await slots(servers, 0) == {}

    run_on(NEWEST, scenario)


@needs(NEWEST)
def test_a_server_without_data_gets_a_copy_also_if_the_first_one_broke_off() -> None:
    async def scenario(servers: PostgresServers) -> None:
        await serve(servers)
        assert await servers.write(0, "kept")
        new = servers.driver(1)
        facts = await new.look()
        assert (facts.up, facts.empty, facts.fit) == (True, True, False)
        await new.stand()
        copied = servers.local[1].copied
        begun = asyncio.create_task(new.follow(servers.address(0), 0))
        await wait_until(copied.exists)
        begun.cancel()
        with suppress(asyncio.CancelledError):
            await begun
        assert not servers.local[1].has_data
        assert (await new.look()).empty
        await new.follow(servers.address(0), 0)
        await level(servers)
        assert await servers.has(1, "kept")
        assert not servers.local[1].replacing.exists()
        assert not copied.exists()
        facts = await new.look()
        assert (facts.fit, facts.empty) == (True, False)

    run_on(NEWEST, scenario, empty=1)


@needs(NEWEST)
def test_data_that_is_half_replaced_is_never_started() -> None:
    """As after a crash of the agent in the middle of pg_rewind."""

    async def scenario(servers: PostgresServers) -> None:
        await serve(servers, 1)
        second = servers.driver(1)
        await second.stand()
        servers.local[1].write("replacing", "pg_rewind\n")
        await servers.processes[1].stop(immediate=True)
        await servers.processes[1].start()
        assert not await servers.processes[1].running()
        facts = await second.look()
        assert (facts.up, facts.fit, facts.why[:23]) == (True, False, "its data is being repla")
        await second.stand()
        before = directory(servers, 1)
        await second.follow(servers.address(0), 0)
        await level(servers)
        assert directory(servers, 1) != before

    run_on(NEWEST, scenario)


@needs(NEWEST)
def test_a_copy_that_was_about_to_take_its_place_is_made_anew() -> None:
    async def scenario(servers: PostgresServers) -> None:
        await serve(servers, 1)
        local = servers.local[1]
        await servers.driver(1).stand()
        local.write("replacing", "pg_basebackup\n")
        await servers.processes[1].stop(immediate=True)
        local.data.rename(local.replaced)
        assert (await servers.driver(1).look()).empty
        await servers.driver(1).follow(servers.address(0), 0)
        await level(servers)
        assert not local.replaced.exists()

    run_on(NEWEST, scenario)


@needs(NEWEST)
def test_a_server_that_is_just_starting_is_left_to_it() -> None:
    """Its control file says for a while what it was when it crashed: that it was open."""

    async def scenario(servers: PostgresServers) -> None:
        await serve(servers)
        assert await servers.write(0, "kept")
        go, local = servers.home / "go", servers.local[0]
        with local.own_config().open("a") as file:
            file.write(f"restore_command = 'until test -e {go}; do sleep 0.02; done; false'\n")
        await servers.crash(0)
        servers.kept[0] = True
        await wait_until(lambda: local.postmaster() is not None)
        before = local.postmaster()
        await servers.gates[0].lock()
        assert local.in_production()
        assert local.postmaster() == before
        go.touch()
        await servers.answers(0)
        assert local.postmaster() == before
        assert not await servers.write(0, "refused")

    run_on(NEWEST, scenario, count=1)


@pytest.mark.parametrize("version", VERSIONS)
def test_who_is_ready_for_promotion_lets_nobody_in(version: int) -> None:
    """F9: so a promotion has nobody to end. A restart forgets it, and so does following anew."""

    async def reads(servers: PostgresServers) -> bool:
        return await servers.session(1) is not None

    async def scenario(servers: PostgresServers) -> None:
        quorum = WriteQuorum("server-0", ("server-1",), 1)
        await serve(servers, 1, quorum=quorum)
        second = servers.driver(1)
        reader = await servers.session(1)
        assert await reader.fetchval("SELECT 1")
        await second.get_ready()
        with pytest.raises((OSError, asyncpg.PostgresError, asyncpg.InterfaceError)):
            await reader.fetchval("SELECT 1")
        assert not await reads(servers)
        assert await servers.write(0, "acknowledged by one that is ready")

        await second.follow(servers.address(0), 0)
        assert await reads(servers)
        # Whoever promotes it now is seen to have done so.
        assert servers.local[1].written_gate().run == ""

        await second.get_ready()
        await servers.crash(1)
        await servers.start(1)
        assert await reads(servers), "it started as a replica"
        await servers.driver(0).drain()
        await level(servers)
        await second.stand()
        assert not await reads(servers)
        await second.promote(2)
        assert not await reads(servers)
        await servers.unlock(1, 2, WriteQuorum("server-1", ("server-0",), 1))
        assert not await servers.write(1, "alone", 0.5)
        facts = await second.look()
        assert facts.in_use is not None
        assert (facts.open_epoch, facts.in_use.quorum.members) == (2, ("server-0",))

    run_on(version, scenario)


@needs(NEWEST)
@pytest.mark.scenario("FO-15", partial=True)
def test_what_did_not_wait_for_the_disk_is_handed_over_too() -> None:
    """F11: a commit without `synchronous_commit` counts, too; the log's writer may be slow."""

    async def scenario(servers: PostgresServers) -> None:
        with servers.local[0].own_config().open("a") as file:
            file.write("wal_writer_delay = '10s'\nwal_writer_flush_after = '1GB'\n")
        servers.local[0].reload()
        await serve(servers, 1)
        assert await servers.write(0, "settled")
        session = await servers.session(0)
        await session.execute("SET synchronous_commit = off")
        for number in range(5):
            assert await servers.write_in(session, f"quick-{number}")
        await servers.driver(0).drain()
        await level(servers)
        await servers.driver(1).stand()
        assert await servers.values(1) == ["settled", *[f"quick-{number}" for number in range(5)]]

    run_on(NEWEST, scenario)


@needs(NEWEST)
def test_a_drained_server_that_is_locked_feeds_nobody_at_first() -> None:
    """So no replica gets what the next primary does not have, and must be rewound for it."""

    async def senders(servers: PostgresServers) -> list[int]:
        session = await servers.session(0, "domicile")
        return [row["pid"] for row in await session.fetch("SELECT pid FROM pg_stat_replication")]

    async def scenario(servers: PostgresServers) -> None:
        await serve(servers, 1)
        await servers.driver(0).drain()
        (before,) = await senders(servers)
        await level(servers)
        await servers.lock(0)
        assert not lives(before)
        # Until its agent tells it otherwise, a replica tries again.
        async with asyncio.timeout(60):
            while not await senders(servers):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    run_on(NEWEST, scenario)


@needs(NEWEST)
def test_a_write_that_waits_while_the_quorum_changes_does_not_wait_for_the_next_one() -> None:
    """F12: a sender of the log releases writes only when its replica confirms something."""

    async def scenario(servers: PostgresServers) -> None:
        with servers.local[1].own_config().open("a") as file:
            file.write("wal_receiver_status_interval = '1h'\nwal_receiver_timeout = 0\n")
        with servers.local[0].own_config().open("a") as file:
            file.write("autovacuum = off\nwal_sender_timeout = 0\n")
        await serve(servers, 1, quorum=WriteQuorum("server-0", ("server-9",), 1))
        # Nothing else shall write to the log: neither the promotion's checkpoint, nor this process.
        admin = await servers.session(0, "domicile")
        await admin.execute("CHECKPOINT")
        postmaster = servers.local[0].postmaster()
        assert postmaster is not None
        for pid in children(postmaster):
            title = Path(f"/proc/{pid}/cmdline").read_bytes()  # noqa: ASYNC240
            if b"background writer" in title:
                os.kill(pid, signal.SIGSTOP)
        session = await servers.session(0)
        waiting = asyncio.ensure_future(session.execute("INSERT INTO public.kept VALUES ('one')"))
        async with asyncio.timeout(60):
            while "one" not in await servers.values(1):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        # What a change reads for the first time is written to the log, as hints in pages.
        for name in ("server-8", "server-7", "server-6"):
            await servers.unlock(0, 1, WriteQuorum("server-0", (name,), 1))
            await servers.driver(0).look()
        await level(servers)
        assert not waiting.done()
        await servers.unlock(0, 1, WriteQuorum("server-0", ("server-1",), 1))
        async with asyncio.timeout(60):
            await waiting

    run_on(NEWEST, scenario)


@needs(NEWEST)
def test_what_a_follower_has_not_confirmed_is_seen() -> None:
    async def scenario(servers: PostgresServers) -> None:
        await serve(servers, 1)
        await level(servers)
        family = [servers.local[1].postmaster() or 0]
        family += children(family[0])
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        try:
            for number in range(20):
                assert await servers.write(0, f"ahead-{number}")
            facts = await servers.driver(0).look()
            assert 0 < facts.acknowledged["server-1"] < facts.offset
        finally:
            for pid in family:
                os.kill(pid, signal.SIGCONT)
        offset = await level(servers)
        while (await servers.driver(0).look()).acknowledged["server-1"] < offset:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    run_on(NEWEST, scenario)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_quorum_holds_writes_back_and_changes_without_a_gap(version: int) -> None:
    """F12: the set in use, and from which place on."""

    async def scenario(servers: PostgresServers) -> None:
        first = servers.driver(0)
        one = WriteQuorum("server-0", ("server-1",), 1)
        both = WriteQuorum("server-0", ("server-1", "server-2"), 2)
        await serve(servers, 1, 2, quorum=one)
        facts = await first.look()
        assert facts.in_use is not None
        assert facts.in_use.quorum == one
        assert await servers.write(0, "acknowledged")
        began = (await first.look()).offset
        await servers.unlock(0, 1, both)
        facts = await first.look()
        assert facts.in_use is not None
        assert facts.in_use.quorum == both
        assert began <= facts.in_use.since <= facts.offset
        since = facts.in_use.since
        await servers.unlock(0, 1, both)
        facts = await first.look()
        assert facts.in_use is not None
        assert facts.in_use.since == since
        assert await servers.write(0, "both")
        await servers.driver(2).stand()
        assert not await servers.write(0, "held back", 1.0)
        await servers.unlock(0, 1, one)
        assert await servers.write(0, "one")

    run_on(version, scenario, count=3, mode="sync")


@needs(NEWEST)
def test_a_primary_that_froze_acknowledges_nothing_when_it_wakes() -> None:
    """FO-10 in synchronous mode, without any help of a guard."""

    async def scenario(servers: PostgresServers) -> None:
        await serve(servers, 1, quorum=WriteQuorum("server-0", ("server-1",), 1))
        session = await servers.session(0)
        assert await servers.write_in(session, "before")
        family = [servers.local[0].postmaster() or 0]
        family += children(family[0])
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        await servers.driver(1).stand()
        await servers.driver(1).promote(2)
        for pid in family:
            os.kill(pid, signal.SIGCONT)
        assert not await servers.write_in(session, "after", 2.0)
        assert not await servers.write(0, "new session", 2.0)
        await servers.lock(0)
        await servers.unlock(1, 2)
        assert await servers.values(1) == ["before"]

    run_on(NEWEST, scenario, mode="sync")


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_saved_is_what_an_independent_writer_finds_missing(version: int) -> None:
    """FO-19: eight writers, some of whose transactions roll back, and statistics besides."""

    async def scenario(servers: PostgresServers) -> None:
        await serve(servers, 1)
        acknowledged: list[str] = []
        done = asyncio.Event()

        async def keep_writing(name: int) -> None:
            session = await servers.session(0)
            number = 0
            while not done.is_set():
                number += 1
                value = f"{name}-{number}"
                if number % 5 == 0:
                    with suppress(Exception):
                        async with session.transaction():
                            await session.execute("INSERT INTO public.kept VALUES ('rolled back')")
                            raise RuntimeError
                if await servers.write_in(session, value):
                    acknowledged.append(value)
                await asyncio.sleep(0)

        writers = [asyncio.create_task(keep_writing(name)) for name in range(8)]
        await wait_until(lambda: len(acknowledged) >= 50)
        await servers.driver(1).stand()
        stood = len(acknowledged)
        kept = (await servers.driver(1).look()).offset
        admin = await servers.session(0, "domicile")
        await admin.execute("ANALYZE public.kept")
        await wait_until(lambda: len(acknowledged) >= stood + 50)
        done.set()
        await asyncio.gather(*writers)
        await servers.lock(0)
        await servers.driver(0).stand()
        saved = await servers.driver(0).save(kept)
        await servers.driver(1).promote(2)
        await servers.unlock(1, 2)
        there = await servers.values(1)
        missing = [value for value in acknowledged if value not in there]
        assert len(missing) >= 50
        assert saved.writes == len(missing)
        assert any(Path(saved.where).iterdir())  # noqa: ASYNC240

    run_on(version, scenario)


@pytest.mark.parametrize("version", VERSIONS)
def test_no_session_from_before_a_promotion_writes_after_it(version: int) -> None:
    """FO-20 at the new primary, also for a connection that had not said yet who it is."""

    async def scenario(servers: PostgresServers) -> None:
        await serve(servers, 1)
        reader = await servers.session(1)
        assert await reader.fetchval("SELECT 1") == 1
        half = [await asyncio.open_connection("127.0.0.1", servers.ports[1]) for _ in range(3)]
        await asyncio.sleep(0.2)
        await servers.driver(1).stand()
        await servers.driver(1).promote(2)
        assert not await servers.write_in(reader, "old session")
        words = b"user\0app\0database\0postgres\0\0"
        for source, sink in half:
            with suppress(OSError):
                sink.write(struct.pack("!ii", 8 + len(words), 196608) + words)
                query = b"INSERT INTO public.kept VALUES ('half open')\0"
                sink.write(b"Q" + struct.pack("!i", 4 + len(query)) + query)
                await sink.drain()
                assert b"INSERT" not in await asyncio.wait_for(source.read(), 30)
            sink.close()
        assert not await servers.write(1, "new session")
        assert await servers.values(1) == []
        await servers.unlock(1, 2)
        assert await servers.write(1, "served")

    run_on(version, scenario)


@needs(NEWEST)
def test_whoever_starts_a_primary_again_finds_it_in_recovery() -> None:
    """F3: also by hand, without any of the group's files."""

    async def scenario(servers: PostgresServers) -> None:
        await serve(servers)
        await servers.crash(0)
        local = servers.local[0]
        by_hand = await asyncio.create_subprocess_exec(
            *local.as_owner([local.program("postgres"), "-D", str(local.data), "-p",
                             str(servers.ports[0])]),
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, cwd="/",
        )  # fmt: skip
        try:
            session = None
            while session is None:
                session = await servers.session(0)
            assert await session.fetchval("SELECT pg_is_in_recovery()")
            assert not await servers.write_in(session, "refused")
            session.terminate()
        finally:
            await local.stop_now()
            await by_hand.wait()

    run_on(NEWEST, scenario)


@needs(NEWEST)
def test_a_lock_stops_what_was_open_and_leaves_what_was_not() -> None:
    async def scenario(servers: PostgresServers) -> None:
        await serve(servers, 1)
        primary, replica = (servers.local[number].postmaster() for number in (0, 1))
        await servers.gates[1].lock()
        await servers.gates[0].lock()
        assert servers.local[1].postmaster() == replica
        assert servers.local[0].postmaster() != primary
        await servers.answers(0)
        await servers.driver(0).stand()
        await servers.driver(0).promote(2)
        before = servers.local[0].postmaster()
        await servers.gates[0].lock()
        assert servers.local[0].postmaster() == before
        assert not await servers.write(0, "refused")

    run_on(NEWEST, scenario)


async def forever(servers: PostgresServers) -> tuple[asyncio.Task[Any], int]:
    """A client's statement that has written and goes on for ever; the process that it runs in."""
    session = await servers.session(0)
    pid: int = await session.fetchval("SELECT pg_backend_pid()")
    busy = asyncio.create_task(session.execute(WITHOUT_END))
    watcher = await servers.session(0, "domicile")
    while not await watcher.fetchval(  # noqa: ASYNC110
        "SELECT count(*) FROM pg_stat_activity WHERE pid = $1 AND backend_xid IS NOT NULL", pid
    ):
        await asyncio.sleep(0.005)
    return busy, pid


@pytest.mark.scenario("FO-20", "FO-21", partial=True)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("by", ["lock", "start", "stop", "clean stop"])
def test_a_statement_does_not_outlive_a_postmaster_that_was_killed(version: int, by: str) -> None:
    """F3: a busy session notices late that its postmaster is gone, and would still commit."""

    async def scenario(servers: PostgresServers) -> None:
        await serve(servers)
        busy, pid = await forever(servers)
        servers.kept[0] = False
        local, process = servers.local[0], servers.processes[0]
        postmaster = local.postmaster()
        assert postmaster is not None
        os.kill(postmaster, signal.SIGKILL)
        await wait_until(lambda: local.postmaster() is None)
        assert lives(pid)
        match by:
            case "lock":
                await servers.gates[0].lock()
            case "start":
                # The guard has not seen its end yet, on a busy machine.
                while await process.running():  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                await process.start()
                assert local.postmaster() not in (None, postmaster)
            case "stop":
                await process.stop(immediate=True)
            case _:
                await local.stop_cleanly()
        assert not lives(pid)
        with pytest.raises((OSError, asyncpg.PostgresError, asyncpg.InterfaceError)):
            await busy

    run_on(version, scenario, count=1)


PARENT = """
import asyncio, pathlib, sys
from domicile.failover.database_kinds import ServerPlace
from domicile.failover.drivers.postgres import PostgresProcess

async def main(url, folder, data, binaries):
    place = ServerPlace(
        url=url, folder=pathlib.Path(folder), data=pathlib.Path(data),
        options={"binaries": binaries, "name": "server-0"},
    )
    process = PostgresProcess(place)
    await process.start()
    print(process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.scenario("FO-21", partial=True)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("what", ["killed", "stopped"])
def test_a_killed_guard_ends_a_statement_whose_postmaster_can_not(version: int, what: str) -> None:
    """F2: the kernel asks the postmaster to end its sessions; a stopped one does not heed it."""

    async def scenario(servers: PostgresServers) -> None:
        await servers.crash(0)
        place, local = servers.places[0], servers.local[0]
        guard = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PARENT, place.url, str(place.folder), str(place.data),
            place.options["binaries"], stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert guard.stdout is not None
            postmaster = int(await guard.stdout.readline())
            await serve(servers)
            busy, pid = await forever(servers)
            if what == "stopped":
                os.kill(postmaster, signal.SIGSTOP)
            else:
                os.kill(postmaster, signal.SIGKILL)
                await wait_until(lambda: not lives(postmaster))
        finally:
            guard.kill()
            await guard.wait()
        await wait_until(lambda: not lives(pid) and not lives(postmaster))
        with pytest.raises((OSError, asyncpg.PostgresError, asyncpg.InterfaceError)):
            await busy
        await wait_until(lambda: local.postmaster() is None)

    run_on(version, scenario, count=1)


@needs(NEWEST)
def test_what_only_stands_in_the_data_directory_is_left_alone() -> None:
    """An operator's shell is no process of the server."""

    async def scenario(servers: PostgresServers) -> None:
        local = servers.local[0]
        shell = await asyncio.create_subprocess_exec("sleep", "600", cwd=local.data)
        try:
            await serve(servers)
            servers.kept[0] = False
            await local.stop_now()
            assert shell.returncode is None
            assert lives(shell.pid)
        finally:
            shell.kill()
            await shell.wait()

    run_on(NEWEST, scenario, count=1)


@needs(NEWEST)
def test_a_frozen_server_is_locked_in_time() -> None:
    """FO-21: the guard does not wait for what the server would say."""

    async def scenario(servers: PostgresServers) -> None:
        await serve(servers)
        session = await servers.session(0)
        servers.kept[0] = False
        family = [servers.local[0].postmaster() or 0]
        family += children(family[0])
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        await servers.gates[0].lock()
        assert servers.local[0].postmaster() is None
        assert not await servers.write_in(session, "late")
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    run_on(NEWEST, scenario)


def process_of(server: PostgresServers, number: int, name: str) -> int:
    """One of a server's own processes."""
    postmaster = server.local[number].postmaster()
    assert postmaster is not None
    return next(
        pid
        for pid in children(postmaster)
        if name in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_no_commit_is_acknowledged_before_the_server_itself_has_commits_wait(version: int) -> None:
    """F7, F12: settings that are loaded are not yet in force. The checkpointer puts them in force,
    and until it has, a commit waits for nobody."""

    async def scenario(servers: PostgresServers) -> None:
        await servers.driver(0).stand()
        checkpointer = process_of(servers, 0, "checkpointer")
        os.kill(checkpointer, signal.SIGSTOP)
        try:
            await servers.driver(0).promote(1)
            facts = await servers.driver(0).look()
            quorum = WriteQuorum("server-0", ("server-1",), 1)
            opening = asyncio.create_task(servers.gates[0].unlock(1, facts.run, quorum))
            done, _ = await asyncio.wait([opening], timeout=2.0)
            assert not done or not await servers.write(0, "alone", 0.5), "nobody else has it"
            assert not done
        finally:
            os.kill(checkpointer, signal.SIGCONT)
        await opening
        assert not await servers.write(0, "alone", 0.5)

    run_on(version, scenario, count=1)
