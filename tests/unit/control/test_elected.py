"""The elected control plane: what a process says to the leader, whom it believes, when it stays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from domicile.control.elected import UNHEARD_S, Elected
from domicile.control.peer_probe import PING_ID, PING_TIMEOUT_S
from domicile.control.planes import PLANES, make_plane
from domicile.core.ids import NOBODY, Incarnation, LinkKey, ShardKey
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.keys import release_key
from domicile.core.state.records import LeaderRecord, NodeRecord
from domicile.core.state.shardmap import Entry
from domicile.core.wire import (
    AskRevert,
    Ping,
    Pong,
    Probe,
    Probed,
    Released,
    Suspect,
    Told,
    ToOwner,
)
from domicile.errors import ConfigError
from domicile.ports.control import ControlWiring
from domicile.settings import Settings
from domicile.stores.memory.store import MemoryStore
from domicile.testing.history import History
from domicile.testing.sim.clock import SimClock
from domicile.testing.sim.loop import World

ME, LEADER, OTHER, STRANGER = (Incarnation(name) for name in ("me", "lead", "other", "stray"))
SHARD = ShardKey("r", 7)
SETTINGS = Settings()


class Bench:
    """One plane whose ways to others are written down. `leader` is who the store says leads."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.history = History(lambda: world.now)
        self.loop = world.process("p")
        self.clock = SimClock(world, self.loop)
        self.members = ClusterView()
        for node in (ME, LEADER, OTHER):
            self.members.nodes[node] = NodeRecord(node, node, node, ("r",), (), 6.0)
        self.sent: list[tuple[Incarnation, ToOwner]] = []
        self.learned: list[tuple[ShardKey, tuple[Entry, ...]]] = []
        self.checked: list[Incarnation] = []
        self.connected = True
        self.store = MemoryStore(self.clock)
        self.wiring = ControlWiring(
            store=self.store.client("me"),
            clock=self.clock,
            meter=self.history,
            settings=SETTINGS,
            random=Random(1),
            threads=None,
            me=ME,
            node_id="me",
            candidate=True,
            strategy="least_shards",
            members=self.members,
            guard=lambda: True,
            send=lambda to, message: self.sent.append((to, message)),
            connected=lambda _: self.connected,
            learn=lambda shard, entries: self.learned.append((shard, entries)),
            check_alive=self.checked.append,
        )
        self.plane = Elected(self.wiring)

    def led_by(self, leader: Incarnation | None) -> None:
        self.members.leader = None if leader is None else LeaderRecord(leader, leader)

    def take(self, sender: Incarnation, message: Any) -> None:
        self.plane.requests[type(message)](LinkKey(sender, "1"), message)


def run(main: Callable[[Bench], Coroutine[Any, Any, None]]) -> Bench:
    world = World(0)
    bench = Bench(world)

    async def whole() -> None:
        await main(bench)
        await bench.plane.close()

    world.run(whole(), bench.loop)
    assert world.errors == []
    return bench


def test_reports_of_an_owner_go_to_the_leader() -> None:
    async def main(bench: Bench) -> None:
        bench.led_by(LEADER)
        bench.plane.released(SHARD, 3, 2)
        bench.plane.ask_revert(SHARD, 4)
        bench.plane.suspect(OTHER)

    bench = run(main)
    reports = [Released("r", 7, 3, 2), AskRevert("r", 7, 4), Suspect(OTHER)]
    assert bench.sent == [(LEADER, report) for report in reports]
    assert bench.checked == []


def test_a_leader_hears_itself_once_the_loop_has_turned() -> None:
    async def main(bench: Bench) -> None:
        bench.led_by(ME)
        heard: list[object] = []
        bench.plane._candidate.feed = heard.append  # type: ignore[method-assign]
        bench.plane.released(SHARD, 3, 0)
        bench.plane.ask_revert(SHARD, 4)
        assert heard == []
        await asyncio.sleep(0)
        assert len(heard) == 2
        bench.plane.suspect(OTHER)

    bench = run(main)
    assert bench.sent == []
    assert bench.checked == [OTHER], "the leader asks the health port itself"


