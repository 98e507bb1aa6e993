"""A watch of the SQLite store that ends tells nothing any more."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from sqlite_lab import until

from domicile.core.state.txn import Committed, Put
from domicile.errors import StoreRewound
from domicile.stores.sqlite.jobs import News
from domicile.stores.sqlite.store import SqliteStore


def test_nothing_of_an_old_history_comes_behind_the_news_of_its_end(tmp_path: Path) -> None:
    """S5: the last change and the rewind are both noticed before the reader has its turn."""

    async def scenario(store: SqliteStore) -> None:
        assert await store.commit((), [Put(b"k", b"")]) == Committed(1)
        watch = store.watch(b"", 1)
        told = asyncio.ensure_future(anext(watch))
        await until(lambda: watch._waiter is not None)
        wake = store._wake

        def wake_and_rewind(news: News) -> None:
            wake(news)
            if news.upto == 2:
                assert watch._found, "the change is found"
                store._rewound(store._generation, StoreRewound("as the test wants it"))

        store._wake = wake_and_rewind
        await store.commit((), [Put(b"k", b"of the old history")])
        with pytest.raises(StoreRewound):
            await told
        for _ in range(2):
            with pytest.raises(StoreRewound):
                await anext(watch)

    async def main() -> None:
        store = SqliteStore(tmp_path / "s.db", by="n1")
        try:
            async with asyncio.timeout(30):
                await scenario(store)
        finally:
            await store.close()

    asyncio.run(main())
