"""The machine that every agent runs: what it commits, and what it makes of its server (F1-F13)."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import msgspec
import pytest

from domicile.core.coordinator.events import Changed, Commit, CommitDone, Listed, ReadBack, Tick
from domicile.core.ids import Incarnation
from domicile.core.lease.lease import Lease
from domicile.core.machines import Arm
from domicile.core.state.txn import (
    Absent,
    At,
    Change,
    Changes,
    Committed,
    Conflict,
    Item,
    Listing,
    Put,
    Unknown,
)
from domicile.failover.chains import ORIGIN, Chain, HistoryStart
from domicile.failover.machine import (
    GroupMachine,
    PublishRecord,
    ServerSeen,
    Want,
    forced,
    switching,
)
from domicile.failover.records import (
    GroupConfig,
    GroupPhase,
    GroupState,
    Ranked,
    ServerRecord,
    WriteQuorum,
    config_key,
    decode_group_record,
    encode_group_record,
    server_key,
    state_key,
)
from domicile.failover.sync_set import InUse
from domicile.failover.tables import (
    GROUP_TRANSITIONS,
    WISHES,
    GroupAction,
    GroupEvent,
    Place,
    ServerWish,
    transition,
)

STATE, CONFIG = state_key("g"), config_key("g")
A, B, C = (Incarnation(f"i-{server}") for server in "abc")
CHAIN: Chain = (*ORIGIN, HistoryStart(1, 0))
SERVING = GroupState(
    phase=GroupPhase.SERVING, epoch=1, origin="g", served=1, primary=A, primary_server="a",
    run="a-run", chain=CHAIN, native="a-1",
)  # fmt: skip


def record(server: str, **fields: Any) -> ServerRecord:
    known = {"origin": "g", "chain": CHAIN, "offset": 10, **fields}
    return ServerRecord(
        server=server, incarnation=Incarnation(f"i-{server}"), address=f"{server}:1", ttl_s=3.0,
        **known,
    )  # fmt: skip


class Lab:
    """One agent's machine and the store that it sees."""

    def __init__(
        self, server: str, state: GroupState | None, config: GroupConfig | None = None
    ) -> None:
        self.lease = Lease(0.6, 0.3)
        self.lease.granted(0.0, 1000.0, 0.0)
        self.server, self.me = server, Incarnation(f"i-{server}")
        self.machine = GroupMachine(
            "g", server, self.me, address=f"{server}:1", ttl_s=3.0, lease=self.lease
        )
        self.revision = 10
        self.now = 1.0
        self.effects: list[Any] = []
        self.seen = ServerSeen(
            up=True, run=f"{server}-run", offset=10, chain=CHAIN, native="a-1", origin="g"
        )
        items = [self.item(CONFIG, GroupConfig("sim") if config is None else config)]
        items += [self.item(server_key("g", one, Incarnation(f"i-{one}")), record(one))
                  for one in "abc"]  # fmt: skip
        if state is not None:
            items.append(self.item(STATE, state))
        self.step(Listed(Listing(self.revision, tuple(items))))

    def item(self, key: bytes, value: Any) -> Item:
        self.revision += 1
        return Item(key, encode_group_record(value), 1, self.revision)

    def step(self, event: Any) -> list[Any]:
        new = list(self.machine.step(event, self.now))
        self.effects += new
        return new

    def change(self, key: bytes, value: Any) -> list[Any]:
        item = None if value is None else self.item(key, value)
        return self.step(Changed(Changes(self.revision, (Change(key, item),))))

    def gone(self, server: str) -> list[Any]:
        return self.change(server_key("g", server, Incarnation(f"i-{server}")), None)

    def look(self, **fields: Any) -> list[Any]:
        """The agent looks, having carried out what was wanted."""
        done = 0 if self.machine.want is None else self.machine.want.number
        self.seen = replace(self.seen, **{"done": done, **fields})
        return self.step(self.seen)

    @property
    def wish(self) -> ServerWish:
        assert self.machine.want is not None
        return self.machine.want.wish

    def committed(self) -> GroupState:
        """The state of the last commit that was issued."""
        commit = [one for one in self.effects if isinstance(one, Commit)][-1]
        (put,) = commit.writes
        assert isinstance(put, Put)
        return decode_group_record(put.value, GroupState)

    def answer(self, outcome: Any) -> list[Any]:
        commit = [one for one in self.effects if isinstance(one, Commit)][-1]
        return self.step(CommitDone(commit.txn, outcome))


