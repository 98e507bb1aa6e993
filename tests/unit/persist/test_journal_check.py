"""Does a journal fit what the store knows of it? Joining, claiming, leaving."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine, Mapping
from typing import Any

import pytest
from failing_journal import FailingJournal

from domicile.core.ids import ShardKey
from domicile.core.state.agreement import agreed_config
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.keys import CONFIG_KEY, OffsetMark, encode_offset, offset_key
from domicile.core.state.records import ConfigRecord, encode_record
from domicile.core.state.txn import Item, Listing
from domicile.entity.hosting.execution import OutcomeUnknown
from domicile.errors import ConfigError
from domicile.journals.memory import MemoryJournal
from domicile.persist.journal_check import JournalCheck, check_of, compare_on_join
from domicile.ports.journal import ComparableJournal, JournalMarks, JournalUnknown, TellsOffsets
from domicile.testing.suites.journal import ENTITY, OLD, SHARD, batch, write
from proving.bank.probe import ProbedJournal

OTHER = ShardKey("other", 1)
MINE, YOURS = "a" * 32, "b" * 32


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(body)


def known(
    journals: Mapping[str, str], offsets: Mapping[ShardKey, OffsetMark] | None = None
) -> ClusterView:
    view = ClusterView()
    config = ConfigRecord({"default": 8}, journals=dict(journals))
    items = [Item(CONFIG_KEY, encode_record(config), 1, 1)]
    for shard, mark in (offsets or {}).items():
        items.append(Item(offset_key(shard), encode_offset(mark), 1, 1))
    view.load(Listing(1, tuple(items)))
    return view


class Desk:
    """A journal with two events in a shard, and what its check has stored."""

    def __init__(self) -> None:
        self.journal = MemoryJournal(history=MINE)
        self.journal.volatile = False
        self.stored: dict[ShardKey, OffsetMark] = {}
        check = check_of(self.journal, ["default"], self.stored.update, 1.0)
        assert check is not None
        self.check: JournalCheck = check

    async def fill(self) -> None:
        await self.journal.claim([OLD])
        await self.journal.write(batch(1, OLD, write(ENTITY, 0, b"1", b"2")))

    async def admit(self) -> None:
        [mark] = await self.check.marks([SHARD])
        self.check.admit(SHARD, mark)


def test_nothing_is_compared_without_roles_or_with_a_journal_that_ends_with_its_process() -> None:
    kept = MemoryJournal()
    kept.volatile = False
    assert check_of(kept, [], lambda marks: None, 1.0) is None
    assert check_of(MemoryJournal(), ["default"], lambda marks: None, 1.0) is None
    assert check_of(None, ["default"], lambda marks: None, 1.0) is None


def test_a_join_tells_the_history_and_refuses_an_older_journal() -> None:
    async def body() -> None:
        desk = Desk()
        await desk.fill()
        assert await desk.check.on_join(known({})) == {"default": MINE}
        same = {SHARD: OffsetMark(MINE, 2), OTHER: OffsetMark(MINE, 9)}
        assert await desk.check.on_join(known({}, same)) == {"default": MINE}
        # A note about another journal says nothing of this one; the config decides.
        foreign = {SHARD: OffsetMark(YOURS, 9)}
        assert await desk.check.on_join(known({}, foreign)) == {"default": MINE}
        with pytest.raises(ConfigError, match=r"shard default/7 ends at offset 2, and was at 3"):
            await desk.check.on_join(known({}, {SHARD: OffsetMark(MINE, 3)}))

    run(body())


def test_a_journal_in_memory_does_not_join_where_the_store_knows_another() -> None:
    async def body() -> None:
        assert await compare_on_join(None, ["default"], ClusterView()) == {}
        view = known({"default": MINE})
        assert await compare_on_join(None, [], view) == {}
        assert await compare_on_join(None, ["other"], view) == {}
        with pytest.raises(ConfigError, match="the journal of this process ends with it"):
            await compare_on_join(None, ["other", "default"], view)

    run(body())


def test_a_journal_that_does_not_answer_is_compared_at_the_first_claim() -> None:
    class Silent(MemoryJournal):
        async def marks(self, shards: object) -> JournalMarks:
            raise JournalUnknown("no")

    async def body() -> None:
        silent = Silent()
        silent.volatile = False
        check = check_of(silent, ["default"], lambda marks: None, 1.0)
        assert check is not None
        assert await check.on_join(known({"default": YOURS})) == {}
        assert await check.leave() == {}
        with pytest.raises(OutcomeUnknown, match="nothing was stored: this journal is not the one"):
            check.admit(SHARD, OffsetMark(MINE, 0))

    run(body())


def test_claims_and_stops_leave_what_is_news() -> None:
    async def body() -> None:
        desk = Desk()
        view = known({"default": MINE})
        await desk.check.on_join(view)
        await desk.admit()
        assert desk.stored == {}, "a shard without events needs no note"
        await desk.fill()
        await desk.admit()
        assert desk.stored == {SHARD: OffsetMark(MINE, 2)}
        desk.stored.clear()
        view.offsets[SHARD] = OffsetMark(MINE, 2)
        await desk.admit()
        assert (desk.stored, await desk.check.leave()) == ({}, {})
        await desk.journal.write(batch(2, OLD, write(ENTITY, 2, b"3")))
        assert await desk.check.leave() == {SHARD: OffsetMark(MINE, 3)}
        # An older or another journal leaves nothing.
        view.offsets[SHARD] = OffsetMark(MINE, 4)
        assert await desk.check.leave() == {}
        with pytest.raises(OutcomeUnknown, match="older than the store knows"):
            await desk.admit()

    run(body())


def test_roles_agree_on_their_journals_one_by_one() -> None:
    config = agreed_config(None, {"a": 4}, {}, (), {"a": MINE})
    assert config is not None
    assert config.journals == {"a": MINE}
    both = agreed_config(config, {"b": 4}, {}, (), {"b": YOURS})
    assert both is not None
    assert both.journals == {"a": MINE, "b": YOURS}
    assert agreed_config(both, {"a": 4}, {}, ()) == both, "a process without a journal"
    with pytest.raises(ConfigError, match=r"role 'b' .* Nothing was changed"):
        agreed_config(both, {"b": 4}, {}, (), {"b": MINE})


@pytest.mark.parametrize("wrapper", [FailingJournal, ProbedJournal])
@pytest.mark.parametrize("protocol", [ComparableJournal, TellsOffsets])
def test_what_stands_before_a_journal_says_by_name_that_it_can_be_compared(
    wrapper: type, protocol: type
) -> None:
    """As isinstance() asks from Python 3.12 on: without `__getattr__`."""
    calls = [name for name in dir(protocol) if not name.startswith("_")]
    assert calls
    for name in calls:
        assert callable(inspect.getattr_static(wrapper, name)), name
