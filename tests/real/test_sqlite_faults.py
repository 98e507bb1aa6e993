"""The SQLite store among real processes and real faults: kills, locks, full and broken disks."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from sqlite_lab import PATIENCE_S, Disk, opened, worker

from domicile.core.state.txn import Committed, Conflict, Put, Unknown
from domicile.errors import StoreUnavailable
from domicile.stores.sqlite.file import Handle
from domicile.stores.sqlite.jobs import StoreReader, StoreWriter
from domicile.stores.sqlite.store import SqliteStore, commits
from domicile.stores.sqlite.threads import FileNotifier
from domicile.testing.suites.store import put

NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")
LIMIT_S = 240.0


def run(path: Path, scenario: Callable[[SqliteStore], Awaitable[None]], **settings: float) -> None:
    async def main() -> None:
        store = SqliteStore(path, by="test", **settings)
        try:
            async with asyncio.timeout(LIMIT_S):
                await scenario(store)
        finally:
            await store.close()

    asyncio.run(main())


def sound(path: Path) -> bool:
    with opened(path) as connection:
        return connection.pragma("integrity_check") == "ok"


def counted(path: Path) -> list[int]:
    """The values that the counter had, from the log."""
    return [int(value) for commit in commits(path) for key, value, _ in commit.puts if key == b"n"]


def test_twenty_processes_lose_no_update(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with worker(path, "crowd", 20) as crowd:
        said = crowd.communicate(timeout=LIMIT_S)[0]
        assert crowd.returncode == 0
    acknowledged = [tuple(map(int, line.split())) for line in said.splitlines()]
    assert sorted(value for _, value in acknowledged) == list(range(1, 101))
    assert len({revision for revision, _ in acknowledged}) == 100
    assert counted(path) == list(range(1, 101))
    assert sound(path)


@pytest.mark.parametrize("seed", range(3))
def test_a_writer_killed_at_any_moment_leaves_a_sound_file(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "store.db"
    random = Random(seed)
    acknowledged = 0
    for _ in range(3):
        with worker(path, "add", 1_000_000) as writer:
            assert writer.stdout is not None
            for _ in range(random.randrange(1, 40)):
                value = int(writer.stdout.readline().split()[1])
                assert value > acknowledged
                acknowledged = value
            time.sleep(random.random() * 0.003)
            writer.send_signal(signal.SIGKILL)
            for line in writer.stdout.read().splitlines(keepends=True):
                if line.endswith("\n"):
                    acknowledged = int(line.split()[1])
        assert sound(path)
        values = counted(path)
        assert values == list(range(1, len(values) + 1))
        assert len(values) in (acknowledged, acknowledged + 1)
        acknowledged = len(values)


def test_a_process_stopped_inside_a_write_is_named_and_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "store.db"

    async def scenario(store: SqliteStore) -> None:
        last = await put(store, b"k", b"")
        patient = SqliteStore(path, by="patient", op_timeout_s=60.0)
        with worker(path, "lock", 0) as locker:
            assert locker.stdout is not None
            assert await asyncio.to_thread(locker.stdout.readline) == "locked\n"
            locker.send_signal(signal.SIGSTOP)
            with pytest.raises(StoreUnavailable, match=rf"{path} stayed locked .*fuser"):
                await store.commit([], [Put(b"k", b"no")])
            assert await store.get(b"k") is not None
            waiting = asyncio.create_task(patient.commit([], [Put(b"k", b"yes")]))
            await asyncio.sleep(0)
        assert await waiting == Committed(last + 1)
        await patient.close()

    run(path, scenario, op_timeout_s=1.0)


def ask(process: subprocess.Popen[str], line: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def test_a_file_that_can_not_grow_is_no_false_answer(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with worker(path, "attempt", 1) as process:
        ready(process)
        assert ask(process, "100") == "Committed | float"
        commit, grant = ask(process, "limit 4096 300000").split(" | ")
        assert commit == "Unknown"
        assert grant.startswith("StoreUnavailable: ")
        assert str(path) in grant
        assert ask(process, "limit -1 300000") == "Committed | float"
    assert sound(path)


def in_namespace(setup: str, path: Path) -> tuple[str, ...]:
    """A prefix that runs a command where it may mount; skips where the system forbids it."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    tried = subprocess.run([*NAMESPACE, "sh", "-c", setup, "sh", path], check=False)
    if tried.returncode:
        pytest.skip("this system lets nobody mount in a namespace")
    return (*NAMESPACE, "sh", "-c", f'{setup} && shift && exec "$@"', "sh", str(path))