def commits(effects: list[Any]) -> list[Commit]:
    return [one for one in effects if isinstance(one, Commit)]


def test_every_pair_has_a_wish_and_only_named_pairs_change_the_state() -> None:
    assert sorted(WISHES, key=str) == sorted(product(GroupPhase, Place), key=str)
    for phase, event in product(GroupPhase, GroupEvent):
        row = transition(phase, event)
        if (phase, event) not in GROUP_TRANSITIONS:
            assert row == ((phase,), "F13", GroupAction.NOTHING)
    assert all(event in [key[1] for key in GROUP_TRANSITIONS] for event in GroupEvent)


def test_only_the_one_that_serves_is_opened() -> None:
    opened = [key for key, wished in WISHES.items() if wished.wish is ServerWish.OPEN]
    assert opened == [(GroupPhase.SERVING, Place.PRIMARY)]


def test_the_first_agent_founds_the_group() -> None:
    lab = Lab("a", None)
    (commit,) = commits(lab.effects)
    assert commit.conditions == (Absent(STATE),)
    state = lab.committed()
    assert (state.phase, state.epoch, state.orchestrator) == (GroupPhase.ELECTING, 1, A)
    assert lab.wish is ServerWish.CLOSED


def test_it_does_nothing_before_its_own_record_is_in_what_it_sees() -> None:
    lab = Lab("a", SERVING)
    assert lab.gone("a") == []
    assert lab.look() == []


def test_it_does_nothing_without_a_valid_lease() -> None:
    lab = Lab("b", SERVING)
    lab.lease.refused(lab.now, "gone")
    assert lab.gone("a") == []


def test_a_primary_that_is_gone_is_replaced_and_its_followers_stand_still() -> None:
    lab = Lab("b", SERVING)
    lab.look()
    assert lab.wish is ServerWish.FOLLOWING
    lab.look(follows="a")
    (commit,) = commits(lab.gone("a"))
    assert commit.conditions == (At(STATE, lab.machine.state_revision),)
    electing = lab.committed()
    assert (electing.phase, electing.epoch) == (GroupPhase.ELECTING, 2)
    assert electing.orchestrator == B
    assert not [one for one in lab.effects if isinstance(one, PublishRecord) and one.record.final]
    lab.answer(Committed(lab.revision + 1))
    assert lab.wish is ServerWish.CLOSED
    early = lab.step(replace(lab.seen, follows="", done=1))
    assert not [one for one in early if isinstance(one, PublishRecord) and one.record.final]
    (published,) = [one for one in lab.look(follows="") if isinstance(one, PublishRecord)]
    assert published.record.final == 2, "F6: only after it stands still"


def test_the_orchestrator_chooses_once_all_have_answered() -> None:
    electing = msgspec.structs.replace(SERVING, phase=GroupPhase.ELECTING, epoch=2, orchestrator=B)
    lab = Lab("b", electing)
    lab.gone("a")
    assert lab.machine.waits is not None
    lab.change(server_key("g", "b", B), record("b", offset=9, final=2))
    lab.change(server_key("g", "c", C), record("c", offset=12, final=2))
    chosen = lab.committed()
    assert (chosen.phase, chosen.candidate, chosen.epoch) == (GroupPhase.CHOSEN, C, 2)
    assert [(one.server, one.offset) for one in chosen.positions] == [("b", 9), ("c", 12)]


def test_it_waits_no_longer_than_it_may_for_who_does_not_answer() -> None:
    electing = msgspec.structs.replace(SERVING, phase=GroupPhase.ELECTING, epoch=2, orchestrator=B)
    lab = Lab("b", electing)
    lab.change(server_key("g", "b", B), record("b", final=2))
    assert commits(lab.effects) == []
    (arm,) = [one for one in lab.effects[-1:] if isinstance(one, Arm)]
    lab.now = arm.at
    assert commits(lab.step(Tick()))
    assert lab.committed().candidate == B


