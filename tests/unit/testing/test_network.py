"""The simulated network: order, latency, and every way to break it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from domicile.ports.transport import Connection
from domicile.testing.history import History
from domicile.testing.sim.loop import World
from domicile.testing.sim.network import SimNetwork


class Recorder:
    """A handler that notes what happens, and when."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.connection: Connection | None = None
        self.data: list[bytes] = []
        self.times: list[float] = []
        self.reasons: list[str] = []
        self.closed_at = 0.0

    def opened(self, connection: Connection) -> None:
        assert self.connection is None
        self.connection = connection

    def received(self, data: bytes) -> None:
        assert not self.reasons, "a packet after the end"
        self.data.append(data)
        self.times.append(self._world.now)

    def receiving(self) -> None:
        pass

    def closed(self, reason: str) -> None:
        self.reasons.append(reason)
        self.closed_at = self._world.now

    def send(self, *packets: bytes) -> None:
        assert self.connection is not None
        for packet in packets:
            self.connection.send(packet)


class Lab:
    """Two hosts, a and b; b listens."""

    def __init__(self, seed: int = 1) -> None:
        self.world = World(seed)
        self.history = History(lambda: self.world.now)
        self.network = SimNetwork(self.world, self.history, self.world.stream("network"))
        self.driver = self.world.process("driver")
        self.a = self.world.process("a")
        self.b = self.world.process("b")
        self.at_a = self.network.transport(self.a, "a")
        self.at_b = self.network.transport(self.b, "b")
        self.accepted: list[Recorder] = []
        self.address = ""

    def accept(self) -> Recorder:
        self.accepted.append(Recorder(self.world))
        return self.accepted[-1]

    def dial(self) -> Recorder:
        recorder = Recorder(self.world)
        self.at_a.dial(self.address, recorder)
        return recorder

    async def pair(self) -> tuple[Recorder, Recorder]:
        near = self.dial()
        await asyncio.sleep(0.01)
        assert near.connection is not None
        return near, self.accepted[-1]


def simulate(test: Callable[[Lab], Coroutine[Any, Any, None]], seed: int = 1) -> Lab:
    lab = Lab(seed)

    async def main() -> None:
        lab.address = await lab.at_b.listen(lab.accept)
        await test(lab)

    lab.world.run(main(), lab.driver)
    lab.world.close()
    assert lab.world.errors == []
    return lab


