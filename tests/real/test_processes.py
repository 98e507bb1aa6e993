"""The harness: real processes do what its verbs say, and its histories can be judged."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from domicile import ConfigError, Entity, Settings, handler
from domicile.core.ids import Incarnation, ShardKey
from domicile.core.state.keys import MAP
from domicile.stores.sqlite.store import QueuedCommit
from domicile.testing import Event, HarnessError, Processes, check
from domicile.testing.checkers.reading import STARVED
from domicile.testing.history import History
from domicile.testing.processes.history import SLACK_S, RealHistory, merge
from domicile.testing.processes.member_process import ImportPath, import_class, import_path
from domicile.testing.processes.member_signals import standing_still
from domicile.testing.processes.recorder import read_records

ROLE = "default"


class Bell(Entity, name="bell"):
    """Rings."""

    @handler
    async def ring(self) -> int:
        return os.getpid()

    @handler
    async def toll(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return self.epoch


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def pids(cluster: Processes) -> list[int]:
    return [node.process.pid for node in cluster.nodes if node.process is not None]


def done_to(history: History) -> list[Event]:
    """The faults that the test brought; a busy machine may have starved it, too."""
    return [event for event in history.of("fault") if event.fields["fault"] != STARVED]


def id_at(cluster: Processes, node: int) -> str:
    return next(id for n in range(400) if cluster.owner(Bell, id := f"b{n}") == node)


# verbs


def homes(cluster: Processes) -> list[int]:
    """How many shards each node is home to."""
    owners = [cluster.entry(ShardKey(ROLE, n)).owner for n in range(cluster.settings.shards)]
    return [
        0 if inc is None else owners.count(inc)
        for inc in (cluster.incarnation(node.index) for node in cluster.nodes)
    ]


async def go_through_everything(cluster: Processes) -> dict[str, Incarnation]:
    """Every verb once; the incarnations that went through it, by what was done to them."""
    done: dict[str, Incarnation] = {}

    def incarnation(node: int) -> Incarnation:
        found = cluster.incarnation(node)
        assert found is not None
        return found

    await cluster.wait_until(lambda: homes(cluster) == [2, 2, 2] and cluster.settled())
    processes = pids(cluster)
    for node in range(3):
        bell = cluster.ref(Bell, id_at(cluster, node)).options(timeout_s=9.5)
        assert await bell.ask(Bell.ring) == processes[node]

    leader = cluster.leader()
    assert leader is not None
    moved, crashed = [node for node in range(3) if node != leader]
    bell = id_at(cluster, moved)
    shard = cluster.shard(Bell, bell)
    before = cluster.entry(shard)
    assert before.owner == incarnation(moved)
    done["moved from"], done["moved to"] = incarnation(moved), incarnation(leader)
    await cluster.wish(shard, leader)
    await cluster.wait_until(lambda: cluster.settled() and cluster.owner(Bell, bell) == leader)
    assert cluster.entry(shard).epoch == before.epoch + 1
    assert await cluster.ref(Bell, bell).ask(Bell.ring) == processes[leader]
    await cluster.wish(shard, None)

    done["frozen"] = incarnation(moved)
    cluster.freeze(moved)
    assert standing_still(processes[moved])
    cluster.thaw(moved)
    await cluster.wait_until(lambda: not standing_still(processes[moved]))
    assert await cluster.ref(Bell, id_at(cluster, moved)).ask(Bell.ring) == processes[moved]

    done["crashed"] = incarnation(crashed)
    cluster.crash(crashed)
    assert not alive(processes[crashed])
    assert cluster.incarnation(crashed) is None
    with pytest.raises(HarnessError, match="not running"):
        cluster.crash(crashed)
    await cluster.wait_until(cluster.settled)
    cluster.start(crashed)
    with pytest.raises(HarnessError, match="is running"):
        cluster.start(crashed)
    await cluster.wait_until(lambda: cluster.incarnation(crashed) not in (None, done["crashed"]))

    await cluster.drain(moved)
    await cluster.wait_until(lambda: homes(cluster)[moved] == 0 and cluster.settled())
    await cluster.undrain(moved)
    await cluster.wait_until(lambda: homes(cluster)[moved] > 0 and cluster.settled())

    done["stopped"] = incarnation(leader)
    await cluster.stop(leader)
    assert not alive(processes[leader])
    await cluster.wait_until(lambda: cluster.settled() and cluster.leader() is not None)
    assert cluster.leader() != leader
    with pytest.raises(HarnessError, match="no node 3"):
        cluster.freeze(3)
    return done


class Told:
    """What a run of all verbs left behind."""

    def __init__(self) -> None:
        # A lease that a busy machine leaves to everybody: here only verbs end incarnations.
        settings = Settings(shards=6, ttl_s=20.0)
        cluster = Processes([Bell], nodes=3, settings=settings)

        async def scenario() -> None:
            async with cluster:
                self.directory = cluster.directory
                self.done = await go_through_everything(cluster)
                self.during = cluster.history()
                self.counts = [cluster.counts(node) for node in range(3)]
                self.pids = pids(cluster)

        asyncio.run(scenario())
        self.history = cluster.history()

    def events(self) -> list[Event]:
        """A copy to tamper with."""
        return [Event(at, kind, dict(fields)) for at, kind, fields in self.during.events]


@pytest.fixture(scope="module")
def told() -> Told:
    return Told()


def test_a_run_of_all_verbs_is_sound(told: Told) -> None:
    assert check(told.during) == []
    assert check(told.history) == []


def test_a_cluster_that_ended_leaves_nothing_behind(told: Told) -> None:
    assert not told.directory.exists()
    assert [pid for pid in told.pids if alive(pid)] == []


def test_a_history_is_in_order_and_holds_everything(told: Told) -> None:
    events = told.history.events
    assert [event.at for event in events] == sorted(event.at for event in events)
    kinds = {event.kind for event in events}
    assert kinds >= {"life", "renewed", "ended", "gone", "taken", "commit", "expire", "leading"}
    assert kinds >= {"open", "draining", "released", "accept", "start", "finish", "reply"}
    assert kinds >= {"submit", "write", "outcome", "fault", "told"}
    assert len(events) > len(told.during.events)
    by = {event.fields["by"] for event in told.history.of("commit")}
    assert by == {"node-0", "node-1", "node-2", "client", "operator"}
    keys = [key for event in told.history.of("commit") for key, *_ in event.fields["puts"]]
    assert any(key.startswith(MAP) for key in keys), "the cluster's name is still in front"


def test_faults_name_what_they_were_done_to(told: Told) -> None:
    faults = [(event.fields["fault"], event.fields["inc"]) for event in done_to(told.during)]
    frozen, crashed = told.done["frozen"], told.done["crashed"]
    assert faults == [("freeze", frozen), ("thaw", frozen), ("crash", crashed)]
    _, _, _, last, *killed = [event.fields["fault"] for event in done_to(told.history)]
    assert last == "shutdown"
    assert {*killed} <= {"crash"}, "processes that a busy machine lets leave too slowly"


def test_a_node_that_was_stopped_ended_by_its_own_will(told: Told) -> None:
    ended = [event.fields["inc"] for event in told.during.of("ended")]
    assert ended == [told.done["stopped"]]


def test_counts_are_told_by_process(told: Told) -> None:
    buried = sum(counts["node.dead"] for counts in told.counts)
    assert buried == 1, "one process found the killed one dead"
    assert told.during.counts["node.dead"] == 1


# planted violations: a checker must find them in real histories, too

Tamper = Callable[[list[Event], dict[str, Incarnation]], None]


def position(events: list[Event], kind: str, **fields: object) -> int:
    for index, event in enumerate(events):
        if event.kind == kind and all(event.fields.get(k) == v for k, v in fields.items()):
            return index
    raise AssertionError(f"no {kind} with {fields}")


def the_release(events: list[Event], done: dict[str, Incarnation]) -> int:
    """Of the shard that was moved; others may have been handed over when nodes joined."""
    return next(
        index
        for index, event in enumerate(events)
        if event.kind == "released"
        and event.fields["inc"] == done["moved from"]
        and opened_after(events, event, done["moved to"])
    )


def opened_after(events: list[Event], released: Event, inc: Incarnation) -> int:
    """Where the next home of a released shard opened it; 0 if that was another one."""
    shard, epoch = released.fields["shard"], released.fields["epoch"] + 1
    names = {"inc": inc, "shard": shard, "epoch": epoch}
    return next(
        (
            index
            for index, event in enumerate(events)
            if event.kind == "open" and names.items() <= event.fields.items()
        ),
        0,
    )


def run_at_the_old_home(events: list[Event], done: dict[str, Incarnation]) -> None:
    """The first handler after a move runs where the shard was before."""
    released = the_release(events, done)
    shard = events[released].fields["shard"]
    starts = [
        index
        for index, event in enumerate(events)
        if event.kind == "start" and event.fields["shard"] == shard and index > released
    ]
    again = events[starts[0]]
    events.insert(starts[0] + 1, again._replace(fields={**again.fields, "inc": done["moved from"]}))


def forget_a_release(events: list[Event], done: dict[str, Incarnation]) -> None:
    del events[the_release(events, done)]


def forget_a_commit(events: list[Event], done: dict[str, Incarnation]) -> None:
    """The one that gave the moved shard away: its new home opens by nobody's word."""
    opened = opened_after(events, events[the_release(events, done)], done["moved to"])
    last = max(
        index
        for index, event in enumerate(events[:opened])
        if event.kind == "commit" and any(put[0].startswith(MAP) for put in event.fields["puts"])
    )
    del events[last]