def test_nobody_elects_over_a_primary_whose_record_stands() -> None:
    """F4: also when it says itself that its server is down; it releases when that is closed."""
    lab = Lab("b", SERVING)
    lab.look()
    lab.change(server_key("g", "a", A), record("a", fit=False, role="down"))
    lab.now += 100.0
    lab.look()
    assert commits(lab.effects) == []


def test_the_quorums_of_the_epochs_before_stay_listed() -> None:
    old = WriteQuorum("a", ("b", "c"))
    state = msgspec.structs.replace(choose(10), quorums=(old,))
    lab = Lab("b", state, GroupConfig("sim", mode="sync"))
    lab.look()
    lab.look(chain=(*CHAIN, HistoryStart(2, 10)), offset=11, promoted=2)
    assert lab.committed().quorums == (old, WriteQuorum("b", ("a", "c")))


@pytest.mark.parametrize(
    ("of_a", "of_c", "listed"),
    [
        # Both followed in the epoch before.
        ({}, {}, ("a", "c")),
        # One has not got all of its copy yet, or is of another group.
        ({}, {"chain": ORIGIN}, ("a",)),
        ({}, {"origin": ""}, ("a",)),
        # The only other one has nothing: those of the quorum before stay, also one that is away.
        (None, {"chain": ORIGIN}, ("a", "d")),
    ],
)
def test_a_promotion_lists_those_that_followed_before(
    of_a: dict[str, Any] | None, of_c: dict[str, Any], listed: tuple[str, ...]
) -> None:
    """FO-02."""
    old = WriteQuorum("a", ("b", "d"))
    state = msgspec.structs.replace(choose(10), quorums=(old,))
    lab = Lab("b", state, GroupConfig("sim", mode="sync"))
    if of_a is None:
        lab.gone("a")
    lab.change(server_key("g", "c", C), record("c", **of_c))
    lab.look()
    lab.look(chain=(*CHAIN, HistoryStart(2, 10)), offset=11, promoted=2)
    assert lab.committed().quorums == (old, WriteQuorum("b", listed))


def test_an_orchestrator_that_is_gone_is_replaced() -> None:
    electing = msgspec.structs.replace(SERVING, phase=GroupPhase.ELECTING, epoch=2, orchestrator=B)
    lab = Lab("c", electing)
    lab.gone("b")
    assert lab.committed().orchestrator == C
    assert lab.committed().epoch == 2


CHOSEN = msgspec.structs.replace(
    SERVING, phase=GroupPhase.CHOSEN, epoch=2, candidate=B, candidate_server="b"
)


def choose(offset: int) -> GroupState:
    return msgspec.structs.replace(CHOSEN, chosen=Ranked("b", 1, offset))


def test_a_candidate_is_promoted_serves_and_opens_in_this_order() -> None:
    lab = Lab("b", choose(10), GroupConfig("sim", mode="sync"))
    lab.look()
    assert lab.wish is ServerWish.PROMOTED
    promoted: Chain = (*CHAIN, HistoryStart(2, 10))
    lab.look(chain=promoted, offset=11, promoted=2, native="b-1")
    serving = lab.committed()
    assert (serving.phase, serving.primary, serving.epoch) == (GroupPhase.SERVING, B, 2)
    assert serving.chain == promoted
    assert serving.quorums == (WriteQuorum("b", ("a", "c")),)
    assert lab.wish is ServerWish.PROMOTED, "I3: opened only after the commit"
    lab.answer(Committed(lab.revision + 1))
    assert lab.wish is ServerWish.OPEN
    assert lab.machine.want is not None
    assert lab.machine.want.quorum == WriteQuorum("b", ("a", "c"))


@pytest.mark.parametrize(
    "seen",
    [
        {"offset": 9},
        {"up": False},
        {"fit": False, "why": "disk full"},
        {"chain": (*CHAIN, HistoryStart(2, 9)), "promoted": 0},
    ],
)
def test_a_candidate_that_is_not_what_was_chosen_ends_the_epoch(seen: dict[str, Any]) -> None:
    lab = Lab("b", choose(10))
    lab.look(**seen)
    assert lab.wish is not ServerWish.PROMOTED
    again = lab.committed()
    assert (again.phase, again.epoch) == (GroupPhase.ELECTING, 3)