def test_a_full_disk_is_named_and_passes(tmp_path: Path) -> None:
    """A small tmpfs of its own, in a mount namespace."""
    wrapped = in_namespace('mount -t tmpfs -o size=1m none "$1"', tmp_path)
    with worker(tmp_path / "store.db", "attempt", 1, wrapped=wrapped) as process:
        ready(process)
        answers = [ask(process, "500000") for _ in range(3)]
        assert "StoreUnavailable: the disk of the store" in answers[-1]
        assert f"{tmp_path / 'store.db'} is full; make room on it" in answers[-1]
        assert ask(process, "10").startswith("Committed | float")


def test_a_read_only_directory_is_named(tmp_path: Path) -> None:
    """By its mode if that binds this user, else by a read-only mount in a namespace."""
    wrapped: tuple[str, ...] = ()
    path = tmp_path / "there" / "store.db"
    run(path, lambda store: put(store, b"k", b""))
    if os.geteuid() == 0:
        setup = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"'
        wrapped = in_namespace(setup, path.parent)
    try:
        path.chmod(0o444)
        path.parent.chmod(0o555)
        with worker(path, "attempt", 0, wrapped=wrapped) as process:
            ready(process)
            for answer in ask(process, "10").split(" | "):
                assert answer.startswith("StoreUnavailable: ")
                assert str(path) in answer
                assert "writ" in answer
            if not wrapped:
                path.parent.chmod(0o755)
                path.chmod(0o644)
                assert ask(process, "10") == "Committed | float"
    finally:
        path.parent.chmod(0o755)
        path.chmod(0o644)


def test_a_directory_that_may_not_be_entered_is_named(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("modes do not bind root")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)

    async def scenario(store: SqliteStore) -> None:
        with pytest.raises(StoreUnavailable, match="this user"):
            await store.get(b"k")
        closed.chmod(0o755)
        assert await store.get(b"k") is None

    try:
        run(closed / "store.db", scenario)
    finally:
        closed.chmod(0o755)


def test_damage_is_named_and_passes_when_the_file_is_mended(tmp_path: Path) -> None:
    path, copy = tmp_path / "store.db", tmp_path / "copy.db"

    async def fill(store: SqliteStore) -> None:
        for n in range(50):
            await store.commit([], [Put(b"%d" % n, bytes(2000))])

    run(path, fill)
    shutil.copy(path, copy)
    content = path.read_bytes()
    # The header stays: SQLite opens the file and finds the pages to be nonsense.
    path.write_bytes(content[:100] + b"\xee" * (len(content) - 100))

    async def scenario(store: SqliteStore) -> None:
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match=rf"{path} is damaged.*sound copy"):
                await store.list(b"")
        shutil.copy(copy, path)
        assert len((await store.list(b"")).items) == 50
        assert await put(store, b"k", b"") == 51

    run(path, scenario)


def test_a_watch_in_another_process_follows(tmp_path: Path) -> None:
    path = tmp_path / "store.db"

    async def scenario(store: SqliteStore) -> None:
        await put(store, b"other", b"")
        with worker(path, "follow", 20) as follower:
            assert follower.stdout is not None
            assert await asyncio.to_thread(follower.stdout.readline) == "ready\n"
            for _ in range(20):
                await put(store, b"at", b"%r" % time.monotonic())
                assert float(await asyncio.to_thread(follower.stdout.readline)) > 0
            assert await asyncio.to_thread(follower.wait, LIMIT_S) == 0

    run(path, scenario)


