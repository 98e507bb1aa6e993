"""The files beside the store belong to it: without them histories would part."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from domicile.core.ids import Incarnation
from domicile.core.state.txn import Committed, Put
from domicile.errors import StoreError, StoreRewound
from domicile.ports.health import Verdict
from domicile.stores.file_locks import FileLocks
from domicile.stores.sqlite.store import SqliteStore


@pytest.mark.parametrize("ends", [("-wal", "-shm"), ("-wal",), ("-shm",)])
def test_a_deleted_wal_file_is_a_rewind(tmp_path: Path, ends: tuple[str, ...]) -> None:
    async def main() -> None:
        store = SqliteStore(tmp_path / "store.db", by="test")
        try:
            assert isinstance(await store.commit((), (Put(b"a", b"1"),)), Committed)
            await store.get(b"a")
            for end in ends:
                (tmp_path / f"store.db{end}").unlink()
            with pytest.raises(StoreRewound):
                await store.commit((), (Put(b"a", b"2"),))
            async with asyncio.timeout(10):
                while True:  # it comes back by itself
                    try:
                        outcome = await store.commit((), (Put(b"b", b"3"),))
                    except StoreError:
                        await asyncio.sleep(0.01)
                        continue
                    assert isinstance(outcome, Committed)
                    break
        finally:
            await store.close()

    asyncio.run(main())


def test_what_is_wrong_with_a_file_that_was_sound_may_pass(tmp_path: Path) -> None:
    path = tmp_path / "store.db"

    async def main() -> None:
        store = SqliteStore(path, by="test")
        try:
            await store.commit((), (Put(b"a", b"1"),))
            await store.get(b"a")
            for end in ("", "-wal", "-shm"):
                (tmp_path / f"store.db{end}").unlink()
            path.mkdir()
            for _ in range(3):
                with pytest.raises(StoreError):
                    await store.commit((), (Put(b"a", b"2"),))
            path.rmdir()
            assert isinstance(await store.commit((), (Put(b"a", b"3"),)), Committed)
        finally:
            await store.close()

    asyncio.run(main())


@pytest.mark.parametrize("goes", ["before it is used", "while it is used"])
def test_a_process_that_changes_its_directory_keeps_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes: str
) -> None:
    """I1: by a relative path it would find no file there, make one, and be alone in it."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()

    async def main() -> None:
        monkeypatch.chdir(here)
        store, locks = SqliteStore(Path("store.db"), by="test"), FileLocks(Path("store.db.d"))
        try:
            if goes == "while it is used":
                await store.commit((), (Put(b"a", b"1"),))
                locks.hold(Incarnation("a" * 32))
            monkeypatch.chdir(there)
            assert isinstance(await store.commit((), (Put(b"b", b"2"),)), Committed)
            assert len((await store.list(b"")).items) == (2 if goes == "while it is used" else 1)
            locks.hold(Incarnation("b" * 32))
            assert FileLocks(here / "store.db.d").verdict(Incarnation("b" * 32)) is Verdict.ALIVE
        finally:
            for one in ("a", "b"):
                locks.let_go(Incarnation(one * 32))
            await store.close()
        assert not list(there.iterdir())

    asyncio.run(main())