def test_a_candidate_that_is_gone_ends_the_epoch() -> None:
    lab = Lab("c", choose(10))
    lab.gone("b")
    assert (lab.committed().phase, lab.committed().epoch) == (GroupPhase.ELECTING, 3)


@pytest.mark.parametrize(
    "seen", [{"run": "another"}, {"up": False}, {"fit": False}, {"chain": ORIGIN}]
)
def test_a_primary_whose_server_is_not_the_same_releases(seen: dict[str, Any]) -> None:
    lab = Lab("a", SERVING)
    lab.look()
    assert lab.wish is ServerWish.OPEN
    lab.look(open_epoch=1)
    closing = lab.look(**seen)
    if seen.get("up", True):
        assert commits(closing) == [], "F4: closed first"
    lab.look(open_epoch=0)
    assert lab.wish is ServerWish.AS_IS
    assert (lab.committed().phase, lab.committed().epoch) == (GroupPhase.ELECTING, 2)


def test_after_a_release_without_an_answer_it_never_opens_again() -> None:
    lab = Lab("a", SERVING)
    lab.look()
    lab.look(open_epoch=1)
    lab.look(fit=False)
    lab.look(open_epoch=0)
    (read_back,) = [one for one in lab.answer(Unknown()) if isinstance(one, ReadBack)]
    assert read_back.key == STATE
    lab.look(fit=True)
    assert lab.wish is ServerWish.AS_IS, "the release may still happen (S1)"
    lab.now += 1.0
    assert commits(lab.step(Tick()))[0].txn == read_back.txn, "it is repeated"
    assert lab.answer(Conflict(STATE)) == []


def test_a_new_agent_of_the_same_run_takes_over_in_the_same_epoch() -> None:
    before = msgspec.structs.replace(SERVING, primary=Incarnation("earlier"))
    lab = Lab("a", before)
    assert commits(lab.effects) == [], "it has not looked yet"
    lab.look()
    assert (lab.committed().primary, lab.committed().epoch) == (A, 1)
    assert lab.wish is ServerWish.AS_IS
    lab.answer(Committed(lab.revision + 1))
    assert lab.wish is ServerWish.OPEN


def test_paused_groups_begin_no_election() -> None:
    lab = Lab("b", SERVING, GroupConfig("sim", paused=True))
    lab.look()
    lab.gone("a")
    assert commits(lab.effects) == []
    lab.change(CONFIG, GroupConfig("sim"))
    assert lab.committed().phase is GroupPhase.ELECTING


SWITCHING = msgspec.structs.replace(
    SERVING, phase=GroupPhase.SWITCHING, candidate=B, candidate_server="b"
)


def test_a_switchover_waits_for_the_candidate_and_loses_nothing() -> None:
    lab = Lab("a", SWITCHING)
    lab.change(server_key("g", "b", B), record("b", offset=8))
    lab.look()
    assert lab.wish is ServerWish.DRAINED
    lab.look(offset=12)
    assert commits(lab.effects) == []
    lab.change(server_key("g", "b", B), record("b", offset=12))
    chosen = lab.committed()
    assert (chosen.phase, chosen.epoch, chosen.candidate) == (GroupPhase.CHOSEN, 2, B)
    assert lab.wish is ServerWish.DRAINED, "F11: it goes on feeding until the choice is stored"


def test_the_candidate_of_a_switchover_gets_ready_while_it_follows() -> None:
    """F11: what a promotion needs is done while the primary's clients come to rest."""
    lab = Lab("b", SERVING)
    lab.look()
    following = lab.machine.want
    assert following is not None
    lab.look(follows="a")
    lab.change(STATE, SWITCHING)
    ready = lab.machine.want
    assert ready is not None
    assert ready == replace(following, number=ready.number, wish=ServerWish.READY)
    lab.change(STATE, SERVING)
    assert lab.wish is ServerWish.FOLLOWING, "it lets readers in again"