class Shaken:
    """Breaks a function once, in a thread of the store with this name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.where = ""
        original = getattr(owner, name)

        def shaken(*args: Any) -> Any:
            if self.where and threading.current_thread().name.startswith(self.where):
                self.where = ""
                raise SystemError("bad argument to internal function")
            return original(*args)

        monkeypatch.setattr(owner, name, shaken)


def test_what_is_unexpected_is_no_answer_and_the_store_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shaken = Shaken(monkeypatch, Handle, "check_place")

    async def scenario(store: SqliteStore) -> None:
        last = await put(store, b"k", b"")
        shaken.where = "domicile-store-read"
        with pytest.raises(StoreUnavailable, match="unexpected"):
            await store.list(b"")
        assert (await store.list(b"")).revision == last
        shaken.where = "domicile-store-write"
        assert isinstance(await store.commit([], [Put(b"k", b"new")]), Unknown)
        assert await put(store, b"k", b"newer") > last
        assert len([record for record in caplog.records if record.exc_info]) == 2

    run(tmp_path / "store.db", scenario)


def test_what_fails_beside_the_loop_once_it_has_begun_may_have_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """S1: as it is with `commit`."""
    shaken = Shaken(monkeypatch, StoreWriter, "_hurried")

    async def scenario(store: SqliteStore) -> None:
        await store.grant("l", 60.0)
        side = store.beside()
        disk.bad_syncs["test"] = True
        assert side.rewrite(b"k", 0, b"lost", "l").result(LIMIT_S) == Unknown()
        with pytest.raises(StoreUnavailable, match=r"store\.db"):
            side.keep("l", b"k").result(LIMIT_S)
        disk.bad_syncs.clear()
        assert not caplog.records
        shaken.where = "domicile-store-write"
        assert side.rewrite(b"k", 0, b"there", "l").result(LIMIT_S) == Unknown()
        assert "unexpected" in caplog.text
        item = await store.get(b"k")
        assert item is not None
        assert item.value == b"there"
        assert side.rewrite(b"k", 1, b"", "l").result(LIMIT_S) == Conflict(b"k")

    disk = Disk()
    try:
        run(tmp_path / "store.db", scenario)
    finally:
        disk.unregister()


def test_a_look_for_changes_that_meets_the_unexpected_ends_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shaken = Shaken(monkeypatch, StoreReader, "_look")

    async def scenario(store: SqliteStore) -> None:
        last = await put(store, b"k", b"")
        asked = asyncio.ensure_future(anext(store.watch(b"", last)))
        shaken.where = "domicile-store-read"
        with pytest.raises(StoreUnavailable, match="bad argument"):
            await asyncio.wait_for(asked, LIMIT_S)
        await put(store, b"k", b"new")
        assert (await store.list(b"")).revision == last + 1
        again = store.watch(b"", last)
        assert (await asyncio.wait_for(anext(again), LIMIT_S)).revision == last + 1
        assert "looking for changes" in caplog.text

    run(tmp_path / "store.db", scenario)


def test_a_thread_that_the_disk_keeps_holds_up_no_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """I6: a process on a frozen disk can still leave; the thread goes when the disk lets it."""

    async def main() -> None:
        disk = Disk()
        stall = threading.Event()
        store = SqliteStore(tmp_path / "store.db", by="test", op_timeout_s=0.5)
        try:
            await put(store, b"k", b"")
            disk.stalls["test"] = stall
            assert isinstance(await store.commit([], [Put(b"k", b"")]), Unknown)
            # The disk stalls for longer than this.
            async with asyncio.timeout(PATIENCE_S / 2):
                await store.close()
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(store.close(), 0.01)
            assert "stuck in its disk" in caplog.text
        finally:
            stall.set()
            await store.close()
            disk.unregister()
        assert not [one for one in threading.enumerate() if one.name.endswith(" test")]

    asyncio.run(main())


@pytest.mark.parametrize("where", ["domicile-store-read", "domicile-store-write"])
def test_a_thread_that_stumbles_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    monkeypatch.setattr("domicile.stores.sqlite.threads.STUMBLE_S", 0.001)
    shaken = Shaken(monkeypatch, FileNotifier, "wait")

    async def scenario(store: SqliteStore) -> None:
        last = await put(store, b"k", b"")
        shaken.where = where
        for number in range(3):
            await put(store, b"k", b"%d" % number)
            assert (await store.list(b"")).revision == last + number + 1
        assert not shaken.where
        assert "failed and continues" in caplog.text

    run(tmp_path / "store.db", scenario)


@pytest.mark.parametrize("of", ["descriptors", "threads"])
def test_a_store_that_can_not_start_leaves_nothing_behind_and_starts_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    owner, name = (os, "pipe") if of == "descriptors" else (threading.Thread, "start")
    original: Callable[..., Any] = getattr(owner, name)
    left = 0

    def scarce(*args: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(24, "Too many open files") if of == "descriptors" else RuntimeError("no")
        return original(*args)

    async def main() -> None:
        nonlocal left
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        store = SqliteStore(tmp_path / "store.db", by="test")
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, scarce)
            for allowed in (0, 1, 1):
                left = allowed
                with pytest.raises(StoreUnavailable, match="file descriptors and threads"):
                    await store.get(b"k")
        async with asyncio.timeout(LIMIT_S):
            while threading.active_count() > threads:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert len(os.listdir("/proc/self/fd")) == files
        assert await store.get(b"k") is None
        await store.close()

    asyncio.run(main())