@pytest.mark.parametrize("leader", [None, LEADER])
def test_a_release_that_no_leader_hears_for_a_second_goes_into_the_store(
    leader: Incarnation | None,
) -> None:
    async def main(bench: Bench) -> None:
        bench.led_by(leader)
        bench.connected = False
        key = release_key(ME, SHARD, 3)
        bench.plane.released(SHARD, 3, 2)
        await asyncio.sleep(UNHEARD_S / 2)
        bench.plane.released(SHARD, 3, 2)
        await asyncio.sleep(0.01)
        assert bench.store.peek(key) is None
        await asyncio.sleep(UNHEARD_S / 2)
        bench.plane.released(SHARD, 3, 2)
        await asyncio.sleep(0.01)
        item = bench.store.peek(key)
        assert item is not None
        assert item.value == b"2"

    run(main)


def test_a_leader_in_reach_and_another_epoch_begin_the_second_anew() -> None:
    async def main(bench: Bench) -> None:
        bench.led_by(LEADER)
        for epoch, connected in ((3, False), (3, True), (3, False), (4, False)):
            bench.connected = connected
            bench.plane.released(SHARD, epoch, 0)
            await asyncio.sleep(0.9 * UNHEARD_S)
        assert bench.store.revision == 0

    run(main)


def test_without_a_leader_what_may_get_lost_is_not_said() -> None:
    async def main(bench: Bench) -> None:
        bench.plane.ask_revert(SHARD, 4)
        bench.plane.suspect(OTHER)

    bench = run(main)
    assert not bench.sent
    assert not bench.checked


def test_only_the_leader_speaks_for_the_map_and_has_nodes_probed() -> None:
    async def main(bench: Bench) -> None:
        assert not bench.plane.speaks_for_map(LEADER)
        bench.led_by(LEADER)
        assert bench.plane.speaks_for_map(LEADER)
        assert not bench.plane.speaks_for_map(OTHER)
        assert bench.history.counts["leader.unknown"] == 2
        bench.take(OTHER, Probe(OTHER))
        bench.take(LEADER, Probe(STRANGER))
        assert bench.sent == []
        bench.take(LEADER, Probe(OTHER))
        assert bench.sent.pop() == (OTHER, Ping(PING_ID))
        bench.plane.answers[Pong](OTHER, Pong(PING_ID))
        assert bench.sent.pop() == (LEADER, Probed(OTHER, True))
        bench.take(LEADER, Probe(OTHER))
        await asyncio.sleep(1.1 * PING_TIMEOUT_S)
        assert bench.sent.pop() == (LEADER, Probed(OTHER, False))

    run(main)


def test_a_suspicion_is_passed_on_to_the_health_port() -> None:
    async def main(bench: Bench) -> None:
        bench.take(OTHER, Suspect(LEADER))

    assert run(main).checked == [LEADER]


def test_what_a_leader_tells_its_own_process_needs_no_link() -> None:
    entry = Entry(ME, 1, "serving", NOBODY, 1)

    async def main(bench: Bench) -> None:
        bench.plane._send(ME, Told("r", 7, entry))
        assert bench.learned == []
        await asyncio.sleep(0)

    bench = run(main)
    assert bench.learned == [(SHARD, (entry,))]
    assert bench.sent == []


def test_a_shard_can_be_placed_while_a_leader_or_a_node_that_receives_is_known() -> None:
    async def main(bench: Bench) -> None:
        assert not bench.plane.decides
        assert bench.plane.may_place("r")
        assert not bench.plane.may_place("another role")
        bench.led_by(LEADER)
        assert bench.plane.decides
        assert bench.plane.may_place("another role")

    run(main)


def test_closing_ends_probes_and_releases_that_are_under_way() -> None:
    async def main(bench: Bench) -> None:
        bench.led_by(LEADER)
        bench.connected = False
        bench.plane.released(SHARD, 3, 0)
        await asyncio.sleep(UNHEARD_S)
        bench.plane.released(SHARD, 3, 0)
        bench.take(LEADER, Probe(OTHER))
        bench.sent.clear()
        await bench.plane.close()
        await asyncio.sleep(2 * PING_TIMEOUT_S)
        assert bench.sent == []
        assert bench.store.revision == 0

    run(main)


def test_a_plane_is_found_by_its_name() -> None:
    async def main(bench: Bench) -> None:
        assert isinstance(make_plane("elected", bench.wiring), Elected)
        with pytest.raises(ConfigError, match="'elected'"):
            make_plane("lease", bench.wiring)
        assert list(PLANES) == ["elected"]

    run(main)