@pytest.mark.parametrize(("server", "wish"), [("a", ServerWish.AS_IS), ("c", ServerWish.CLOSED)])
def test_once_another_is_chosen_the_replicas_let_go(server: str, wish: ServerWish) -> None:
    """So they follow the next primary at once. The old one only stays shut (F11)."""
    lab = Lab(server, SWITCHING)
    lab.look()
    before = lab.wish
    lab.change(STATE, choose(10))
    assert (before is wish, lab.wish) == (False, wish)


def test_an_overdue_switchover_is_reverted_by_the_primary_only() -> None:
    for server, reverts in (("a", True), ("c", False)):
        lab = Lab(server, SWITCHING)
        lab.change(server_key("g", "b", B), record("b", offset=8))
        lab.look()
        lab.now += 11.0
        assert bool(commits(lab.step(Tick()))) is reverts
        if reverts:
            assert (lab.committed().phase, lab.committed().epoch) == (GroupPhase.SERVING, 1)
            lab.look()
            assert lab.wish is ServerWish.DRAINED, "it opens once the revert is stored"
            lab.answer(Committed(lab.revision + 1))
            assert lab.wish is ServerWish.OPEN


def test_a_synchronous_primary_lists_uses_and_drops_in_this_order() -> None:
    old, new = WriteQuorum("a", ("b", "c")), WriteQuorum("a", ("b",))
    state = msgspec.structs.replace(SERVING, quorums=(old,))
    lab = Lab("a", state, GroupConfig("sim", mode="sync"))
    lab.change(server_key("g", "b", B), record("b", follows="a"))
    lab.look()
    lab.look(open_epoch=1, in_use=InUse(old, 5), acknowledged={"b": 10})
    assert lab.committed().quorums == (old, new)
    lab.look()
    assert lab.machine.want is not None
    assert lab.machine.want.quorum == old, "not before the state lists it"
    lab.answer(Committed(lab.revision + 1))
    lab.revision += 1
    lab.look()
    assert lab.machine.want.quorum == new
    lab.look(in_use=InUse(new, 20))
    assert len(commits(lab.effects)) == 1, "b has not everything up to 20 yet"
    lab.look(acknowledged={"b": 20})
    assert lab.committed().quorums == (new,)


def test_a_state_of_a_later_version_closes_the_server() -> None:
    lab = Lab("a", SERVING)
    lab.look()
    assert lab.wish is ServerWish.OPEN
    later = msgspec.json.encode({**msgspec.to_builtins(SERVING), "format": 99})
    lab.revision += 1
    item = Item(STATE, later, 1, lab.revision)
    lab.step(Changed(Changes(lab.revision, (Change(STATE, item),))))
    assert lab.wish is ServerWish.CLOSED
    assert "later version" in lab.machine.unreadable
    assert commits(lab.effects) == []


def test_an_unreadable_member_is_there_but_unfit() -> None:
    lab = Lab("b", SERVING)
    lab.revision += 1
    item = Item(server_key("g", "a", A), b"{}", 1, lab.revision)
    lab.step(Changed(Changes(lab.revision, (Change(item.key, item),))))
    assert not lab.machine.members[A].fit
    assert commits(lab.effects) == []


def test_people_ask_for_what_is_possible() -> None:
    members = {A: record("a"), B: record("b"), C: record("c", fit=False, why="no disk")}
    assert switching(SERVING, members, "b").candidate == B
    for state, to, why in (
        (CHOSEN, "b", "wait until it serves"),
        (SERVING, "a", "choose one of b, c"),
        (SERVING, "x", "choose one of b, c"),
        (SERVING, "c", "no disk"),
    ):
        with pytest.raises(ValueError, match=why):
            switching(state, members, to)
    with pytest.raises(ValueError, match="only an election"):
        forced(SERVING)
    electing = msgspec.structs.replace(SERVING, phase=GroupPhase.ELECTING, epoch=2)
    assert forced(electing).force


def test_wants_are_compared_without_their_number() -> None:
    want = Want(1, ServerWish.CLOSED, 2)
    assert want.same(Want(7, ServerWish.CLOSED, 2))
    assert not want.same(Want(1, ServerWish.CLOSED, 3))
    assert not want.same(None)
