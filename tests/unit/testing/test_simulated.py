"""`@simulated` as a test's author meets it: seeds, fixtures, verdicts and refusals."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from domicile import Entity, HandlerFailed, Settings, handler
from domicile.errors import ConfigError
from domicile.testing import Deadlock, InvariantBroken, Sim, SimulationError, simulated

FEW = Settings(shards=4)


class Bell(Entity, name="bell"):
    """Counts its strokes in memory."""

    strokes: int = 0

    @handler
    async def ring(self) -> int:
        self.strokes += 1
        return self.strokes

    @handler
    async def block(self) -> None:
        time.sleep(0)  # noqa: ASYNC251


@pytest.fixture(autouse=True)
def _all_seeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever runs one seed of these tests would change what they test. Timelines are written to
    the current directory."""
    monkeypatch.delenv("DOMICILE_SEED", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def bell_id() -> str:
    return "tower"


def notes(error: BaseException) -> list[str]:
    """What an error says of its seed. The command and the timeline are tested by themselves."""
    seed, timeline = getattr(error, "__notes__", ())
    assert timeline.startswith("timeline: .domicile/failed/")
    told, command, _ = seed.partition(" python -m pytest ")
    assert command
    return [told]


# --- what stays pytest's


@simulated(entities=[Bell], nodes=1, seeds=2, settings=FEW)
async def test_other_parameters_stay_fixtures(sim: Sim, bell_id: str) -> None:
    assert await sim.ref(Bell, bell_id).ask(Bell.ring) == 1, "every seed has a cluster of its own"


@simulated(entities=[Bell], nodes=1, seeds=1, settings=FEW)
async def test_the_cluster_may_stand_anywhere(bell_id: str, sim: Sim) -> None:
    assert isinstance(sim, Sim)
    assert bell_id == "tower"


@simulated(entities=[Bell], nodes=1, seeds=1, settings=FEW)
async def test_the_first_parameter_is_the_cluster_if_none_is_called_sim(
    cluster: Sim, bell_id: str
) -> None:
    assert isinstance(cluster, Sim)
    assert bell_id == "tower"


@pytest.mark.parametrize("strokes", [1, 3])
@simulated(entities=[Bell], nodes=1, seeds=1, settings=FEW)
async def test_parameters_may_be_parametrized(sim: Sim, strokes: int) -> None:
    for stroke in range(1, 1 + strokes):
        assert await sim.ref(Bell, "x").ask(Bell.ring) == stroke


class TestMethods:
    """Methods are simulated like functions."""

    answer = 1

    @simulated(entities=[Bell], nodes=1, seeds=2, settings=FEW)
    async def test_a_method(self, sim: Sim, bell_id: str) -> None:
        assert await sim.ref(Bell, bell_id).ask(Bell.ring) == self.answer

    @simulated(entities=[Bell], nodes=1, seeds=1, settings=FEW)
    async def test_a_method_with_a_cluster_of_another_name(self, cluster: Sim) -> None:
        assert isinstance(cluster, Sim)
        assert isinstance(self, TestMethods)


def test_a_simulated_test_keeps_its_name_and_words() -> None:
    @simulated(entities=[Bell])
    async def test_a_bell(sim: Sim) -> None:
        """Rings."""

    assert test_a_bell.__name__ == "test_a_bell"
    assert test_a_bell.__doc__ == "Rings."


def test_a_missing_argument_is_named_before_anything_runs() -> None:
    @simulated(entities=[Bell])
    async def body(sim: Sim, hour: int) -> None:
        pytest.fail("it ran")

    with pytest.raises(TypeError, match="'hour'"):
        body()  # type: ignore[call-arg]


def test_a_run_of_pytest_names_the_failing_seed(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(
        """
        import pytest
        from domicile import Settings
        from domicile.testing import simulated

        @pytest.fixture
        def unlucky():
            return 2

        class TestBells:
            @simulated(entities=[], nodes=1, seeds=4, settings=Settings(shards=4))
            async def test_bad(self, sim, unlucky):
                print(f"[seed {sim.seed}]")
                assert sim.seed != unlucky, "out of luck"

            @simulated(entities=[], nodes=1, seeds=4, settings=Settings(shards=4))
            async def test_good(self, sim): pass
        """
    )
    result = pytester.runpytest("-q", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*out of luck*",
            "E * seed 2: run it alone with DOMICILE_SEED=2 python -m pytest "
            "test_a_run_of_pytest_names_the_failing_seed.py::TestBells::test_bad",
        ]
    )
    result.stdout.fnmatch_lines(["[[]seed 0[]]", "[[]seed 1[]]", "[[]seed 2[]]"])
    result.stdout.no_fnmatch_line("*[[]seed 3[]]*")
    monkeypatch.setenv("DOMICILE_SEED", "2")
    result = pytester.runpytest("-q", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.no_fnmatch_line("*[[]seed 1[]]*")


FAILING = """
import asyncio
import pytest
from domicile import Entity, Rejection, Settings, handler
from domicile.testing import simulated

FEW = Settings(shards=4)

class Never(Rejection, name=__name__): pass

class Bell(Entity, name="failing.bell"):
    @handler
    async def ring(self) -> int:
        return 1
    @handler
    async def refuse(self) -> int:
        raise Never("ever")

@simulated(entities=[Bell], nodes=1, seeds=1, settings=FEW)
async def test_of_the_user(sim):
    assert await sim.ref(Bell, "x").ask(Bell.ring) == 2

@simulated(entities=[Bell], nodes=1, seeds=1, settings=FEW)
async def test_refused(sim):
    await sim.ref(Bell, "x").ask(Bell.refuse)

@simulated(entities=[Bell], nodes=1, seeds=1, settings=FEW)
async def test_late(sim):
    await sim.wait_until(lambda: False)

@simulated(entities=[Bell], nodes=1, seeds=1, settings=FEW)
async def test_stuck(sim):
    await asyncio.Event().wait()

@simulated(entities=[Bell], nodes=1, seeds=1, settings=FEW)
async def test_broken(sim):
    sim.history.event("outcome", inc="f" * 32, role="default", shard=0, n=9, outcome="ok")

@simulated(entities=[Bell], nodes=1, seeds=1, settings=FEW)
async def test_without_an_error(sim):
    with pytest.raises(KeyError):
        pass

@simulated(entities=[Bell], nodes=1, seeds=1, settings=FEW)
async def test_skipped(sim):
    pytest.skip("not today")
"""


def test_pytest_shows_the_lines_of_the_test_and_none_of_the_library(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(FAILING)
    for name in ("CI", "BUILD_NUMBER"):  # there pytest repeats whole errors in its summary
        monkeypatch.delenv(name, raising=False)
    # In a process of its own: handlers of the log that other tests left would write here.
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:logging")
    result.assert_outcomes(failed=6, skipped=1)
    shown = [line for line in result.outlines if not line.startswith(("E ", "    ", "FAILED"))]
    assert [line for line in shown if "domicile/" in line or "domicile\\" in line] == []
    result.stdout.fnmatch_lines([">       assert await sim.ref(Bell, *).ask(Bell.ring) == 2"])
    result.stdout.fnmatch_lines([">       await sim.ref(Bell, *).ask(Bell.refuse)"])
    result.stdout.fnmatch_lines([">       await sim.wait_until(lambda: False)"])
    result.stdout.fnmatch_lines(["E * I5 broken at *"])
    whole = pytester.runpytest("-p", "no:cacheprovider", "--full-trace", "-k", "of_the_user")
    whole.stdout.fnmatch_lines(["*simulated.py:*"])


def test_a_failing_seed_leaves_its_timeline_as_text_and_as_a_picture(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(FAILING)
    result = pytester.runpytest("-p", "no:cacheprovider")
    folder = pytester.path / ".domicile" / "failed"
    names = ("of_the_user", "refused", "late", "stuck", "broken", "without_an_error")
    found = sorted(path.name for path in folder.iterdir())
    assert len(found) == 2 * len(names)
    for name in names:
        [txt] = folder.glob(f"*-test_{name}-seed-0.txt")
        [svg] = folder.glob(f"*-test_{name}-seed-0.svg")
        stem = f".domicile/failed/{txt.stem}"
        result.stdout.fnmatch_lines([f"*timeline: {stem}.txt and .svg"])
        assert "leads" in txt.read_text(encoding="utf-8")
        assert svg.read_text(encoding="utf-8").startswith("<svg ")
    [told] = folder.glob("*-test_of_the_user-seed-0.txt")
    assert "ask failing.bell/x ring from the client, started at node-0" in told.read_text()
    [told] = folder.glob("*-test_broken-seed-0.txt")
    assert "! I5 broken: " in told.read_text()


def test_a_timeline_that_cannot_be_written_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / ".domicile").write_text("in the way")

    @simulated(entities=[], nodes=1, seeds=1, settings=FEW)
    async def body(sim: Sim) -> None:
        raise KeyError("own")

    with pytest.raises(KeyError, match="own") as caught:
        body()
    told = "\n".join(caught.value.__notes__)
    assert "seed 0: run it alone with DOMICILE_SEED=0" in told
    assert "no timeline: " in told


# --- seeds


def ran(seeds: int, *, fail_at: int | None = None) -> list[int]:
    """The seeds that a simulated test runs with, which fails at one of them if wanted."""
    found: list[int] = []

    @simulated(entities=[], nodes=1, seeds=seeds, settings=FEW)
    async def body(sim: Sim) -> None:
        found.append(sim.seed)
        assert sim.seed != fail_at, "out of luck"

    if fail_at is None:
        body()
    else:
        with pytest.raises(AssertionError, match="out of luck") as caught:
            body()
        assert notes(caught.value) == [f"seed {fail_at}: run it alone with DOMICILE_SEED={fail_at}"]
    return found


def test_every_seed_runs_until_one_fails() -> None:
    assert ran(3) == [0, 1, 2]
    assert ran(3, fail_at=1) == [0, 1]


@pytest.mark.parametrize("seed", [1, 0, 17])
def test_one_seed_can_run_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOMICILE_SEED", str(seed))
    assert ran(3) == [seed]
    assert ran(3, fail_at=seed) == [seed]


@pytest.mark.parametrize("value", ["", "-1", "one", "1:2", "1.5"])
def test_a_seed_that_is_no_number_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOMICILE_SEED", value)
    with pytest.raises(ConfigError, match="must be the number of one seed"):
        ran(3)


def test_a_seed_replays_event_for_event() -> None:
    digests: dict[int, list[str]] = {}

    @simulated(entities=[Bell], nodes=2, seeds=2, settings=FEW, rough=True)
    async def body(sim: Sim) -> None:
        await sim.ref(Bell, "x").ask(Bell.ring)
        await sim.advance(3.0)
        digests.setdefault(sim.seed, []).append(sim.history.digest())

    body()
    body()
    assert digests[0][0] == digests[0][1]
    assert digests[1][0] == digests[1][1]
    assert digests[0] != digests[1]


# --- refusals


@pytest.mark.parametrize("options", [{"seeds": 0}, {"seeds": -1}, {"nodes": -3}])
def test_a_decoration_that_would_run_nothing_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least 1, or nothing is run"):
        simulated(entities=[Bell], **options)


def test_a_test_that_is_not_async_is_refused() -> None:
    def body(sim: Sim) -> None:
        """Would pass without ever running."""

    with pytest.raises(TypeError, match="must be an `async def` function"):
        simulated(entities=[Bell])(body)  # type: ignore[call-overload]


def test_an_async_generator_is_refused() -> None:
    async def body(sim: Sim) -> AsyncIterator[None]:
        yield

    with pytest.raises(TypeError, match="must be an `async def` function"):
        simulated(entities=[Bell])(body)  # type: ignore[call-overload]


def test_a_test_without_room_for_the_cluster_is_refused() -> None:
    async def function() -> None: ...
    async def method(self: object) -> None: ...

    for body in (function, method):
        with pytest.raises(TypeError, match="needs a parameter for the cluster"):
            simulated(entities=[Bell])(body)  # type: ignore[call-overload]


# --- verdicts that the test did not ask for


def test_a_broken_invariant_fails_a_test_that_did_not_look() -> None:
    @simulated(entities=[Bell], nodes=1, seeds=3, settings=FEW)
    async def body(sim: Sim) -> None:
        await sim.ref(Bell, "x").ask(Bell.ring)
        if sim.seed == 1:
            answer = {"inc": "f" * 32, "role": "default", "shard": 0, "n": 9, "outcome": "ok"}
            sim.history.event("outcome", **answer)

    with pytest.raises(InvariantBroken, match=r"I5 broken at .* 9 .*never started") as caught:
        body()
    assert notes(caught.value) == ["seed 1: run it alone with DOMICILE_SEED=1"]


def test_only_the_first_violations_are_told() -> None:
    @simulated(entities=[], nodes=1, seeds=1, settings=FEW)
    async def body(sim: Sim) -> None:
        for n in range(9):
            lie = {"inc": "f" * 32, "role": "default", "shard": 0, "n": n, "outcome": "ok"}
            sim.history.event("outcome", **lie)

    with pytest.raises(InvariantBroken) as caught:
        body()
    assert str(caught.value).count("I5 broken at") == 5


def test_an_error_of_the_body_is_told_before_a_broken_invariant() -> None:
    @simulated(entities=[], nodes=1, seeds=1, settings=FEW)
    async def body(sim: Sim) -> None:
        lie = {"inc": "f" * 32, "role": "default", "shard": 0, "n": 1, "outcome": "ok"}
        sim.history.event("outcome", **lie)
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        body()


def test_an_error_that_nobody_caught_fails_a_test_that_did_not_look() -> None:
    @simulated(entities=[], nodes=2, seeds=1, settings=FEW)
    async def body(sim: Sim) -> None:
        def fail() -> None:
            raise ValueError("nobody looks")

        loop = sim.nodes[1].loop
        assert loop is not None
        loop.post(fail)
        await sim.advance(0.1)

    with pytest.raises(AssertionError, match=r"^node-1\.1: Exception in callback") as caught:
        body()
    assert isinstance(caught.value.__cause__, ValueError)
    assert notes(caught.value) == ["seed 0: run it alone with DOMICILE_SEED=0"]


def test_a_body_that_waits_for_ever_is_a_deadlock_that_shows_where() -> None:
    @simulated(entities=[Bell], nodes=1, seeds=1, settings=FEW)
    async def body(sim: Sim) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="main was not resumed for 300 virtual seconds") as caught:
        body()
    waits_in = str(caught.value).partition("main waits in:")[2].partition("process ")[0]
    assert "test_simulated.py" in waits_in
    assert "Event.wait" in waits_in
    assert notes(caught.value) == ["seed 0: run it alone with DOMICILE_SEED=0"]


@simulated(entities=[Bell], nodes=1, seeds=1, settings=FEW)
async def test_a_long_sleep_is_no_deadlock_and_takes_no_time(sim: Sim) -> None:
    began, slept_at = time.monotonic(), sim.world.now
    await sim.advance(1_000.0)
    assert sim.world.now == slept_at + 1_000.0
    assert time.monotonic() - began < 60
    assert await sim.ref(Bell, "x").ask(Bell.ring) == 1


# --- the real world


def _open_socket() -> object:
    return socket.socket()


def _start_thread() -> object:
    return threading.Thread(target=int, daemon=True).start()


def _sleep() -> object:
    return time.sleep(0)


REAL: list[tuple[Callable[[], object], str]] = [
    (_open_socket, "creating a socket is real I/O"),
    (_start_thread, "starting a thread is real I/O"),
    (_sleep, "use await asyncio.sleep"),
]


@pytest.mark.parametrize(("act", "complaint"), REAL)
def test_the_real_world_is_refused_in_a_body(act: Callable[[], object], complaint: str) -> None:
    @simulated(entities=[], nodes=1, seeds=2, settings=FEW)
    async def body(sim: Sim) -> None:
        act()

    with pytest.raises(SimulationError, match=complaint) as caught:
        body()
    assert notes(caught.value) == ["seed 0: run it alone with DOMICILE_SEED=0"]
    _sleep()  # outside all is as before


@simulated(entities=[Bell], nodes=1, seeds=1, settings=FEW)
async def test_the_real_world_is_refused_in_loops_too(sim: Sim) -> None:
    with pytest.raises(SimulationError, match="real I/O in a thread"):
        await asyncio.to_thread(int)
    with pytest.raises(SimulationError, match="real I/O on a socket"):
        await asyncio.open_connection("127.0.0.1", 9)


@simulated(entities=[Bell], nodes=1, seeds=1, settings=FEW)
async def test_the_real_world_is_refused_in_handlers(sim: Sim) -> None:
    with pytest.raises(HandlerFailed, match=r"SimulationError: time\.sleep is real I/O"):
        await sim.ref(Bell, "x").ask(Bell.block)


# --- the cluster's shape


@simulated(entities=[Bell], nodes=2, seeds=1, settings=FEW, candidates=[1])
async def test_only_candidates_coordinate(sim: Sim) -> None:
    assert len(sim.nodes) == 2
    assert sim.settings is FEW
    leaders = {event.fields["inc"] for event in sim.history.of("leading")}
    assert leaders == {sim.nodes[1].incarnation}


class Hammer:
    """What a belfry lends its bells."""

    weight = 7


class Belfry(Entity, name="belfry"):
    """Knows the hammer of its node."""

    @handler
    async def weigh(self) -> int:
        return self.resource(Hammer).weight


@asynccontextmanager
async def _hammers() -> AsyncIterator[Mapping[type[Any], Any]]:
    yield {Hammer: Hammer()}


@simulated(entities=[Belfry], nodes=2, seeds=1, settings=FEW, resources=_hammers)
async def test_every_node_has_the_resources(sim: Sim) -> None:
    for id in "abcdefgh":
        assert await sim.ref(Belfry, id).ask(Belfry.weigh) == 7
    assert {sim.owner(Belfry, id) for id in "abcdefgh"} == {0, 1}


def test_rough_weather_is_real_and_goes_unnoticed() -> None:
    weather: dict[int, list[str]] = {}

    @simulated(entities=[Bell], nodes=3, seeds=5, settings=FEW, rough=True)
    async def body(sim: Sim) -> None:
        for stroke in range(1, 26):
            assert await sim.ref(Bell, "x").ask(Bell.ring) == stroke
            await sim.advance(0.2)
        weather[sim.seed] = [event.fields["fault"] for event in sim.history.of("fault")]

    body()
    assert list(weather) == [0, 1, 2, 3, 4]
    assert all(weather.values()), "every seed had some"


@simulated(entities=[Bell], nodes=3, seeds=1, settings=FEW)
async def test_without_it_the_weather_is_fine(sim: Sim) -> None:
    await sim.advance(5.0)
    assert list(sim.history.of("fault")) == []
    assert sim.network.jitter_s == 0.0
