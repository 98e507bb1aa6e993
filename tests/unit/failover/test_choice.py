"""Who becomes primary: positions, ties, quorums, foreign data (F7, F8)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from domicile.core.ids import Incarnation
from domicile.failover.chains import (
    ORIGIN,
    Chain,
    HistoryStart,
    Position,
    common_offset,
    next_chain,
    own_chain,
    position_of,
)
from domicile.failover.choice import Choice, NoChoice, Obstacle, choose, loss_ahead
from domicile.failover.records import (
    FORMAT,
    FormatTooNew,
    GroupConfig,
    GroupPhase,
    GroupState,
    LossReceipt,
    Ranked,
    ServerRecord,
    WriteQuorum,
    decode_group_record,
    encode_group_record,
    group_prefix,
    parse_server_key,
    server_key,
)

ASYNC, SYNC = GroupConfig("sim"), GroupConfig("sim", mode="sync")


def through(*starts: tuple[int, int]) -> Chain:
    return (*ORIGIN, *(HistoryStart(epoch, begin) for epoch, begin in starts))


E1 = through((1, 0))
E2 = through((1, 0), (2, 50))


def member(server: str, offset: int, chain: Chain = E1, **more: Any) -> ServerRecord:
    fields = {"origin": "g", "final": 2, **more}
    return ServerRecord(
        server=server, incarnation=Incarnation(f"i-{server}"), address=server, ttl_s=3.0,
        chain=chain, offset=offset, **fields,
    )  # fmt: skip


def electing(epoch: int = 2, served: int = 1, **more: Any) -> GroupState:
    return GroupState(
        phase=GroupPhase.ELECTING, epoch=epoch, origin="g", served=served, chain=E1, **more
    )


def chosen(state: GroupState, config: GroupConfig, *members: ServerRecord) -> str:
    found = choose(state, config, {one.incarnation: one for one in members}, patient=False)
    return found.server if isinstance(found, Choice) else found.obstacle.name


def test_positions_compare_by_the_epoch_of_the_last_entry_first() -> None:
    assert position_of(E2, 60) == Position(2, 60)
    assert position_of(E2, 50) == Position(1, 50), "it has no entry of epoch 2 yet"
    assert position_of(E1, 90) < position_of(E2, 51)
    assert own_chain(E2, 0) == ORIGIN
    assert position_of((), 0) == Position(0, 0)


def test_common_offset_is_where_chains_part() -> None:
    assert common_offset(E1, 70, E2) == 50
    assert common_offset(E2, 40, E1) == 40
    assert common_offset(E2, 60, E2) == 60
    assert common_offset(through((3, 0)), 9, E1) == 0
    assert common_offset((), 9, E1) == 0
    assert next_chain(E2, 50, 3) == through((1, 0), (3, 50)), "epoch 2 left no entry"


def test_the_most_advanced_wins_and_the_lowest_id_breaks_ties() -> None:
    assert chosen(electing(), ASYNC, member("a", 5), member("b", 9), member("c", 7)) == "b"
    assert chosen(electing(), ASYNC, member("c", 9), member("b", 9)) == "b"


def test_an_older_history_never_wins_by_its_offset() -> None:
    state = electing(epoch=3, served=2)
    long, short = member("a", 900, final=3), member("b", 51, E2, final=3)
    assert chosen(state, ASYNC, long, short) == "b"


def test_what_does_not_count() -> None:
    good = member("c", 5)
    assert chosen(electing(), ASYNC, good, member("a", 9, final=1)) == "c", "not final"
    assert chosen(electing(), ASYNC, good, member("a", 9, fit=False)) == "c"
    assert chosen(electing(), ASYNC, good, member("a", 9, origin="other")) == "c"
    ahead = member("a", 60, through((1, 0), (7, 50)))
    assert chosen(electing(), ASYNC, good, ahead) == "c", "this state never chose epoch 7"
    assert chosen(electing(), ASYNC) == "NOBODY"


def test_an_epoch_that_was_chosen_but_not_served_is_no_foreign_one() -> None:
    state = electing(epoch=3, served=1)
    assert chosen(state, ASYNC, member("a", 51, E2, final=3), member("b", 50, final=3)) == "a"


def test_live_members_are_waited_for_while_there_is_patience() -> None:
    members = {one.incarnation: one for one in (member("a", 5), member("b", 9, final=0))}
    found = choose(electing(), ASYNC, members, patient=True)
    assert isinstance(found, NoChoice)
    assert str(found) == f"{Obstacle.FREEZING.value} (b)"
    assert chosen(electing(), ASYNC, *members.values()) == "a"


def test_a_server_that_is_down_is_not_waited_for_where_the_quorums_are_read() -> None:
    """F7: what it has beyond, nobody was told of. In asynchronous mode it may have been."""
    state = electing(quorums=(WriteQuorum("p", ("a", "b")),))
    down = member("p", 9, final=0, fit=False, role="down")
    enough = (member("a", 5), member("b", 5))

    def waits(state: GroupState, config: GroupConfig, *members: ServerRecord) -> bool:
        found = choose(state, config, {one.incarnation: one for one in members}, patient=True)
        assert isinstance(found, Choice) or found.obstacle is Obstacle.FREEZING
        return isinstance(found, NoChoice)

    assert not waits(state, SYNC, down, *enough)
    assert waits(state, SYNC, down, enough[0]), "b may have what a has not"
    assert waits(state, SYNC, member("p", 9, final=0, role="fenced"), *enough), "it is not down"
    assert waits(electing(), ASYNC, down, *enough)
    first = GroupState(phase=GroupPhase.ELECTING, epoch=2, origin="g")
    assert waits(first, SYNC, down, *enough), "before the group, any of them may have the data"


def test_a_synchronous_election_reads_enough_of_every_quorum() -> None:
    both = electing(quorums=(WriteQuorum("p", ("a", "b")), WriteQuorum("a", ("c",))))
    assert chosen(both, SYNC, member("a", 5)) == "QUORUM", "b may have what a has not"
    assert chosen(both, SYNC, member("a", 5), member("b", 6)) == "b"
    assert chosen(both, SYNC, member("p", 5), member("c", 5)) == "c"


def test_a_primary_that_failed_and_came_back_is_a_candidate_like_any_other() -> None:
    """F8: it may be the only one that holds everything."""
    state = electing(primary_server="p", quorums=(WriteQuorum("p", ("a", "b")),))
    assert chosen(state, SYNC, member("p", 9), member("a", 5)) == "p"


def test_a_server_that_cannot_be_chosen_does_not_count_as_read() -> None:
    """Otherwise its greater position would be left behind in favour of a lesser one."""
    state = electing(quorums=(WriteQuorum("p", ("a", "b")),))
    assert chosen(state, SYNC, member("a", 5), member("b", 9, fit=False)) == "QUORUM"


def test_a_forced_election_states_its_loss() -> None:
    state = electing(quorums=(WriteQuorum("p", ("a", "b")),), force=True)
    members = {one.incarnation: one for one in (member("a", 5),)}
    found = choose(state, SYNC, members, patient=False)
    assert isinstance(found, Choice)
    assert found.loss == "p + any 1 of (a, b): needs p, or 1 more of its members"


def test_an_old_primary_alone_does_not_drop_everything_since() -> None:
    state = electing(epoch=3, served=2)
    assert chosen(state, ASYNC, member("a", 90, final=3)) == "LAST_EPOCH"
    forced = msgspec.structs.replace(state, force=True)
    assert chosen(forced, ASYNC, member("a", 90, final=3)) == "a"


def test_the_first_election_refuses_to_choose_between_different_data() -> None:
    first = GroupState(phase=GroupPhase.ELECTING, epoch=1, origin="g")
    a = member("a", 5, ORIGIN, origin="x", final=1)
    b = member("b", 9, ORIGIN, origin="y", final=1)
    new = member("c", 0, ORIGIN, origin="", final=1)
    assert chosen(first, ASYNC, a, b) == "ORIGINS"
    assert chosen(first, ASYNC, a, new) == "a"
    assert chosen(first, ASYNC, new) == "c"


def test_what_a_failover_would_lose_is_known_before() -> None:
    serving = GroupState(
        phase=GroupPhase.SERVING, epoch=1, origin="g", served=1, primary=Incarnation("i-p"),
        primary_server="p", chain=E1,
    )  # fmt: skip
    members = {one.incarnation: one for one in (member("p", 100), member("a", 90), member("b", 70))}
    ahead = loss_ahead(serving, ASYNC, members)
    assert (ahead.server, ahead.offset, ahead.excluded) == ("a", 10, False)
    assert loss_ahead(serving, SYNC, members).excluded
    assert loss_ahead(serving, ASYNC, {}).server == ""


@pytest.mark.parametrize(
    "record",
    [
        ASYNC,
        member("a/b", 5, E2),
        electing(quorums=(WriteQuorum("p", ("a",)),), chosen=Ranked("a", 1, 5)),
        LossReceipt(server="a", epoch=2, chain=E2, kept=5, had=9),
    ],
)
def test_records_come_back_and_later_formats_are_refused(record: Any) -> None:
    kind = type(record)
    stored = encode_group_record(record)
    assert decode_group_record(stored, kind) == record
    fields = msgspec.json.decode(stored)
    later = msgspec.json.encode({**fields, "format": FORMAT + 1})
    with pytest.raises(FormatTooNew, match="later version"):
        decode_group_record(later, kind)
    with pytest.raises(FormatTooNew):
        decode_group_record(msgspec.json.encode({"format": FORMAT + 1, "phase": 5}), kind)
    with pytest.raises(msgspec.ValidationError):
        decode_group_record(b'{"phase": 5}', kind if kind is GroupState else GroupState)


def test_keys_of_members_name_server_and_agent() -> None:
    me = Incarnation("i" * 32)
    key = server_key("or/ders", "a/b", me)
    assert key.startswith(group_prefix("or/ders"))
    assert parse_server_key("or/ders", key) == ("a/b", me)
    for other in (b"", b"group/or%2Fders/state", key + b"/x", key.replace(b"%2F", b"%2f")):
        with pytest.raises(ValueError, match=r"values to unpack|is not the key"):
            parse_server_key("or/ders", other)