def write_the_map_by_another(events: list[Event], done: dict[str, Incarnation]) -> None:
    index = next(
        index
        for index, event in enumerate(events)
        if event.kind == "commit" and any(put[0].startswith(MAP) for put in event.fields["puts"])
    )
    events[index].fields["by"] = "operator"


def take_a_frame_twice(events: list[Event], done: dict[str, Incarnation]) -> None:
    index = position(events, "taken")
    events.insert(index, events[index])


def start_twice(events: list[Event], done: dict[str, Incarnation]) -> None:
    index = position(events, "finish")
    start = events[position(events, "start", sender=events[index].fields["sender"])]
    events.insert(index + 1, start._replace(at=events[index].at))


def drop_an_ask(events: list[Event], done: dict[str, Incarnation]) -> None:
    submit = events[position(events, "submit", timeout=9.5)].fields
    names = {name: submit[name] for name in ("inc", "role", "shard", "n")}
    del events[position(events, "outcome", **names)]
    # Long enough that nobody can still be waiting for it.
    events.append(Event(events[-1].at + 60.0, "handed", {"bytes": 1}))


def stop_an_entity_after_the_release(events: list[Event], done: dict[str, Incarnation]) -> None:
    index = the_release(events, done)
    fields = {**events[index].fields, "sender": "", "n": 0, "type": "bell", "id": "x"}
    events.insert(index + 1, Event(events[index].at, "stopped", fields))


