"""Which roles a journal is accepted for, and what is missing in it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from domicile.core.ids import EntityKey, ShardKey
from domicile.core.state.keys import CONFIG_KEY, OffsetMark, encode_offset, offset_key
from domicile.core.state.records import ConfigRecord, encode_record
from domicile.core.state.txn import Item, Listing
from domicile.errors import ConfigError
from domicile.journals.sqlite.journal import SqliteJournal
from domicile.ops.journal.accept import Acceptance, look_at_journal
from domicile.ops.operator_commits import StoreSnapshot
from domicile.ports.journal import Batch, Claim, JournalWrite
from domicile.testing.suites.journal import A

SHARD, FAR = ShardKey("a", 1), ShardKey("b", 0)
OLD, OTHER = "0" * 32, "1" * 32


def picture(
    journals: Mapping[str, str], offsets: Mapping[ShardKey, OffsetMark] | None = None
) -> StoreSnapshot:
    config = ConfigRecord({"a": 2, "b": 2}, journals=dict(journals))
    items = [Item(CONFIG_KEY, encode_record(config), 1, 1)]
    for shard, mark in (offsets or {}).items():
        items.append(Item(offset_key(shard), encode_offset(mark), 1, 1))
    return StoreSnapshot(Listing(1, tuple(items)))


def looked(path: Path, seen: StoreSnapshot, *roles: str, history: str = "") -> Acceptance:
    async def looking() -> Acceptance:
        journal = SqliteJournal(path / "j", "c")
        claim = Claim(SHARD, 0, 1, A)
        await journal.claim([claim])
        write = JournalWrite(SHARD, EntityKey("t", "i"), 0, (b"1", b"2"))
        await journal.write(Batch(1, (claim,), (write,)))
        if history:
            await journal.renew(history)
        try:
            return await look_at_journal(seen, journal, roles)
        finally:
            await journal.close()

    return asyncio.run(looking())


def test_what_is_missing_is_counted_against_the_journal_that_the_store_knows(
    tmp_path: Path,
) -> None:
    offsets = {
        SHARD: OffsetMark(OLD, 5),
        ShardKey("a", 0): OffsetMark(OTHER, 9),
        FAR: OffsetMark(OLD, 7),
    }
    found = looked(tmp_path, picture({"a": OLD}, offsets))
    assert (found.roles, found.missing, found.is_needed) == (("a",), {SHARD: 3}, True)
    whole = looked(tmp_path, picture({"a": OLD}, {SHARD: OffsetMark(OLD, 2)}), history=OLD)
    assert (whole.missing, whole.is_needed) == ({}, False)
    older = looked(tmp_path, picture({"a": OLD}, {SHARD: OffsetMark(OLD, 3)}), history=OLD)
    assert (older.missing, older.is_needed) == ({SHARD: 1}, True)


def test_roles_with_different_journals_are_named(tmp_path: Path) -> None:
    two = picture({"a": OLD, "b": OTHER})
    with pytest.raises(ConfigError, match=r"different journals: a .* Say with --role"):
        looked(tmp_path, two)
    assert looked(tmp_path, two, "b").roles == ("b",)
    with pytest.raises(ConfigError, match="role 'b' keeps its events in this journal, too"):
        looked(tmp_path, two, "a", history=OTHER)
    with pytest.raises(ConfigError, match="known ones: a, b"):
        looked(tmp_path, two, "c")
    assert looked(tmp_path, picture({})).roles == ("a", "b")
    with pytest.raises(LookupError, match="takes any journal"):
        looked(tmp_path, StoreSnapshot(Listing(1, ())))
