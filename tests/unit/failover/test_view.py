"""What a group's records say to people and to clients."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from groups_lab import (
    CHAIN,
    electing,
    incarnation,
    primary,
    records,
    server,
    serving,
    simulated,
    values,
)

from domicile.core.state.txn import Change, Changes, Item
from domicile.failover.chains import HistoryStart
from domicile.failover.records import (
    GroupConfig,
    GroupPhase,
    ServerRecord,
    WriteQuorum,
    encode_group_record,
    server_key,
    state_key,
)
from domicile.failover.view import (
    GroupRecords,
    GroupView,
    LagClock,
    ServerView,
    announced,
    followers,
    group_names,
    group_view,
)
from domicile.testing.groups.group import SimGroup

SYNC = GroupConfig("postgresql", mode="sync")
PAUSED = GroupConfig("valkey", paused=True)
QUORUM = WriteQuorum("s1", ("s2", "s3"), 1)


def row(view: GroupView, name: str) -> ServerView:
    (found,) = [one for one in view.servers if one.server == name]
    return found


def test_a_serving_group_names_its_primary_its_lags_and_its_loss() -> None:
    view = group_view(
        records(values(serving(), primary(), server("s2", 1_900), server("s3", 1_950)))
    )
    assert view.served
    assert (view.primary, view.address, view.epoch) == ("s1", "127.0.0.1:7001", 3)
    assert (view.waits, view.next_step) == ("", "")
    assert view.loss == "failing over now would choose s3 and lose 50 bytes"
    assert view.loss_bytes == 50
    assert [one.lag for one in view.servers] == [0, 100, 50]
    assert [one.would_lose for one in view.servers] == [None, 100, 50]
    assert [one.state for one in view.servers] == ["accepts writes", "follows s1", "follows s1"]
    assert all(one.healthy for one in view.servers)
    assert [one.ttl_s for one in view.servers] == [3.0] * 3


def test_a_synchronous_group_loses_no_acknowledged_write() -> None:
    state = serving(quorums=(QUORUM,))
    view = group_view(records(values(state, primary(), server("s2", 1_900), config=SYNC)))
    assert view.loss == "failing over now would choose s2; no acknowledged write is lost"
    assert (row(view, "s2").lag, row(view, "s2").would_lose) == (100, 0)
    assert row(view, "s3").state == "no agent"
    assert view.quorums == ("s1 + any 1 of (s2, s3)",)


def test_a_replica_of_another_history_lags_by_all_that_it_lacks() -> None:
    other = server("s2", 1_500, chain=(*CHAIN[:2], HistoryStart(2, 1_200)))
    view = group_view(records(values(serving(), primary(), other)))
    # They part where epoch 3 began, at byte 1,000.
    assert row(view, "s2").would_lose == 1_000


@pytest.mark.parametrize(
    ("record", "state", "why"),
    [
        (server("s2", role="down"), "down", "it does not run"),
        (server("s2", fit=False, why="being replaced"), "not fit", "being replaced"),
        (server("s2", origin="x"), "foreign", "it has data that is not of this group"),
        (server("s2", follows="s9"), "follows s9", ""),
        (server("s2", role="fenced"), "follows nobody", ""),
    ],
)
def test_a_server_that_is_not_well_says_why(record: ServerRecord, state: str, why: str) -> None:
    view = group_view(records(values(serving(), primary(), record)))
    found = row(view, "s2")
    assert found.state == state
    assert found.why.startswith(why)
    assert not found.healthy
    if not record.fit or record.origin == "x":
        assert found.would_lose is None
        assert view.loss == "no other server could become primary now"


def test_a_replica_that_still_copies_does_not_count_as_a_follower() -> None:
    """FO-02: it names its primary at once, and has nothing of it before its copy is whole."""
    copying = server("s2", 900, chain=CHAIN[:2])
    known = records(values(serving(), primary(), copying, server("s3")))
    found = row(group_view(known), "s2")
    assert (found.role, found.state, found.healthy) == ("replica", "catches up with s1", True)
    assert [one.server for one in followers(known)] == ["s3"]
    assert row(group_view(known), "s3").state == "follows s1"


def test_commits_that_wait_for_a_copy_are_told() -> None:
    """The primary accepts writes, and nobody who commits gets an answer."""
    state = serving(quorums=(QUORUM,))
    copying = server("s2", 900, chain=CHAIN[:2])
    unfit = server("s3", fit=False, why="its data is being replaced")
    view = group_view(records(values(state, primary(), copying, unfit, config=SYNC)))
    assert (view.served, view.next_step) == (True, "")
    assert view.waits == "commits wait: sync_count is 1, and 0 servers follow the primary yet"
    view = group_view(records(values(state, primary(), copying, server("s3"), config=SYNC)))
    assert view.waits == ""


def test_a_primary_that_is_being_opened_is_announced_and_does_not_serve_yet() -> None:
    known = records(values(serving(), server("s1", role="fenced"), server("s2")))
    found, view = announced(known), group_view(known)
    assert found is not None
    assert found.server == "s1"
    assert not view.served
    assert view.waits == "s1 refuses writes"


def test_nobody_is_announced_while_a_change_is_under_way() -> None:
    members = (primary(), server("s2"))
    switching = msgspec.structs.replace(
        serving(), phase=GroupPhase.SWITCHING, candidate=incarnation("s2"), candidate_server="s2"
    )
    chosen = msgspec.structs.replace(switching, phase=GroupPhase.CHOSEN, epoch=4)
    for state, waits in (
        (switching, "s2 gets everything that s1 has; after 10 s s1 serves on"),
        (chosen, "s2 becomes primary"),
        (electing(), "live members have not published their final positions yet (s1, s2)"),
        (None, "an agent founds the group"),
    ):
        known = records(values(state, *members))
        assert announced(known) is None
        assert followers(known) == []
        view = group_view(known)
        assert (view.primary, view.served) == (None, False)
        assert view.waits.startswith(waits)
    assert announced(records(values(serving(), server("s2")))) is None


def test_followers_are_fit_replicas_of_the_announced_primary() -> None:
    known = records(
        values(
            serving(), primary(), server("s4"), server("s2"), server("s3", follows="s9"),
            server("s5", fit=False), server("s6", role="fenced"), server("s7", origin="x"),
        )
    )  # fmt: skip
    assert [one.server for one in followers(known)] == ["s2", "s4"]


@pytest.mark.parametrize(
    ("found", "waits", "step", "forcible"),
    [
        (
            values(
                electing(quorums=(QUORUM,)), server("s2", role="fenced", final=4), config=SYNC
            ),
            "too few members of a write quorum",
            "domicile replica failover orders --force",
            True,
        ),
        (
            values(electing(), server("s2", 900, chain=CHAIN[:2], role="fenced", final=4)),
            "no live member has an entry of the last served epoch",
            "domicile replica failover orders --force",
            True,
        ),
        (
            values(electing(), server("s2", role="fenced", final=4, fit=False, why="broken")),
            "no live member is fit to become primary (s2: broken)",
            "repair those that are not fit",
            False,
        ),
        (
            values(electing(orchestrator="s9"), server("s2")),
            "another agent goes on with the election",
            "",
            False,
        ),
        (values(serving()), "no agent is registered", "domicile replica run", False),
        (values(serving(), server("s2")), "the agent of s1 is gone; an election begins", "", False),
        (
            values(serving(), server("s2"), config=PAUSED),
            "the agent of s1 is gone, and the group is paused",
            "domicile replica resume orders",
            False,
        ),
        (
            values(serving(), server("s1", role="down"), server("s2"), config=PAUSED),
            "s1 refuses writes; the group is paused",
            "domicile replica resume orders",
            False,
        ),
    ],
)  # fmt: skip
def test_a_group_that_waits_says_for_what_and_the_next_step(
    found: dict[bytes, bytes], waits: str, step: str, forcible: bool
) -> None:
    view = group_view(records(found))
    assert view.waits.startswith(waits)
    assert step in view.next_step
    assert bool(step) == bool(view.next_step)
    assert view.forcible is forcible
    assert not view.served


def test_what_a_later_version_wrote_is_told_and_hides_nothing_else() -> None:
    found = values(serving(), primary(), server("s2"))
    found[server_key("orders", "s3", incarnation("s3"))] = b'{"format": 9}'
    view = group_view(records(found))
    assert view.served
    assert row(view, "s3").state == "not fit"
    assert "later version" in row(view, "s3").why
    found[state_key("orders")] = b'{"format": 9}'
    view = group_view(records(found))
    assert not view.served
    assert view.waits == "its records cannot be read here"
    assert "later version" in view.unreadable[0]


def test_records_are_kept_up_by_changes() -> None:
    known = records(values(serving(), primary(), server("s2")))
    key = server_key("orders", "s2", incarnation("s2"))
    moved = encode_group_record(server("s2", 2_500))
    known.apply(Changes(8, (Change(key, Item(key, moved, 1, 8)),)))
    assert known.members[incarnation("s2")].offset == 2_500
    known.apply(Changes(9, (Change(key, None),)))
    assert list(known.members) == [incarnation("s1")]
    known.apply(Changes(10, (Change(state_key("orders"), None),)))
    assert (known.state, known.state_revision, known.revision) == (None, 0, 10)


def test_groups_are_named_whatever_is_in_their_names() -> None:
    found = {**values(serving(), group="a/b c"), **values(serving(), group="orders")}
    items = [Item(key, value, 1, 1) for key, value in found.items()]
    assert group_names([*items, Item(b"node/x", b"", 1, 1)]) == ["a/b c", "orders"]
    known = GroupRecords("a/b c")
    assert not known.known


def test_lag_in_seconds_is_since_the_primary_had_more() -> None:
    clock = LagClock()
    assert clock.behind_s(0, 0.0) is None
    for at, offset in ((0.0, 2_000), (1.0, 2_100), (2.0, 2_100), (3.0, 2_300)):
        clock.note(records(values(serving(), primary(offset=offset))), at)
    assert clock.behind_s(2_300, 4.0) == 0.0
    assert clock.behind_s(2_100, 4.0) == 1.0
    assert clock.behind_s(2_050, 4.0) == 3.0
    assert clock.behind_s(1_999, 4.0) is None
    clock.note(records(values(serving(epoch=4), primary(offset=10))), 5.0)
    assert clock.behind_s(5, 6.0) is None


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_simulated_group_that_lost_its_primary_is_shown_whole_again(mode: str) -> None:
    async def scenario(group: SimGroup) -> None:
        writer = asyncio.get_running_loop().create_task(
            group.keep_writing("a", group.world.now + 12.0)
        )
        await asyncio.sleep(2.0)
        group.lose_machine(group.machines[0], 5.0)
        await asyncio.sleep(14.0)
        await writer

    found = simulated(scenario, GroupConfig("sim", mode=mode))  # type: ignore[arg-type]
    view = group_view(records(found, "g"))
    assert view.served
    assert view.epoch >= 2
    assert view.waits == ""
    assert [one.healthy for one in view.servers] == [True] * 3
    assert [one.role for one in view.servers].count("replica") == 2
    assert view.loss_bytes == 0
    # What `history` shows: each primary wrote down when and why it became one.
    past = sorted(records(found, "g").past.values(), key=lambda one: one.epoch)
    assert (past[0].epoch, past[0].why) == (1, "the group begins")
    assert (past[-1].epoch, past[-1].server) == (view.epoch, view.primary)
    assert all(one.at and one.by == one.server for one in past)
    assert past[-1].begin > past[0].begin
