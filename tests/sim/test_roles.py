"""Who may be home to what, and that all members mean the same by it: roles (SM-28, RG-16), users'
shard functions (SM-21, RG-03), and what a join is refused for (RG-24).
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from manager_lab import inside, stored

from domicile import (
    ConfigError,
    Entity,
    Node,
    NotExecuted,
    Settings,
    Unavailable,
    by_message,
    connect,
    handler,
    murmur2,
    shardcake,
)
from domicile.core.ids import EntityKey, ShardKey
from domicile.core.state.keys import CONFIG_KEY
from domicile.core.state.records import ConfigRecord, TypeRecord, decode_record
from domicile.ops.status import EntityPlace, place_of
from domicile.testing import Sim, simulated
from domicile.testing.sim.simulated import run_simulation

FEW = Settings(shards=8)
TWO = Settings(shards=2, settle_s=0.05)


class Paint(msgspec.Struct, tag=True):
    wall: str
    colour: str = "white"


class Scrub(msgspec.Struct, tag=True):
    wall: str


class Post(msgspec.Struct):
    parcel: str
    depot: int


class Wall(Entity, name="wall", role="house", shard_id=murmur2):
    """Takes messages that name it."""

    def __init__(self) -> None:
        self.coats: list[str] = []

    @handler
    async def paint(self, message: Paint) -> int:
        self.coats.append(message.colour)
        return len(self.coats)

    @handler
    async def scrub(self, message: Scrub) -> list[str]:
        gone, self.coats = self.coats, []
        return gone


class Roof(Entity, name="roof", role="house", shard_id=shardcake):
    @handler
    async def where(self) -> str:
        return self.id


class Tree(Entity, name="tree", role="garden"):
    """Lives in another role, and knows a roof."""

    @handler
    async def shade(self, roof: str) -> str:
        return f"{self.id} over {await self.ref(Roof, roof).ask(Roof.where)}"

    @handler
    async def where(self) -> str:
        return self.id


class Parcel(Entity, name="parcel", shard_id=by_message):
    @handler
    async def post(self, message: Post) -> tuple[str, int]:
        return self.id, self.epoch


def tenth(entity_id: str, shards: int) -> int:
    """Out of range for every other id, and broken for one."""
    if entity_id == "broken":
        raise LookupError("no such lot")
    return int(entity_id)


class Lot(Entity, name="lot", shard_id=tenth):
    @handler
    async def where(self) -> str:
        return self.id


# SM-28, RG-16: roles


def homes_of(sim: Sim, role: str) -> dict[int, int]:
    """How many shards of a role each node is home to."""
    counts: dict[int, int] = {}
    for number in range(sim.settings.shards):
        owner = sim.entry(ShardKey(role, number)).owner
        for node in sim.nodes:
            if node.incarnation == owner:
                counts[node.index] = counts.get(node.index, 0) + 1
    return counts


def check_roles(sim: Sim, allowed: dict[str, tuple[int, ...]]) -> None:
    """No commit ever named a node as owner, or as the next one, of a role that it has not."""
    names: dict[str, str] = {}
    for event in sim.history.of("life"):
        names[event.fields["inc"]] = event.fields["node"]
    changes = stored(sim)
    assert changes
    for change in changes:
        for incarnation in (change.entry.owner, change.entry.to):
            if incarnation:
                node = int(names[incarnation].removeprefix("node-"))
                assert node in allowed[change.shard.role], change


@pytest.mark.scenario("SM-28")
@simulated(
    entities=[Wall, Roof, Tree],
    nodes=4,
    seeds=8,
    settings=FEW,
    homes={0: [Wall, Roof], 1: [Wall, Roof, Tree], 2: [Tree], 3: [Tree]},
    locks=True,
)
async def test_roles_have_their_own_shards_and_nodes(sim: Sim) -> None:
    house, garden = (0, 1), (1, 2, 3)
    await sim.wait_until(lambda: homes_of(sim, "house") == {0: 4, 1: 4})
    spread = homes_of(sim, "garden")
    assert sorted(spread) == list(garden)
    for number in range(12):
        assert await sim.ref(Roof, f"r{number}").ask(Roof.where) == f"r{number}"
        assert await sim.ref(Tree, f"t{number}").ask(Tree.shade, "r1") == f"t{number} over r1"

    sim.crash(0)
    await sim.wait_until(lambda: homes_of(sim, "house") == {1: 8})
    await sim.stop(2)
    await sim.wait_until(lambda: set(homes_of(sim, "garden")) <= {1, 3} and sim.settled())
    await sim.drain(1)
    await sim.wait_until(lambda: homes_of(sim, "garden") == {3: 8})
    assert homes_of(sim, "house") == {1: 8}, "nobody else may be home to these"
    assert await sim.ref(Tree, "t").ask(Tree.shade, "r") == "t over r"
    check_roles(sim, {"house": house, "garden": garden})


@pytest.mark.scenario("SM-28")
@simulated(entities=[Roof, Tree], nodes=2, seeds=4, settings=FEW, homes={0: [Roof], 1: [Tree]})
async def test_a_wish_for_a_node_of_another_role_moves_nothing(sim: Sim) -> None:
    shard = ShardKey("house", 3)
    await sim.wish(shard, 1)
    await sim.advance(10)
    assert homes_of(sim, "house") == {0: 8}
    assert sim.entry(shard).state == "serving"
    check_roles(sim, {"house": (0,), "garden": (1,)})


@pytest.mark.scenario("RG-16")
@simulated(
    entities=[Roof, Tree], nodes=3, seeds=6, settings=FEW, homes={1: [Tree], 2: []}, locks=True
)
async def test_who_lacks_the_role_routes_and_never_hosts(sim: Sim) -> None:
    async def use(node: Node) -> list[str]:
        return [await node.ref(Roof, f"r{number}").ask(Roof.where) for number in range(10)]

    for outsider in (1, 2):
        assert await inside(sim, outsider, use) == [f"r{number}" for number in range(10)]
    assert await sim.ref(Roof, "r0").ask(Roof.where) == "r0"
    client = sim.client_life
    assert client is not None
    home = sim.nodes[0].incarnation
    opened = list(sim.history.of("open"))
    assert {event.fields["inc"] for event in opened if event.fields["role"] == "house"} == {home}
    assert sim.nodes[2].incarnation not in {event.fields["inc"] for event in opened}
    assert client.me not in {event.fields["inc"] for event in opened}

    # Without any home of the role there is nobody to route to: they wait, and still host nothing.
    sim.crash(0)
    await sim.wait_until(lambda: home not in client.member.members.nodes)
    with pytest.raises(Unavailable):
        await sim.ref(Roof, "r1").options(timeout_s=15).ask(Roof.where)
    check_roles(sim, {"house": (0,), "garden": (0, 1)})


@pytest.mark.scenario("RG-16")
def test_a_client_needs_no_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ports: list[socket.socket] = []
    listen = socket.socket.listen

    def counted(self: socket.socket, *backlog: int) -> None:
        ports.append(self)
        listen(self, *backlog)

    monkeypatch.setattr(socket.socket, "listen", counted)
    url = f"sqlite:///{tmp_path / 'dev.db'}"

    async def main() -> None:
        async with Node(url, entities=[Roof], settings=TWO):
            assert len(ports) == 1
            async with connect(url, settings=TWO) as client:
                assert await client.ref(Roof, "r").ask(Roof.where) == "r"
            assert len(ports) == 1

    asyncio.run(main())


# SM-21, RG-03: users' functions


@pytest.mark.scenario("SM-21")
@simulated(entities=[Wall, Roof], nodes=2, seeds=4, settings=FEW)
async def test_the_forms_of_others_decide_where_entities_live(sim: Sim) -> None:
    numbers: dict[tuple[str, str], int] = {}
    for id in ("", "21", "foobar", "Größe", "🏠", "polygenelubricants"):
        await sim.ref(Wall, id).ask(Wall.scrub, Scrub(id))
        await sim.ref(Roof, id).ask(Roof.where)
    for event in sim.history.of("submit"):
        numbers[event.fields["type"], event.fields["id"]] = event.fields["shard"]
    # toPositive(murmur2(utf8)) % 8 as Kafka's partitioner says; abs(hashCode % 8) as a JVM does.
    walls = {id: number for (kind, id), number in numbers.items() if kind == "wall"}
    roofs = {id: number for (kind, id), number in numbers.items() if kind == "roof"}
    assert walls == {
        "": 1, "21": 4, "foobar": 6, "Größe": 7, "🏠": 3, "polygenelubricants": 2,
    }  # fmt: skip
    assert roofs == {
        "": 0, "21": 7, "foobar": 3, "Größe": 1, "🏠": 4, "polygenelubricants": 0,
    }  # fmt: skip


@simulated(entities=[Wall, Roof, Lot, Parcel], nodes=2, seeds=2, settings=FEW)
async def test_an_operator_finds_entities_by_the_forms_that_everybody_knows(sim: Sim) -> None:
    life = sim.client_life
    assert life is not None
    members = life.member.members

    def place(kind: str, id: str, role: str) -> EntityPlace:
        return place_of(members, EntityKey(kind, id), role, lambda _: False)

    for id in ("a", "b", "c", "🏠"):
        assert place("wall", id, "house").shard == sim.shard(Wall, id).shard
        assert place("roof", id, "house").shard == sim.shard(Roof, id).shard
    with pytest.raises(LookupError, match=rf"the program's own {__name__}:tenth"):
        place("lot", "7", "default")
    with pytest.raises(LookupError, match="not found by its id"):
        place("parcel", "p", "default")


@pytest.mark.scenario("SM-21")
@simulated(entities=[Lot], nodes=2, seeds=4, settings=FEW)
async def test_a_function_that_gives_no_shard_is_an_error_before_anything_is_sent(
    sim: Sim,
) -> None:
    assert await sim.ref(Lot, "7").ask(Lot.where) == "7"
    sent = len(list(sim.history.of("submit")))

    async def wrong(client: Any) -> None:
        for id in ("8", "-1"):
            with pytest.raises(NotExecuted, match=rf"tenth gave {id} for lot '{id}'.*0 to 7"):
                await client.ref(Lot, id).ask(Lot.where)
            with pytest.raises(NotExecuted, match=rf"tenth gave {id}"):
                await client.ref(Lot, id).tell(Lot.where)
        with pytest.raises(NotExecuted, match=r"tenth failed for lot 'broken'.*no such lot"):
            await client.ref(Lot, "broken").ask(Lot.where)

    await wrong(sim)
    await inside(sim, 0, wrong)
    assert len(list(sim.history.of("submit"))) == sent
    assert await sim.ref(Lot, "0").ask(Lot.where) == "0", "nothing else was harmed"


@pytest.mark.scenario("RG-03")
@simulated(entities=[Wall, Parcel], nodes=3, seeds=8, settings=FEW, rough=True)
async def test_messages_say_themselves_whom_they_are_for(sim: Sim) -> None:
    walls = sim.region(Wall, entity_id=lambda message: message.wall)
    for colour in ("red", "blue"):
        await walls.send(Paint("w1", colour))
    await sim.wish(sim.shard(Wall, "w1"), (sim.owner(Wall, "w1") + 1) % 3)
    assert await walls.ask(Paint("w2")) == 1
    assert await sim.ref(Wall, "w2").ask(Wall.paint, Paint("w2")) == 2, "the same entity"

    async def from_a_node(node: Node) -> list[Any]:
        region = node.region(Wall, entity_id=lambda message: message.wall)
        return [await region.ask(Paint("w3", "a")), await region.ask(Scrub("w3"))]

    assert await inside(sim, 0, from_a_node) == [1, ["a"]]
    for nobody in (Paint(""), Scrub(None)):  # type: ignore[arg-type]
        with pytest.raises(NotExecuted, match=f"a {type(nobody).__name__} names no 'wall'"):
            await walls.ask(nobody)
        with pytest.raises(NotExecuted, match=f"a {type(nobody).__name__} names no 'wall'"):
            await walls.send(nobody)
    with pytest.raises(NotExecuted, match="no handler of Wall takes a Post"):
        await walls.ask(Post("p", 1))


@pytest.mark.scenario("RG-03")
@simulated(entities=[Parcel], nodes=3, seeds=4, settings=FEW)
async def test_messages_say_which_shard_they_belong_to(sim: Sim) -> None:
    parcels = sim.region(
        Parcel, entity_id=lambda message: message.parcel, shard_id=lambda message, _: message.depot
    )
    for depot in range(8):
        assert (await parcels.ask(Post(f"p{depot}", depot)))[0] == f"p{depot}"
    sent = [event.fields["shard"] for event in sim.history.of("submit")]
    assert sent == list(range(8))
    for depot in (-1, 8):
        with pytest.raises(NotExecuted, match=rf"gave {depot} for parcel 'p'.*from 0 to 7"):
            await parcels.ask(Post("p", depot))
    with pytest.raises(NotExecuted, match="send through region"):
        await sim.ref(Parcel, "p").tell(Parcel.post, Post("p", 1))
    assert len(list(sim.history.of("submit"))) == 8


# RG-24: what all members agree on


def changed(**keywords: Any) -> type[Entity]:
    """`Roof` as another program has it."""

    async def where(self: Entity) -> str:
        return self.id

    return type("Roof", (Entity,), {"where": handler(where)}, name="roof", **keywords)


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """A store of its own for each test."""
    return f"memory://{request.node.name}"


OTHERS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"role": "house", "shard_id": shardcake},
        {"settings": Settings(shards=3, settle_s=0.05)},
        r"role 'house' has 2 shards in this cluster, this process is set to 3; set shards=2",
    ),
    (
        {"role": "house", "shard_id": shardcake},
        {"shards": {"house": 5}},
        r"role 'house' has 2 shards in this cluster, this process is set to 5",
    ),
    (
        {"role": "attic", "shard_id": shardcake},
        {},
        r"'roof' belongs to role 'house' in this cluster, to 'attic' in this process; write role=",
    ),
    (
        {"role": "house"},
        {},
        r"shards of entity type 'roof' by 'shardcake', this process by 'xxh3'; use the same shard",
    ),
    (
        {"role": "house", "shard_id": tenth},
        {},
        rf"by 'shardcake', this process by '{__name__}:tenth'",
    ),
]


@pytest.mark.scenario("RG-24")
@pytest.mark.parametrize(("keywords", "more", "why"), OTHERS)
def test_a_node_that_means_something_else_is_refused(
    url: str, keywords: dict[str, Any], more: dict[str, Any], why: str
) -> None:
    other = changed(**keywords)

    async def main() -> None:
        async with Node(url, entities=[Roof], settings=TWO) as first:
            before = await config(first)
            with pytest.raises(ConfigError, match=why):
                async with Node(url, entities=[other], **{"settings": TWO, **more}):
                    pass
            assert await config(first) == before, "a refused join leaves no trace"
            assert first.life is not None
            assert list(first.life.member.members.nodes) == [first.life.me]
            async with Node(url, entities=[Roof], settings=TWO):
                assert await first.ref(Roof, "r").ask(Roof.where) == "r"

    asyncio.run(main())


@pytest.mark.scenario("RG-24")
@pytest.mark.parametrize(
    ("keywords", "why"),
    [
        ({"role": "attic", "shard_id": shardcake}, r"role 'house' in this cluster, to 'attic' in"),
        ({"role": "house"}, r"'roof' by 'shardcake', this process by 'xxh3'"),
    ],
)
def test_a_sender_that_means_something_else_is_told_so(
    url: str, keywords: dict[str, Any], why: str
) -> None:
    other: Any = changed(**keywords)

    async def main() -> None:
        async with (
            Node(url, entities=[Roof], settings=TWO) as node,
            connect(url, settings=TWO) as client,
        ):
            for sender in (client, node):
                for _ in range(2):
                    with pytest.raises(NotExecuted, match=why):
                        await sender.ref(other, "r").ask(other.where)
                assert await sender.ref(Roof, "r").ask(Roof.where) == "r"

    asyncio.run(main())


@pytest.mark.scenario("RG-24")
@pytest.mark.parametrize("seed", range(12))
def test_members_that_join_at_once_with_different_types_both_end_in_it(seed: int) -> None:
    async def body(sim: Sim) -> None:
        item = sim.servers.store.peek(CONFIG_KEY)
        assert item is not None
        assert decode_record(item.value, ConfigRecord) == ConfigRecord(
            {"default": 8, "garden": 8, "house": 8},
            types={
                "lot": TypeRecord("default", f"{__name__}:tenth"),
                "roof": TypeRecord("house", "shardcake"),
                "tree": TypeRecord("garden"),
                "wall": TypeRecord("house", "murmur2"),
            },
        )
        assert await sim.ref(Tree, "t").ask(Tree.shade, "r") == "t over r"

    sim = Sim(
        seed,
        entities=[Wall, Roof, Tree, Lot],
        nodes=3,
        settings=FEW,
        homes={0: [Wall, Roof], 1: [Tree], 2: [Lot]},
    )
    run_simulation(sim, body)


@pytest.mark.scenario("SM-28")
@pytest.mark.scenario("RG-24")
def test_roles_may_have_their_own_number_of_shards(url: str) -> None:
    async def main() -> None:
        counts = {"garden": 5, "unused": 9}
        async with (
            Node(url, entities=[Roof, Tree], shards=counts, settings=TWO) as one,
            Node(url, entities=[Tree], shards=counts, settings=TWO) as other,
            connect(url, settings=TWO) as client,
        ):
            assert (await config(one)).shards == {"garden": 5, "house": 2}
            for sender in (one, other, client):
                for number in range(20):
                    assert await sender.ref(Tree, f"t{number}").ask(Tree.where) == f"t{number}"
            assert one.life is not None
            homes = [one.life.member.map.get(ShardKey("garden", number)) for number in range(6)]
            assert [entry.state for entry in homes] == ["serving"] * 5 + ["free"]

    asyncio.run(main())


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "8"])
def test_a_number_of_shards_that_is_none_is_refused(count: Any) -> None:
    with pytest.raises(ConfigError, match=r"shards=\{'garden'"):
        Node("memory://none", entities=[Tree], shards={"garden": count}, settings=TWO)


async def config(node: Node) -> ConfigRecord:
    """What the store holds."""
    assert node.life is not None
    item = await node.life.member._store.get(CONFIG_KEY)
    assert item is not None
    return decode_record(item.value, ConfigRecord)