def start_past_the_deadline(events: list[Event], done: dict[str, Incarnation]) -> None:
    """By a node that was killed long ago, as if it had run on."""
    inc = done["crashed"]
    start = events[position(events, "start", inc=inc)]
    until = max(
        event.fields["sent_at"] + event.fields["ttl"] - event.fields["margin"]
        for event in events
        if event.kind == "renewed" and event.fields["inc"] == inc
    )
    late = {**start.fields, "id": "late", "sender": "", "n": -1}
    events.append(Event(until + 1.0, "start", late))


def fence_too_late(events: list[Event], done: dict[str, Incarnation]) -> None:
    inc = done["crashed"]
    until = max(
        event.fields["sent_at"] + event.fields["ttl"] - event.fields["margin"]
        for event in events
        if event.kind == "renewed" and event.fields["inc"] == inc
    )
    events.append(Event(until + 0.6, "fenced", {"inc": inc, "reason": "deadline passed"}))


@pytest.mark.parametrize(
    ("rule", "tamper"),
    [
        ("I1a", forget_a_release),
        ("I1a", write_the_map_by_another),
        ("I1b", take_a_frame_twice),
        ("I1c", run_at_the_old_home),
        ("I3", forget_a_commit),
        ("I5", start_twice),
        ("I6", drop_an_ask),
        ("H9", stop_an_entity_after_the_release),
        ("L3", start_past_the_deadline),
        ("L3", fence_too_late),
    ],
)
def test_a_planted_violation_is_found_in_a_real_history(
    told: Told, rule: str, tamper: Tamper
) -> None:
    events = told.events()
    tamper(events, told.done)
    found = check(RealHistory(events, told.during.counts))
    lost = [event for event in events if event.kind == "fenced"]
    assert rule in {violation.rule for violation in found}, f"these lost their leases: {lost}"


