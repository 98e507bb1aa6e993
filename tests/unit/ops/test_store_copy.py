"""A cluster is copied from one store to another: what is copied, refused, raised and repeated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster_lab import A, B, Stored, contents, healthy, node, serving
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from domicile import ConfigError, Entity, Node, handler
from domicile.backends.memory import MEMORY
from domicile.backends.registry import Backend
from domicile.backends.sqlite import SQLITE
from domicile.backends.wiring import WholeStore
from domicile.core.ids import ShardKey
from domicile.core.state.keys import (
    MOVED_KEY,
    REWOUND_KEY,
    block_key,
    node_key,
    trial_key,
    wish_key,
)
from domicile.core.state.shardmap import Block, Entry, decode_block, encode_block
from domicile.core.state.txn import (
    MAX_COMMIT_BYTES,
    MAX_OPERATIONS,
    Committed,
    Condition,
    Item,
    Outcome,
    Put,
    Unknown,
    Write,
    check_limits,
)
from domicile.errors import StoreUnavailable
from domicile.failover.records import (
    GroupConfig,
    GroupPhase,
    GroupState,
    ServerRecord,
    config_key,
    encode_group_record,
    loss_sum_key,
    past_key,
    receipt_key,
    server_key,
    state_key,
)
from domicile.ops.cli import app
from domicile.ops.store import copy as store_copy
from domicile.ops.store.copy import ClusterCopy, CopyRefused, batches, planned, reopen
from domicile.ports.store import Store
from domicile.stores.memory.store import MemoryStore
from domicile.stores.namespace import Namespace
from domicile.stores.sqlite.store import SqliteStore
from domicile.testing.sim.clock import ManualClock


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DOMICILE_STORE", raising=False)
    monkeypatch.chdir(tmp_path)


def domicile(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["store", *arguments])


def block(*entries: Entry) -> bytes:
    return encode_block(Block("t", entries))


def items(**values: bytes) -> list[Item]:
    return [Item(key.encode(), value, 1, 1) for key, value in sorted(values.items())]


class Places:
    """Two stores of one kind or two, both of which other clients may use."""

    def __init__(self, directory: Path, kinds: tuple[str, str]) -> None:
        self._directory = directory
        self._kinds = kinds
        self._shared = {0: MemoryStore(ManualClock()), 1: MemoryStore(ManualClock())}
        self._opened: list[Store] = []

    def whole(self, number: int, wrapped: type | None = None) -> WholeStore:
        kind = self._kinds[number]
        store: Store
        backend: Backend = MEMORY if kind == "memory" else SQLITE
        if kind == "memory":
            store, url = self._shared[number].client("tool"), f"memory://{number}"
        else:
            path = self._directory / f"{number}.db"
            store, url = SqliteStore(path, by="tool"), f"sqlite:///{path}"
        self._opened.append(store)
        return WholeStore(url, backend, store if wrapped is None else wrapped(store), None)

    async def close(self) -> None:
        for store in self._opened:
            await store.close()

    async def fill(self, number: int, values: dict[bytes, bytes], cluster: str = "c") -> None:
        store = Namespace(self.whole(number).store, cluster)
        for key, value in values.items():
            assert isinstance(await store.commit([], [Put(key, value)]), Committed)

    async def values(self, number: int, cluster: str = "c") -> dict[bytes, bytes]:
        listing = await Namespace(self.whole(number).store, cluster).list(b"")
        return {
            item.key: item.value for item in listing.items if not item.key.startswith(b"audit/")
        }

    async def copy(
        self, *, back: bool = False, replace: bool = False, target: type | None = None, **more: Any
    ) -> store_copy.CopyDone:
        first, second = (1, 0) if back else (0, 1)
        copy = ClusterCopy(
            self.whole(first), self.whole(second, target), "c", replace=replace, wait_s=0.0, why="",
            told=lambda what, done, total: None, **more,
        )  # fmt: skip
        return await copy.run()


PAIRS = [("memory", "memory"), ("memory", "sqlite"), ("sqlite", "memory"), ("sqlite", "sqlite")]


@asynccontextmanager
async def places(
    tmp_path: Path, kinds: tuple[str, str] = ("memory", "memory")
) -> AsyncIterator[Places]:
    opened = Places(tmp_path, kinds)
    try:
        yield opened
    finally:
        await opened.close()


WHOLE = {
    b"config": b'{"shards":{"default":3}}',
    block_key("default", 0): block(serving(A, 4), serving(B, 2), Entry()),
    wish_key(ShardKey("default", 1)): b"node-a",
    trial_key(A): b'{"trials":[]}',
    b"unknown/to/this/version": bytes(range(256)),
}


@pytest.mark.parametrize("kinds", PAIRS)
def test_all_keys_arrive_on_every_pair_of_stores(tmp_path: Path, kinds: tuple[str, str]) -> None:
    async def main() -> None:
        async with places(tmp_path, kinds) as stores:
            await stores.fill(0, {**WHOLE, b"dead/x": b"proof", b"stuck/x": b"", b"rewound": b"x"})
            await stores.fill(0, {b"config": b"other"}, cluster="d")
            done = await stores.copy()
            assert (done.keys, done.removed, done.shards, done.epoch) == (6, 0, 3, 4)
            there = await stores.values(1)
            assert there.pop(REWOUND_KEY), "the coordinator waits for a ttl before it places"
            assert there == WHOLE
            assert await stores.values(1, "d") == {}
            assert MOVED_KEY in await stores.values(0)

    asyncio.run(main())


def test_large_stores_are_copied_in_commits_within_the_limits() -> None:
    writes: list[Write] = [Put(b"k%d" % n, bytes(300_000)) for n in range(7)]
    writes += [Put(b"s%d" % n, b"") for n in range(200)]
    made = batches(writes)
    assert [write for batch in made for write in batch] == writes
    assert [len(batch) for batch in made] == [3, 3, 63, 63, 63, 12]
    for batch in made:
        check_limits([], batch)
        assert len(batch) < MAX_OPERATIONS
        assert sum(len(write.value) for write in batch if isinstance(write, Put)) < MAX_COMMIT_BYTES


# epochs


counts = st.integers(0, 5)


@given(
    st.lists(st.tuples(counts, counts), max_size=5), st.lists(st.tuples(counts, counts), max_size=5)
)
@settings(max_examples=50)
def test_no_epoch_and_no_change_is_below_either_store(
    source: list[tuple[int, int]], target: list[tuple[int, int]]
) -> None:
    def stored(counts: list[tuple[int, int]]) -> bytes:
        return block(*[Entry(A, epoch, "serving", change=change) for epoch, change in counts])

    there = items(**{"map/r/00000": stored(target)})
    (write,) = planned(items(**{"map/r/00000": stored(source)}), there) or [
        Put(b"", stored(target))
    ]
    assert isinstance(write, Put)
    entries = decode_block(write.value).entries
    assert len(entries) == max(len(source), len(target))
    for known in (source, target):
        for entry, (epoch, change) in zip(entries, known, strict=False):
            assert entry.epoch >= epoch
            assert entry.change >= change


def test_a_cluster_that_goes_back_and_forth_never_lowers_an_epoch(tmp_path: Path) -> None:
    key = block_key("default", 0)

    async def epochs(stores: Places, number: int) -> list[int]:
        return [entry.epoch for entry in decode_block((await stores.values(number))[key]).entries]

    async def main() -> None:
        async with places(tmp_path) as stores:
            await stores.fill(0, WHOLE)
            await stores.copy()
            await stores.fill(1, {key: block(serving(B, 9), serving(B, 1), Entry())})
            with pytest.raises(CopyRefused, match="say --replace"):
                await stores.copy(back=True)
            with pytest.raises(CopyRefused, match="what is in memory://0 is the past"):
                await stores.copy(replace=True)
            done = await stores.copy(back=True, replace=True)
            assert done.removed == 0
            assert await epochs(stores, 0) == [9, 2, 0]
            assert MOVED_KEY not in await stores.values(0)
            with pytest.raises(CopyRefused, match="was moved from memory://1 to memory://0"):
                await reopen_refused(stores)

    async def reopen_refused(stores: Places) -> None:
        there = stores.whole(1)
        other = WholeStore("memory://2", MEMORY, MemoryStore(ManualClock()).client("x"), None)
        await ClusterCopy(
            there, other, "c", replace=False, wait_s=0.0, why="", told=lambda *all: None
        ).run()

    asyncio.run(main())


def test_what_only_the_target_had_is_removed_but_its_map_and_log_stay() -> None:
    there = items(**{
        "map/r/00001": block(serving(A, 7)), "audit/1": b"{}", "wish/r/1": b"x", "moved": b"{}",
    })  # fmt: skip
    assert [write.key for write in planned([], there)] == [b"wish/r/1"]


# what is in the way


def test_registered_processes_are_named(tmp_path: Path) -> None:
    record = b'{"node":"web-1","incarnation":"%s","address":"x","roles":[],"types":[],"ttl_s":6}'

    async def main() -> None:
        for number in (0, 1):
            async with places(tmp_path) as stores:
                await stores.fill(0, WHOLE)
                if number:
                    await stores.fill(1, WHOLE)
                await stores.fill(number, {node_key(A): record % A.encode(), b"leader": b"{}"})
                with pytest.raises(CopyRefused) as told:
                    await stores.copy(replace=True)
                assert "node web-1" in str(told.value)
                assert f"memory://{number}" in str(told.value)
                assert MOVED_KEY not in await stores.values(0)

    asyncio.run(main())


def test_records_of_killed_processes_are_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        clock = ManualClock()
        shared = MemoryStore(clock)
        store = shared.client("n")
        await store.grant("l", 5.0)
        await store.commit([], [Put(b"c/config", b"x"), Put(b"c/nodes/" + A.encode(), b"?", "l")])
        said: list[str] = []

        def told(what: str, done: int, total: int) -> None:
            said.append(what)
            clock.advance(1.0)

        source = WholeStore("memory://a", MEMORY, shared.client("tool"), None)
        async with places(tmp_path) as stores:
            copy = ClusterCopy(
                source, stores.whole(1), "c", replace=False, wait_s=60.0, why="", told=told
            )
            assert (await copy.run()).keys == 2
        assert said[0].startswith(
            f"waiting 60 s at most for node nodes/{A}: stop what runs; records of"
        )

    asyncio.run(main())


# replica groups


def group_state(epoch: int, origin: str = "data") -> bytes:
    return encode_group_record(
        GroupState(phase=GroupPhase.SERVING, epoch=epoch, origin=origin, primary=A, served=epoch)
    )


GROUP = {
    config_key("or/ders"): encode_group_record(GroupConfig(driver="valkey")),
    state_key("or/ders"): group_state(4),
    receipt_key("or/ders", 3, "b"): b"{}",
    loss_sum_key("or/ders"): b"{}",
    past_key("or/ders", 4): b"{}",
}
AGENT_KEY = server_key("or/ders", "a/1", A)
AGENT = encode_group_record(
    ServerRecord(server="a/1", incarnation=A, address="10.0.0.1:6379", ttl_s=3.0)
)


@pytest.mark.parametrize("number", [0, 1])
def test_agents_of_replica_groups_are_in_the_way_of_a_copy(tmp_path: Path, number: int) -> None:
    """The mark would fence them, and their guards would close databases that serve."""

    async def main() -> None:
        async with places(tmp_path) as stores:
            await stores.fill(0, WHOLE)
            await stores.fill(1, WHOLE)
            await stores.fill(number, {AGENT_KEY: AGENT})
            with pytest.raises(CopyRefused) as told:
                await stores.copy(replace=True)
            assert "the agent of server 'a/1' of group 'or/ders'" in str(told.value)
            assert "an agent that stops closes its server" in str(told.value)
            for whichever in (0, 1):
                assert MOVED_KEY not in await stores.values(whichever)

    asyncio.run(main())


def test_a_group_arrives_but_no_record_of_an_agent(tmp_path: Path) -> None:
    async def main() -> None:
        async with places(tmp_path) as stores:
            await stores.fill(0, {**WHOLE, **GROUP})
            await stores.copy()
            there = await stores.values(1)
            there.pop(REWOUND_KEY)
            assert there == {**WHOLE, **GROUP}

    asyncio.run(main())
    source = [Item(AGENT_KEY, AGENT, 1, 1), Item(state_key("or/ders"), group_state(4), 1, 1)]
    assert [write.key for write in planned(source, [])] == [state_key("or/ders")]
    # Keys of a group's that a later version may add are none of an agent's.
    assert planned([Item(b"group/x/servers", b"", 1, 1)], []) == [Put(b"group/x/servers", b"")]


def test_an_agent_that_was_killed_is_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        clock = ManualClock()
        shared = MemoryStore(clock)
        store = shared.client("agent")
        await store.grant("server-a", 3.0)
        for key, value in GROUP.items():
            await store.commit([], [Put(b"c/" + key, value)])
        await store.commit([], [Put(b"c/" + AGENT_KEY, AGENT, "server-a")])
        source = WholeStore("memory://a", MEMORY, shared.client("tool"), None)
        async with places(tmp_path) as stores:
            copy = ClusterCopy(
                source, stores.whole(1), "c", replace=False, wait_s=60.0, why="",
                told=lambda *all: clock.advance(1.0),
            )  # fmt: skip
            await copy.run()
            there = await stores.values(1)
            assert there.pop(REWOUND_KEY)
            assert there == GROUP

    asyncio.run(main())


def test_a_group_that_went_on_in_the_target_is_not_put_back(tmp_path: Path) -> None:
    """Its servers have histories of the epochs that the source lacks (F8)."""

    async def main() -> None:
        async with places(tmp_path) as stores:
            await stores.fill(0, {**WHOLE, **GROUP})
            await stores.fill(1, {state_key("or/ders"): group_state(5)})
            with pytest.raises(CopyRefused, match=r"group 'or/ders' .* at epoch 5, .* at epoch 4"):
                await stores.copy(replace=True)
            assert MOVED_KEY not in await stores.values(0)
            assert (await stores.values(1))[state_key("or/ders")] == group_state(5)

    asyncio.run(main())


def test_a_process_that_joins_meanwhile_ends_the_copy_and_nothing_stays(tmp_path: Path) -> None:
    class Joins:
        """A source in which a process registers right after the mark."""

        def __init__(self, store: Store) -> None:
            self._store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
            outcome = await self._store.commit(conditions, writes)
            if any(write.key == b"c/moved" and isinstance(write, Put) for write in writes):
                await self._store.commit([], [Put(b"c/nodes/" + A.encode(), b"?")])
            return outcome

    async def main() -> None:
        async with places(tmp_path) as stores:
            await stores.fill(0, WHOLE)
            copy = ClusterCopy(
                stores.whole(0, Joins), stores.whole(1), "c", replace=False, wait_s=0.0, why="",
                told=lambda *all: None,
            )  # fmt: skip
            with pytest.raises(CopyRefused, match="joined cluster 'c'"):
                await copy.run()
            assert MOVED_KEY not in await stores.values(0)
            assert await stores.values(1) == {}

    asyncio.run(main())


def test_one_store_under_two_names_is_noticed(tmp_path: Path) -> None:
    async def main() -> None:
        shared = MemoryStore(ManualClock())
        one, other = (
            WholeStore(f"memory://{name}", MEMORY, shared.client("tool"), None) for name in "ab"
        )
        await one.store.commit([], [Put(b"c/config", b"x")])
        copy = ClusterCopy(
            one, other, "c", replace=True, wait_s=0.0, why="", told=lambda *all: None
        )
        with pytest.raises(CopyRefused, match="are the same store"):
            await copy.run()
        assert shared.peek(b"c/moved") is None

    asyncio.run(main())


# faults


class Flaky:
    """A target that fails, at first, or loses its answers."""

    def __init__(self, store: Store) -> None:
        self._store, self._asked = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        self._asked += 1
        outcome = await self._store.commit(conditions, writes)
        return Unknown() if self._asked % 2 else outcome


class Breaks(Flaky):
    """A target that is away after some commits."""

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        self._asked += 1
        if self._asked > 2:
            raise StoreUnavailable("away, as the test wants it")
        return await self._store.commit(conditions, writes)


def test_lost_answers_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_copy, "RETRY_S", 0.0)

    async def main() -> None:
        async with places(tmp_path) as stores:
            await stores.fill(0, WHOLE)
            await stores.copy(target=Flaky)
            there = await stores.values(1)
            there.pop(REWOUND_KEY)
            assert there == WHOLE

    asyncio.run(main())


def test_a_copy_that_broke_off_keeps_processes_away_and_is_repeated(tmp_path: Path) -> None:
    more = {b"wish/default/%d" % n: b"x" for n in range(200)}

    async def main() -> None:
        async with places(tmp_path) as stores:
            await stores.fill(0, {**WHOLE, **more})
            with pytest.raises(StoreUnavailable):
                await stores.copy(target=Breaks)
            half = await stores.values(1)
            assert b"config" in half
            assert len(half) < 200
            assert json.loads(half[MOVED_KEY])["direction"] == "from"
            with pytest.raises(CopyRefused, match="unfinished copy"):
                await reopen(stores.whole(1), "c", "")
            assert (await stores.copy()).keys > 0
            there = await stores.values(1)
            there.pop(REWOUND_KEY)
            assert there == {**WHOLE, **more}
            await reopen(stores.whole(0), "c", "")
            assert await stores.values(0) == {**WHOLE, **more}

    asyncio.run(main())


# the commands


def test_the_command_copies_says_so_and_processes_refuse_the_old_store(tmp_path: Path) -> None:
    url = Stored(shards={"default": [serving(A, 3)] * 100}).write(tmp_path / "a.db")
    to = f"sqlite:///{tmp_path / 'b.db'}"
    done = domicile("copy", url, to, "--why", "new machine")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        "domicile: 4 keys written, 0 removed, 100 shards with epochs up to 3; compared, all equal",
        f"Start the processes with {to}; they refuse {url} now.",
    ]
    (audit,) = [
        json.loads(value) for key, value in contents(tmp_path / "a.db").items() if b"audit" in key
    ]
    assert (audit["command"], audit["why"]) == ("store copy", "new machine")

    class Lamp(Entity, name="copy.lamp"):
        @handler
        async def on(self) -> bool:
            return True

    async def start(store: str) -> bool:
        async with Node(store, entities=[Lamp]) as it:
            return await it.ref(Lamp, "l").ask(Lamp.on)

    with pytest.raises(ConfigError, match="was moved to the store sqlite:"):
        asyncio.run(start(url))
    assert domicile("copy", to, url).exit_code == 1
    assert domicile("reopen", url, "--yes").exit_code == 0
    again = domicile("reopen", url, "--yes")
    assert again.exit_code == 1
    assert "was not moved" in again.stderr


def test_what_the_command_needs_to_know(tmp_path: Path) -> None:
    url = Stored(shards={"default": []}).write(tmp_path / "a.db", "blue")
    Stored(shards={"default": []}).write(tmp_path / "a.db", "green")
    to = f"sqlite:///{tmp_path / 'b.db'}"
    for arguments, code, words in (
        ((url, url), 2, "same store"),
        ((url, to), 2, "holds blue, green"),
        ((url, to, "--all", "--cluster", "blue"), 2, "not both"),
        ((url, to, "--cluster", "red"), 3, "no cluster 'red'"),
        ((f"sqlite:///{tmp_path / 'none.db'}", to), 3, "there is no store"),
        ((url, "memory://x"), 3, "lives inside one process"),
        ((url, "sqlite:x"), 2, "known kinds"),
    ):
        found = domicile("copy", *arguments)
        assert (found.exit_code, words in found.stderr) == (code, True), found.output
    done = domicile("copy", url, to, "--all", "--json")
    assert [one["cluster"] for one in json.loads(done.stdout)] == ["blue", "green"]


def test_a_running_cluster_is_not_copied(tmp_path: Path) -> None:
    url = healthy().write(tmp_path / "a.db")
    found = domicile("copy", url, f"sqlite:///{tmp_path / 'b.db'}", "--wait", "0")
    assert found.exit_code == 1
    assert "node node-a, node node-b" in found.stderr
    assert node(A).node == "node-a"
