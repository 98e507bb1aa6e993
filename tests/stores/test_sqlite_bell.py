"""Who is woken by a write: watches hear of commits at once, and of renewals not at all (I8)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from domicile.core.txn import Put
from domicile.stores.sqlite import SqliteStore
from domicile.stores.sqlite_jobs import Reader

RENEWALS = 60


def test_renewals_wake_no_other_process_and_commits_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    look = Reader._look

    def counted(self: Reader, *args: object) -> object:
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
            for _ in range(RENEWALS):
                await writing.renew("lease")
                await asyncio.sleep(0.01)
            assert looks < RENEWALS / 4, "but for a look now and then"
            assert not told.done()
            await writing.commit((), (Put(b"k", b"1"),))
            assert [one.key for one in (await told).changes] == [b"k"]
        finally:
            await watching.close()
            await writing.close()

    monkeypatch.setattr(Reader, "_look", counted)
    asyncio.run(scenario())