# what goes wrong


def test_an_entity_that_others_cannot_import_is_refused() -> None:
    class Inner(Entity, name="inner"):
        pass

    with pytest.raises(ConfigError, match="Inner cannot be imported by another process"):
        Processes([Inner])


def test_an_entity_of_the_program_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bell, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Bell", Bell, raising=False)
    with pytest.raises(ConfigError, match="__main__:Bell cannot be imported"):
        Processes([Bell])


def test_a_class_is_found_by_its_file_if_not_by_its_name(tmp_path: Path) -> None:
    path = import_path(Bell)
    assert import_class(path) is Bell
    file = tmp_path / "odd name.py"
    file.write_text(
        "from domicile import Entity\nclass A:\n    class B(Entity, name='b'): pass\n", "utf-8"
    )
    try:
        found = import_class(ImportPath("a_module_of_no_package", str(file), "A.B"))
        assert found.__qualname__ == "A.B"
    finally:
        sys.modules.pop("a_module_of_no_package", None)


def test_a_missing_module_within_an_entitys_module_is_told(tmp_path: Path) -> None:
    file = tmp_path / "needs_more.py"
    file.write_text("import a_module_that_nobody_has\n", "utf-8")
    try:
        with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
            import_class(ImportPath("needs_more", str(file), "A"))
    finally:
        sys.modules.pop("needs_more", None)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [({"nodes": 0}, "at least 1"), ({"loop": "curio"}, "loop='curio' is not known")],
)
def test_options_are_checked_at_once(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Processes([Bell], **options)


def test_a_cluster_that_is_not_started_says_so() -> None:
    cluster = Processes([Bell])
    with pytest.raises(HarnessError, match="async with"):
        cluster.settled()
    with pytest.raises(HarnessError, match="async with"):
        cluster.owner(Bell, "b")


def test_a_history_ends_where_it_was_asked_for() -> None:
    """What was read later than the rest is left out: its causes were not read."""
    put = (b"one/leader", b"x", "lease")
    log = [
        QueuedCommit(1, 1.0, "node-0", [put, (b"other/leader", b"y", None)], [b"one/a"], False),
        QueuedCommit(2, 2.0, "node-1", [], [b"one/leader", b"other/leader"], True),
        QueuedCommit(3, 4.0, "node-1", [put], [], False),
    ]
    recorded = [Event(3.0, "start", {}), Event(1.0, "open", {}), Event(3.1, "finish", {})]
    history = merge(log, recorded, Counter(), "one", 3.0)
    told = {"by": "node-0", "revision": 1, "puts": [(b"leader", b"x", "lease")], "deletes": [b"a"]}
    assert history.events == [
        Event(1.0, "commit", told),
        Event(1.0, "open", {}),
        Event(2.0, "expire", {"revision": 2, "deletes": [b"leader"]}),
        Event(3.0, "start", {}),
    ]


def test_a_store_that_has_forgotten_commits_is_not_judged() -> None:
    cluster = Processes([Bell])
    cluster._ended = True
    cluster._commits = {n: QueuedCommit(n, float(n), "node-0", [], [], False) for n in (1, 2, 3)}
    assert len(cluster.history().events) == 3
    del cluster._commits[1]
    with pytest.raises(HarnessError, match="forgotten"):
        cluster.history()


BROKEN = """
import os
from domicile import Entity
if "DOMICILE_TEST_BROKEN" in os.environ:
    raise RuntimeError("this module only works in the parent")
class Broken(Entity, name="broken"):
    pass
"""


def test_a_node_that_does_not_start_is_shown_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_entities.py").write_text(BROKEN, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("broken_entities")
    monkeypatch.setenv("DOMICILE_TEST_BROKEN", "1")
    cluster = Processes([module.Broken], nodes=1, directory=tmp_path / "cluster")

    async def scenario() -> None:
        async with cluster:
            raise AssertionError("it must not start")

    try:
        with pytest.raises(HarnessError, match="only works in the parent") as told:
            asyncio.run(scenario())
        assert str(tmp_path / "cluster") in told.value.__notes__[0]
        assert not any(node.up for node in cluster.nodes)
    finally:
        del sys.modules["broken_entities"]


def test_a_body_that_raises_leaves_logs_and_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a frozen process does not outlive it either."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cluster = Processes([Bell], nodes=1, settings=Settings(shards=2))

    async def scenario() -> None:
        async with cluster:
            assert cluster.directory.parent == tmp_path
            cluster.freeze(0)
            with pytest.raises(AssertionError, match=r"did not hold within 0.05 s"):
                await cluster.wait_until(lambda: False, timeout_s=0.05)
            raise ZeroDivisionError("the body's own")

    with pytest.raises(ZeroDivisionError, match="the body's own") as told:
        asyncio.run(scenario())
    assert told.value.__notes__ == [
        f"logs, records and the store of the processes are in {cluster.directory}"
    ]
    assert (cluster.directory / "node-0.1.log").exists()
    recorded = list(read_records(cluster.directory / "node-0.1.events"))
    assert {event.kind for event in recorded} >= {"life", "renewed", "open"}
    assert [pid for pid in pids(cluster) if alive(pid)] == []
    faults = [event.fields["fault"] for event in done_to(cluster.history())]
    assert faults == ["freeze", "shutdown", "crash"]


def test_without_records_the_verbs_still_work(tmp_path: Path) -> None:
    cluster = Processes(
        [Bell], nodes=2, settings=Settings(shards=2), record=False, directory=tmp_path
    )

    async def scenario() -> None:
        async with cluster:
            await cluster.ref(Bell, "b").ask(Bell.ring)
            victim = cluster.incarnation(0)
            cluster.crash(0)
            cluster.start(0)
            assert cluster.incarnation(0) is None, "the dead process's record is not the new one's"
            await cluster.wait_until(lambda: cluster.incarnation(0) is not None)
            assert cluster.incarnation(0) != victim
            await cluster.wait_until(cluster.settled)
            assert cluster.counts(1) == {}
            kinds = {event.kind for event in cluster.history().events}
            assert kinds == {"commit", "expire", "fault"} or kinds == {"commit", "fault"}
            [crash] = done_to(cluster.history())
            assert crash.fields == {"fault": "crash", "node": 0, "inc": victim}
            # Releases are in the records, so nobody can tell here whether there was one (C4).
            found = [one for one in check(cluster.history()) if "(C4)" not in one.message]
            assert found == []

    asyncio.run(scenario())
    assert not list(tmp_path.glob("*.events"))
    assert (tmp_path / "store.db").exists(), "a given directory is the caller's"


def test_a_history_says_when_the_machine_did_not_let_the_test_run(tmp_path: Path) -> None:
    """A client of the test may lose its lease by that, and no checker may blame it."""
    cluster = Processes([Bell], nodes=1, settings=Settings(shards=2), directory=tmp_path)

    def felt(since: float, until: float) -> bool:
        faults = cluster.history().of("fault")
        spans = [(one.at, one.fields["until"]) for one in faults if one.fields["fault"] == STARVED]
        return any(start < until and since < end for start, end in spans)

    async def scenario() -> None:
        async with cluster:
            since = cluster.now()
            time.sleep(2 * SLACK_S)  # noqa: ASYNC251
            until = cluster.now()
            await cluster.wait_until(lambda: felt(since, until))
            assert check(cluster.history()) == []

    asyncio.run(scenario())


PARENT = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = {path!r}
from {module} import Bell
from domicile import Settings
from domicile.testing import Processes

async def main():
    settings, directory = Settings(shards=2), Path({directory!r})
    async with Processes([Bell], nodes=2, settings=settings, directory=directory) as cluster:
        cluster.freeze(1)
        print(*(node.process.pid for node in cluster.nodes), flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a killed parent is not noticed")
def test_nothing_outlives_a_killed_test_run(tmp_path: Path) -> None:
    program = PARENT.format(path=sys.path, module=__name__, directory=str(tmp_path))
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        children = [int(word) for word in parent.stdout.readline().split()]
        assert len(children) == 2
        assert all(alive(pid) for pid in children)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.communicate()

    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.01)
