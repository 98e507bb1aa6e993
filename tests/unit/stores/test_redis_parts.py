"""The parts of the store on Redis that need no server: addresses, ticks, the tail of the log."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile import ConfigError, EventSourced, Node
from domicile.backends.registry import shown_url, store_backend
from domicile.core.state.txn import Change, Changes, Item
from domicile.settings import MAX_TICK_S
from domicile.stores.redis.calls import WRITES, LogEntry, bounds, entry_of
from domicile.stores.redis.server import RedisAddress, RedisFacts
from domicile.stores.redis.store import LogTail
from domicile.stores.redis.ticks import STALE_S, TICK_S, TickPace


def parsed(url: str) -> RedisAddress:
    return RedisAddress.parse(url, shown_url(url))


def test_a_url_names_server_database_user_and_prefix() -> None:
    assert parsed("redis://here").port == 6379
    whole = parsed("rediss://me:p%40ss@here:7000/3?prefix=shop&ca=/ca.pem")
    assert (whole.host, whole.port, whole.db, whole.user, whole.password, whole.tls) == (
        "here", 7000, 3, "me", "p@ss", True,
    )  # fmt: skip
    assert whole.ca == "/ca.pem"
    assert whole.keys[0] == "{shop}:meta"
    assert "p@ss" not in repr(whole)
    assert "p%40ss" not in repr(whole)
    local = parsed("redis://:p@/run/valkey.sock?db=2")
    assert (local.path, local.db, local.password) == ("/run/valkey.sock", 2, "p")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://", "names no server; write redis://host:6379/0"),
        ("redis:///", "names no server"),
        ("redis://here/first", "names no server"),
        ("redis://here:x/0", "can't be read"),
        ("redis://here?timeout=3", "unknown option 'timeout'; known are prefix"),
        ("redis://here?prefix=a{b}", "without braces"),
    ],
)
def test_a_wrong_url_is_told_the_form(url: str, words: str) -> None:
    with pytest.raises(ConfigError) as told:
        store_backend(url)
    assert words in str(told.value)


def test_a_password_is_in_no_error() -> None:
    for url in ("redis://me:secret@", "redis://me:secret@here?x=1", "rediss://me:secret@here:y"):
        with pytest.raises(ConfigError) as told:
            store_backend(url)
        assert "secret" not in str(told.value)


class Till(EventSourced[int, int], name="redis.till"):
    """Keeps events."""

    @staticmethod
    def initial(id: str, /) -> int:
        return 0

    @staticmethod
    def apply(state: int, event: int, /) -> int:
        return state + event


def test_durable_entities_need_a_journal_of_their_own() -> None:
    with pytest.raises(ConfigError, match='journal="sqlite') as told:
        Node("redis://me:secret@here", entities=[Till])
    assert "secret" not in str(told.value)
    Node("redis://here", entities=[Till], journal="memory://")


# store time


def test_one_of_many_processes_ticks() -> None:
    """S4: whoever finds store time stale ticks; after a while only one or two do."""
    dice = random.Random(1)
    paces = [TickPace(random.Random(n)) for n in range(20)]
    for pace in paces:
        pace.saw(1.5)
    now, last = 0.0, 0.0
    due = {n: dice.random() * TICK_S for n in range(len(paces))}
    for _ in range(2_000):
        n = min(due, key=due.__getitem__)
        now = due[n]
        paces[n].ticked(now - last)
        assert now - last <= STALE_S or len(due) == 1
        last = now
        if paces[n].ticks:
            due[n] = now + paces[n].wait_s()
        else:
            del due[n]
        if not due:
            break
    assert 1 <= len(due) <= 2


def test_a_lone_process_goes_on_ticking() -> None:
    pace = TickPace(random.Random(1))
    pace.saw(0.1)
    assert not pace.ticks
    pace.saw(STALE_S + 0.01)
    for _ in range(1_000):
        assert pace.ticks
        pace.ticked(pace.wait_s())


def test_the_script_and_the_settings_agree_on_a_tick() -> None:
    assert (
        f"MAX_TICK_US, KEPT_TAGS, TRIMMED_AT_ONCE, MANY = {round(MAX_TICK_S * 1e6)}," in WRITES.text
    )
    assert TICK_S < MAX_TICK_S


# the log


def entry(revision: int, *keys: bytes, before: str | None = None, size: int = 10) -> LogEntry:
    changes = tuple(Change(key, Item(key, b"", revision, revision)) for key in keys)
    earlier = f"t{revision - 1}" if before is None else before
    return LogEntry(Changes(revision, changes), earlier, f"t{revision}", 0.0, "", False, size)


def test_a_tail_takes_only_the_next_commit_of_its_history() -> None:
    tail = LogTail()
    tail.begin(7, "t7")
    assert not tail.add(entry(9, b"k"))
    assert not tail.add(entry(8, b"k", before="another"))
    assert tail.add(entry(8, b"k"))
    assert tail.upto == 8
    assert tail.after(b"", 6) is None
    assert tail.after(b"", 9) is None
    found = tail.after(b"", 7)
    assert found is not None
    assert [changes.revision for changes in found.changes] == [8]


@given(st.lists(st.sampled_from([b"a", b"b/1", b"b/2"]), max_size=40), st.integers(0, 40))
def test_a_tail_finds_what_a_whole_log_has(keys: list[bytes], seen: int) -> None:
    tail = LogTail()
    tail.begin(0, "t0")
    for revision, key in enumerate(keys, 1):
        assert tail.add(entry(revision, key))
    found = tail.after(b"b/", seen)
    if seen > len(keys):
        assert found is None
        return
    assert found is not None
    expected = [n for n, key in enumerate(keys, 1) if n > seen and key.startswith(b"b/")]
    assert [changes.revision for changes in found.changes] == expected


def test_a_tail_has_a_limit_in_bytes() -> None:
    tail = LogTail()
    tail.begin(0, "t0")
    for revision in range(1, 20):
        assert tail.add(entry(revision, b"k", size=1024 * 1024))
    assert tail.after(b"", 10) is None
    assert tail.after(b"", 15) is not None


def test_an_entry_may_have_any_bytes() -> None:
    key, value = bytes(range(256)), b"1:1 2:- " + bytes(range(256))
    item = b"3 9 5 5:x:y" + value
    blob = b"%d:%s%d:%s" % (len(key), key, len(item), item) + b"1:k0:"
    fields = [
        b"p",
        b"aa",
        b"t",
        b"bb",
        b"a",
        b"1500000",
        b"b",
        b"9",
        b"w",
        b"2",
        b"e",
        b"1",
        b"o",
        b"n",
        b"c",
        blob,
    ]
    found = entry_of(b"9-0", fields)
    assert found.changes == Changes(9, (Change(key, Item(key, value, 3, 9)), Change(b"k", None)))
    assert (found.before, found.tag, found.at_s, found.by, found.expiry) == (
        "aa",
        "bb",
        1.5,
        "n",
        True,
    )


def test_the_bounds_of_a_prefix() -> None:
    assert bounds(b"") == (b"[", b"+")
    assert bounds(b"n/") == (b"[n/", b"(n0")
    assert bounds(b"a\xff") == (b"[a\xff", b"(b")
    assert bounds(b"\xff") == (b"[\xff", b"+")


# what a server says about itself


@pytest.mark.parametrize(
    ("info", "appendfsync", "words"),
    [
        ({"aof_enabled": "1"}, "always", ""),
        ({"aof_enabled": "1"}, "everysec", "appendfsync everysec"),
        ({"aof_enabled": "1"}, None, "may not read"),
        ({"aof_enabled": "0"}, "always", "no append-only file"),
        ({}, None, "may not read"),
    ],
)
def test_what_can_be_lost_is_said(
    info: dict[str, str], appendfsync: str | None, words: str
) -> None:
    losses = RedisFacts(info, appendfsync).losses()
    assert len(losses) == (1 if words else 0)
    assert words in "".join(said for said, _ in losses)