def packets(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def test_packets_arrive_in_order_after_a_latency() -> None:
    async def test(lab: Lab) -> None:
        near, far = await lab.pair()
        start = lab.world.now
        near.send(*packets(50))
        far.send(b"back")
        assert far.data == []
        await asyncio.sleep(0.01)
        assert far.data == packets(50)
        assert near.data == [b"back"]
        assert far.times == sorted(far.times)
        assert start + 0.0002 <= far.times[0] <= far.times[-1] <= start + 0.002

    simulate(test)


def test_callbacks_run_in_the_process_they_belong_to() -> None:
    async def test(lab: Lab) -> None:
        loops: list[object] = []

        class Where(Recorder):
            def received(self, data: bytes) -> None:
                loops.append(asyncio.get_running_loop())

        address = await lab.at_b.listen(lambda: Where(lab.world))
        near = Recorder(lab.world)
        lab.at_a.dial(address, near)
        await asyncio.sleep(0.01)
        near.send(b"x")
        await asyncio.sleep(0.01)
        assert loops == [lab.b]

    simulate(test)


def test_a_partition_holds_packets_until_it_heals() -> None:
    async def test(lab: Lab) -> None:
        near, far = await lab.pair()
        near.send(b"0")
        lab.network.partition([["a"], ["b"]])
        near.send(b"1", b"2")
        await asyncio.sleep(10)
        assert far.data == [], "packets under way are held too"
        lab.network.heal()
        near.send(b"3")
        await asyncio.sleep(0.01)
        assert far.data == packets(4)
        assert near.reasons == far.reasons == []

    simulate(test)


def test_hosts_on_no_side_reach_everyone_and_a_new_partition_replaces_the_old() -> None:
    async def test(lab: Lab) -> None:
        near, far = await lab.pair()
        lab.network.partition([["a"], ["c"]])
        near.send(b"0")
        await asyncio.sleep(0.01)
        assert far.data == [b"0"]
        lab.network.partition([["a"], ["b"]])
        near.send(b"1")
        await asyncio.sleep(0.01)
        assert far.data == [b"0"]
        lab.network.partition([["a", "b"], ["c"]])
        await asyncio.sleep(0.01)
        assert far.data == [b"0", b"1"]

    simulate(test)


def test_a_block_is_one_way() -> None:
    async def test(lab: Lab) -> None:
        near, far = await lab.pair()
        lab.network.block("a", "b")
        near.send(b"x")
        far.send(b"y")
        await asyncio.sleep(0.01)
        assert (far.data, near.data) == ([], [b"y"])

    simulate(test)


@pytest.mark.parametrize("way", [("a", "b"), ("b", "a")])
def test_dialling_across_a_block_hangs_and_times_out(way: tuple[str, str]) -> None:
    async def test(lab: Lab) -> None:
        lab.network.block(*way)
        start = lab.world.now
        near = lab.dial()
        await asyncio.sleep(2.9)
        assert near.reasons == []
        await asyncio.sleep(0.2)
        assert near.reasons == ["timed out"]
        assert near.closed_at == pytest.approx(start + 3.0)
        lab.network.heal()
        await asyncio.sleep(0.1)
        assert near.connection is None
        assert all(far.reasons for far in lab.accepted), "the accepting end learns it too"

    simulate(test)


def test_dialling_across_a_block_goes_on_after_it_heals() -> None:
    async def test(lab: Lab) -> None:
        lab.network.partition([["a"], ["b"]])
        near = lab.dial()
        await asyncio.sleep(1)
        assert near.connection is None
        lab.network.heal()
        await asyncio.sleep(0.01)
        near.send(b"x")
        await asyncio.sleep(3)
        assert lab.accepted[0].data == [b"x"]
        assert near.reasons == []

    simulate(test)


def test_dialling_nobody_fails() -> None:
    async def test(lab: Lab) -> None:
        near = Recorder(lab.world)
        lab.at_a.dial("b:1", near)
        await asyncio.sleep(0.01)
        assert near.reasons == ["nobody listens at b:1"]

    simulate(test)


def test_closing_is_learnt_after_the_packets_under_way_and_by_the_peer_only() -> None:
    async def test(lab: Lab) -> None:
        near, far = await lab.pair()
        near.send(*packets(5))
        assert near.connection is not None
        near.connection.close()
        near.send(b"never")
        far.send(b"too late")
        await asyncio.sleep(0.01)
        assert far.data == packets(5)
        assert far.reasons == ["closed by the peer"]
        assert (near.data, near.reasons) == ([], [])

    simulate(test)


def test_a_cut_loses_a_tail_and_each_end_learns_it_in_its_own_time() -> None:
    counts: dict[int, int] = {}
    late = 0
    for seed in range(30):
        found: list[tuple[Recorder, Recorder, float]] = []

        async def test(lab: Lab, found: list[tuple[Recorder, Recorder, float]] = found) -> None:
            near, far = await lab.pair()
            near.send(*packets(3))
            cut_at = lab.world.now
            lab.network.cut("b", "a")
            near.send(b"lost")
            await asyncio.sleep(0.3)
            found.append((near, far, cut_at))

        simulate(test, seed)
        near, far, cut_at = found[0]
        assert far.data == packets(3)[: len(far.data)]
        counts[len(far.data)] = counts.get(len(far.data), 0) + 1
        assert near.reasons == far.reasons == ["connection lost"]
        assert max(near.closed_at, far.closed_at) <= cut_at + 0.2
        assert near.closed_at != far.closed_at
        late += bool(far.times) and far.times[-1] > near.closed_at
    assert sorted(counts) == [0, 1, 2, 3]
    assert late, "some bytes arrive after the other end has learnt of the cut"


def test_a_cut_spares_other_hosts() -> None:
    async def test(lab: Lab) -> None:
        near, far = await lab.pair()
        lab.network.cut("a", "c")
        near.send(b"x")
        await asyncio.sleep(0.3)
        assert far.data == [b"x"]

    simulate(test)


def test_a_slow_host_is_slow_both_ways_until_it_is_not() -> None:
    async def test(lab: Lab) -> None:
        near, far = await lab.pair()
        lab.network.slow("b", 0.5)
        start = lab.world.now
        near.send(b"0")
        far.send(b"0")
        lab.network.slow("b", 0.0)
        near.send(b"1")
        await asyncio.sleep(1)
        assert far.data == [b"0", b"1"], "latency never reorders"
        assert min(*far.times, *near.times) >= start + 0.5

    simulate(test)


def test_killing_a_host_resets_its_connections_after_what_it_had_sent() -> None:
    async def test(lab: Lab) -> None:
        near, far = await lab.pair()
        near.send(*packets(3))
        lab.a.kill()
        lab.network.kill("a")
        far.send(b"to the dead")
        await asyncio.sleep(0.01)
        assert far.data == packets(3)
        assert far.reasons == ["reset"]
        assert near.data == []

    simulate(test)


def test_a_restarted_host_has_a_new_address() -> None:
    async def test(lab: Lab) -> None:
        lab.b.kill()
        lab.network.kill("b")
        again = lab.network.transport(lab.world.process("b"), "b")
        address = await again.listen(lab.accept)
        assert address != lab.address
        stale = lab.dial()
        lab.address = address
        fresh = lab.dial()
        await asyncio.sleep(0.01)
        assert stale.reasons == [f"nobody listens at {stale_address(lab)}"]
        assert fresh.connection is not None

    def stale_address(lab: Lab) -> str:
        return f"b:{int(lab.address.rpartition(':')[2]) - 1}"

    simulate(test)


def test_packets_and_dials_pile_up_while_the_process_is_frozen() -> None:
    async def test(lab: Lab) -> None:
        near, far = await lab.pair()
        lab.b.freeze()
        near.send(*packets(3))
        second = lab.dial()
        await asyncio.sleep(5)
        assert far.data == []
        assert len(lab.accepted) == 1
        assert second.connection is not None, "the kernel accepts"
        second.send(b"hello")
        await asyncio.sleep(5)
        assert second.data == second.reasons == []
        lab.b.thaw()
        await asyncio.sleep(0.01)
        assert far.data == packets(3)
        assert lab.accepted[1].data == [b"hello"]

    simulate(test)


def test_closing_a_transport_closes_everything_without_a_word_to_its_own_handlers() -> None:
    async def test(lab: Lab) -> None:
        near, far = await lab.pair()
        await lab.at_b.close()
        again = lab.dial()
        await asyncio.sleep(0.01)
        assert near.reasons == ["closed by the peer"]
        assert far.reasons == []
        assert again.reasons == [f"nobody listens at {lab.address}"]
        await lab.at_a.close()
        quiet = lab.dial()
        await asyncio.sleep(5)
        assert quiet.reasons == []
        assert quiet.connection is None

    simulate(test)


def test_the_same_seed_gives_the_same_run() -> None:
    async def test(lab: Lab) -> None:
        near, far = await lab.pair()
        for number in range(20):
            near.send(b"%d" % number)
            far.send(b"%d" % number)
            await asyncio.sleep(0.001)
        lab.network.cut("a", "b")
        await asyncio.sleep(0.3)
        lab.history.event("start", times=[*near.times, *far.times, near.closed_at, far.closed_at])

    digests = [simulate(test, seed).history.digest() for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


def test_a_finished_connection_is_forgotten() -> None:
    async def test(lab: Lab) -> None:
        near, _ = await lab.pair()
        assert near.connection is not None
        near.connection.close()
        await asyncio.sleep(0.01)
        assert lab.network._wires == {}

    simulate(test)


def test_a_lingering_connection_delivers_after_its_successor_stands() -> None:
    late = 0

    for seed in range(20):

        async def test(lab: Lab) -> None:
            nonlocal late
            near, far = await lab.pair()
            near.send(*packets(20))
            lab.network.linger("a", "b", 2.0)
            await asyncio.sleep(0.25)
            assert near.reasons == ["connection lost"], "who dialled learns it soon"
            assert far.reasons == [], "and who accepted does not"
            again, successor = await lab.pair()
            again.send(b"new")
            await asyncio.sleep(0.01)
            assert successor.data == [b"new"]
            before = len(far.data)
            await asyncio.sleep(2.5)
            assert far.data == packets(20)[: len(far.data)]
            assert far.reasons == ["connection lost"]
            late += len(far.data) - before

        simulate(test, seed)
    assert late > 20


def test_a_duplicate_repeats_the_first_and_the_newest_packets() -> None:
    async def test(lab: Lab) -> None:
        near, far = await lab.pair()
        near.send(*packets(9))
        await asyncio.sleep(0.01)
        assert lab.network.duplicate("a", "b") == 1
        await asyncio.sleep(0.02)
        ghost = lab.accepted[1]
        assert ghost.data == [b"0", b"6", b"7", b"8"]
        ghost.send(b"answer")
        await asyncio.sleep(0.02)
        assert near.data == []
        assert (near.reasons, far.reasons) == ([], [])
        assert lab.network.duplicate("a", "c") == 0

    simulate(test)


def test_one_direction_can_be_slow() -> None:
    async def test(lab: Lab) -> None:
        near, far = await lab.pair()
        lab.network.slow_way("a", "b", 1.0)
        near.send(b"slow")
        far.send(b"fast")
        await asyncio.sleep(0.5)
        assert (near.data, far.data) == ([b"fast"], [])
        await asyncio.sleep(0.6)
        assert far.data == [b"slow"]
        lab.network.slow_way("a", "b", 0.0)
        near.send(b"again")
        await asyncio.sleep(0.01)
        assert far.data == [b"slow", b"again"]

    simulate(test)
