"""The campaign: what it makes of one seed, when it fails, and what it prints."""

from __future__ import annotations

import gc
import logging
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, Self

import pytest

from domicile.testing.checkers import Violation
from domicile.testing.history import History
from proving import campaign
from proving.campaign import Result, main, run_seed, run_seeds
from proving.coverage import (
    EVERYWHERE,
    FAULTS,
    MANY,
    RARE,
    SHORTER,
    STEPS,
    report,
    shortfalls,
    totals,
)
from proving.fault_plan import Fault, Mischief
from proving.profile import Profile
from proving.profiles import MIXED, PROFILES, profile_of
from proving.profiles.spec import LEAST_MOVES
from proving.seed_result import LEAST_FAULTS, LEAST_MESSAGES, MID_MOVE, Tally

KINDS = PROFILES["standard"].kinds
GONE = "I6 broken at 3.000000: gone"


@pytest.fixture(autouse=True)
def _loud_again() -> Iterator[None]:
    """A campaign silences the runtime's log for its whole process."""
    logger = logging.getLogger("domicile")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(scope="module")
def one() -> Result:
    """Seed 3, run and judged once for all tests that only look."""
    return run_seed(3)


def made_up(seed: int, **changed: Any) -> Result:
    """A seed that went through everything, unless told otherwise."""
    known: dict[str, Any] = {
        "messages": LEAST_MESSAGES,
        "faults": Counter(KINDS),
        "struck": Counter(STEPS),
        "hits": Counter((kind, step) for kind in KINDS for step in (*STEPS, MID_MOVE)),
        "moves": LEAST_MOVES,
        "mid_move": True,
        "digest": f"{seed:032x}",
    }
    return Result(seed, Tally(**{**known, **changed}), cpu_s=0.25)


def bad(seed: int) -> Result:
    result = made_up(seed)
    result.violations = [GONE]
    return result


def broken(seed: int) -> Result:
    result = made_up(seed)
    result.error = "ValueError: what now"
    return result


# --- one seed


def test_a_seed_is_run_and_judged(one: Result) -> None:
    assert one.seed == 3
    assert one.ok
    assert one.violations == []
    assert one.error == ""
    assert 0 < one.cpu_s < 30
    tally = one.tally
    assert tally.messages >= LEAST_MESSAGES
    assert sum(tally.faults.values()) >= LEAST_FAULTS
    assert tally.moves >= LEAST_MOVES
    assert re.fullmatch(r"[0-9a-f]{32}", tally.digest)
    assert shortfalls([one], whole=False) == []


def test_the_same_seed_gives_the_same_result(one: Result) -> None:
    assert run_seed(3).tally == one.tally


def test_another_seed_gives_another_history(one: Result) -> None:
    other = run_seed(4)
    assert other.violations == []
    assert other.tally.digest != one.tally.digest
    for tally in (one.tally, other.tally):
        # A name that the campaign does not ask for would never be missed.
        assert sorted({*tally.faults} - {*FAULTS}) == []
        assert sorted({*tally.struck} - {*STEPS, *RARE, MID_MOVE}) == []
        assert tally.mid_move == (MID_MOVE in tally.struck)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_seed_leaves_the_garbage_collector_as_it_was(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Profile, "run", _at_once)
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        run_seed(0)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()


@pytest.mark.parametrize("seed", range(4))
def test_a_world_that_ended_in_the_middle_of_its_calls_is_forgotten(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """No cycle runs through what the collector does not look at (`gc=False`)."""
    caplog.set_level(logging.CRITICAL, "domicile")  # what is logged keeps frames
    run = Profile(seed, profile_of("mixed", seed))
    history = weakref.ref(run.sim.history)
    campaign.judge(run)
    run.sim.close()
    del run
    gc.collect()
    assert history() is None


async def _at_once(_: Profile) -> None:
    """A profile that does nothing."""


async def _fails(_: Profile) -> None:
    raise ValueError("what now")


async def _leaves_an_error(run: Profile) -> None:
    def fail() -> None:
        raise ValueError("nobody looks")

    loop = run.sim.nodes[1].loop
    assert loop is not None
    loop.post(fail)
    await run.sim.advance(0.1)


@pytest.mark.parametrize(
    ("run", "error"),
    [
        (_at_once, "^$"),
        (_fails, "^ValueError: what now$"),
        (_leaves_an_error, r"^node-1\.1: Exception in callback .*ValueError\('nobody looks'\)$"),
    ],
)
def test_an_error_makes_a_seed_bad(
    run: Callable[[Profile], Any], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Profile, "run", run)
    result = run_seed(0)
    assert re.search(error, result.error)
    assert result.ok is (run is _at_once)
    assert result.violations == []
    assert result.tally.digest


def _objects(_: History) -> list[Violation]:
    return [Violation("I6", 3.0, "gone")]


def test_a_violation_makes_a_seed_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Profile, "run", _at_once)
    monkeypatch.setattr(campaign, "check", _objects)
    result = run_seed(0)
    assert result.violations == [GONE]
    assert not result.ok


# --- what is missing


def test_seeds_that_went_through_everything_miss_nothing() -> None:
    assert shortfalls([made_up(seed) for seed in range(3)], whole=True) == []


@pytest.mark.parametrize(
    ("changed", "missing"),
    [
        ({"messages": 999}, "seed 7: 999 messages, at least 1000 wanted"),
        ({"faults": Counter(cut=4)}, "seed 7: 4 faults, at least 5 wanted"),
        ({"moves": 9}, "seed 7: 9 completed moves, at least 10 wanted"),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_a_seed_that_falls_short_is_named(
    changed: dict[str, Any], missing: str, whole: bool
) -> None:
    assert shortfalls([made_up(6), made_up(7, **changed), made_up(8)], whole) == [missing]


def test_a_seed_that_falls_short_of_all_is_named_for_each() -> None:
    assert len(shortfalls([Result(1, Tally(), 0.0), Result(2, Tally(), 0.0)], whole=False)) == 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_fault_that_no_seed_had_fails_a_whole_run(kind: str) -> None:
    without = Counter(name for name in KINDS if name != kind)
    results = [made_up(seed, faults=without) for seed in range(3)]
    assert shortfalls(results, whole=True) == [f"no seed had the fault {kind!r}"]
    assert shortfalls(results, whole=False) == []
    assert shortfalls([*results, made_up(3)], whole=True) == []


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_no_fault_struck_fails_a_whole_run(step: str) -> None:
    without = Counter(name for name in STEPS if name != step)
    results = [made_up(seed, struck=without) for seed in range(3)]
    assert shortfalls(results, whole=True) == [f"no fault struck {step!r}"]
    assert shortfalls(results, whole=False) == []
    assert shortfalls([*results, made_up(3)], whole=True) == []


def test_hand_off_states_and_coordinator_steps_are_asked_for() -> None:
    assert [step for step in STEPS if step.startswith("moving, owner ")] == [
        "moving, owner draining",
        "moving, owner gone",
        "moving, owner open",
        "moving, owner released",
    ]
    assert sum(step.startswith("coordinator ") for step in STEPS) == 7


@pytest.mark.parametrize(("struck", "enough"), [(3, True), (2, False), (0, False)])
def test_too_few_seeds_with_a_fault_in_a_hand_off_fail_a_whole_run(
    struck: int, enough: bool
) -> None:
    results = [made_up(seed, mid_move=seed < struck) for seed in range(10)]
    wanted = [f"only {struck * 10}% of seeds had a fault in a hand-off with mail"]
    assert shortfalls(results, whole=True) == ([] if enough else wanted)
    assert shortfalls(results, whole=False) == []


# --- what is told


def test_totals_add_up() -> None:
    results = [
        made_up(0, faults=Counter(cut=2, crash=1), struck=Counter({"home lost": 1})),
        made_up(1, faults=Counter(cut=3), struck=Counter({"home lost": 4})),
    ]
    faults, struck = totals(results)
    assert faults == {"cut": 5, "crash": 1}
    assert struck == {"home lost": 5}
    assert results[0].tally.faults == {"cut": 2, "crash": 1}, "the seeds' own counts stay"


def test_the_report_tells_every_kind_and_step_hit_or_not() -> None:
    results = [
        made_up(
            0,
            messages=1500,
            faults=Counter(cut=1234, surprise=1),
            struck=Counter(),
            hits=Counter({("cut", "home lost"): 77}),
        ),
        made_up(1, messages=1600, faults=Counter(cut=1), mid_move=False),
        made_up(2, messages=1, faults=Counter(), mid_move=False),
    ]
    results[2].cpu_s = 1.5
    page = report(results, wall_s=61.7, verbose=True)
    assert page.splitlines()[:3] == [
        "3 seeds in 62 s; CPU per seed: median 0.25 s, most 1.50 s",
        "messages 3,101, completed moves 30, faults 1,236",
        "seeds with a fault in a hand-off with mail in flight: 33%",
    ]
    rows = dict(reversed(row) for row in re.findall(r"^ +([\d,]+)  (.+)$", page, re.MULTILINE))
    assert sorted(rows) == sorted({*KINDS, *STEPS, "surprise"})
    assert rows["cut"] == "1,235"
    assert rows["crash"] == "0"
    assert rows["surprise"] == "1"
    assert rows["home lost"] == "2"
    cells = next(line for line in page.splitlines() if re.match(r" +cut +\d+ ", line)).split()
    assert cells[1 + STEPS.index("home lost")] == "79"
    assert "profiles: standard 3" in page


def test_a_few_seeds_are_summed_up_on_one_screen() -> None:
    results = [made_up(seed, faults=Counter(cut=2, crash=1)) for seed in range(5)]
    results[3].violations.append("I1: two homes")
    page = report(results, wall_s=2.0).splitlines()
    assert len(page) < 24
    assert "bad seeds: 1" in page
    assert "faults by kind: 10 cut, 5 crash" in page
    whole = report(results, wall_s=2.0, verbose=True)
    assert whole.splitlines()[:5] == page[:5], "the summary comes first"
    assert "faults by kind and step:" in whole
    assert "faults by kind and step:" in report(results * 20, wall_s=2.0)


def test_a_report_of_nothing_is_still_a_page() -> None:
    assert report([], 0.0).startswith("0 seeds in 0 s")


# --- many seeds


class Pool:
    """A pool of processes that does its work in this one, and only when asked for results."""

    def __init__(self, run: Callable[[int], Result]) -> None:
        self.run = run
        self.terminated = False
        self.jobs = 0

    def get_context(self, method: str) -> Self:
        assert method == "spawn", "a forked child would share this one's modules and their state"
        return self

    def Pool(self, jobs: int, initializer: Callable[[], object]) -> Self:  # noqa: N802
        assert initializer is campaign.begin_work
        self.jobs = jobs
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.terminate()

    def terminate(self) -> None:
        self.terminated = True

    def imap(
        self, _: Callable[[int], Result], seeds: Sequence[int], chunksize: int
    ) -> Iterator[Result]:
        assert chunksize >= 1
        for seed in seeds:
            assert not self.terminated
            yield self.run(seed)


def in_this_process(monkeypatch: pytest.MonkeyPatch, run: Callable[[int], Result]) -> Pool:
    pool = Pool(run)
    monkeypatch.setattr(campaign, "multiprocessing", pool)
    return pool


def ill_fated(seed: int) -> Result:
    """Seed 2 fails by an error, seed 4 breaks a rule."""
    return {2: broken, 4: bad}.get(seed, made_up)(seed)


@pytest.mark.parametrize(
    ("options", "ran"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),
        ({"stop_at_first": True}, [0, 1, 2]),
        ({"stop_at_first": True, "until_verdict": True}, [0, 1, 2, 3, 4]),
        ({"until_verdict": True}, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_seeds_run_in_order_until_a_bad_one_if_wanted(
    options: dict[str, bool], ran: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = in_this_process(monkeypatch, ill_fated)
    assert [result.seed for result in run_seeds(range(7), 2, **options)] == ran
    assert pool.jobs == 2
    assert pool.terminated


def test_progress_is_told_every_hundred_seeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_this_process(monkeypatch, ill_fated)
    run_seeds(range(250), 1)
    assert capsys.readouterr().err.splitlines() == [
        "100/250 seeds, 2 bad",
        "200/250 seeds, 2 bad",
    ]


# --- the command


def test_one_good_seed_in_a_process_of_its_own(
    capsys: pytest.CaptureFixture[str], one: Result
) -> None:
    assert main(["--seeds", "3:4", "--jobs", "1", "--profile", "standard"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 seeds in ")
    assert f"messages {one.tally.messages:,}, completed moves {one.tally.moves:,}, " in out
    assert out.endswith("\nzero violations\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--seeds", "5"], "--seeds '5' must look like 0:1000"),
        (["--seeds", "a:b"], "--seeds 'a:b' must look like 0:1000"),
        (["--seeds", "1:2:3"], "--seeds '1:2:3' must look like 0:1000"),
        (["--seeds", "4:4"], "nothing to run"),
        (["--seeds", "5:4"], "nothing to run"),
        (["--seeds", "0:1", "--jobs", "0"], "nothing to run"),
        (["--jobs", "many"], "invalid int value: 'many'"),
        (["--seeds", "0:1", "extra"], "unrecognized arguments: extra"),
        (["--seed", "0:1"], "invalid int value: '0:1'"),
        (["--seeds", "0:1", "--profile", "sunny"], "invalid choice: 'sunny'"),
        (["--seeds", "0:1", "--keep", "3"], "--keep is of one seed: give --seed too"),
        (["--seed", "3", "--keep", "x"], "--keep 'x' must look like 3,7, or be none"),
        (["--seed", "3", "--keep", "99"], "has no strike 99; it has "),
    ],
)
def test_a_command_that_makes_no_sense_is_refused(
    arguments: list[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    in_this_process(monkeypatch, lambda seed: pytest.fail(f"seed {seed} was run"))
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("usage: python -m proving.campaign")
    assert complaint in error


def test_a_failing_seed_is_one_line_to_repeat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(campaign, "check", _objects)
    in_this_process(monkeypatch, lambda seed: run_seed(seed, "standard"))
    assert main(["--seeds", "3:4", "--jobs", "1", "--whole"]) == 1
    out = capsys.readouterr().out
    told = out[out.index("\nseed 3 of standard is bad") :].splitlines()
    assert told[1:3] == ["seed 3 of standard is bad", f"  {GONE}"]
    assert re.fullmatch(r" +\d+\.\d{3} s  strike \d+: .+", told[3])
    command = "python -m proving.campaign --seed 3 --profile standard"
    assert told[-3] == f"repeat it with: {command}"
    assert told[-1] == "1 bad seeds"


def test_only_the_first_bad_seeds_and_violations_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def talkative(seed: int) -> Result:
        result = broken(seed)
        result.violations = [f"violation {number}" for number in range(9)]
        return result

    in_this_process(monkeypatch, talkative)
    assert main(["--seeds", "0:30"]) == 1
    out = capsys.readouterr().out
    assert re.findall(r"--seed (\d+) ", out) == [str(seed) for seed in range(10)]
    assert re.findall(r"violation (\d)", out) == ["0", "1", "2"] * 10
    assert out.count("ValueError: what now") == 10
    assert out.endswith("\n30 bad seeds\n")


def test_the_first_bad_seed_can_end_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_this_process(monkeypatch, ill_fated)
    assert main(["--seeds", "0:1000", "--first"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("3 seeds in ")
    assert "--seed 2 --profile standard" in out
    assert out.endswith("\n1 bad seeds\n")


def test_a_shortfall_fails_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_this_process(monkeypatch, lambda seed: made_up(seed, moves=9 + seed))
    assert main(["--seeds", "0:2"]) == 1
    out = capsys.readouterr().out
    assert "seed 0: 9 completed moves, at least 10 wanted" in out
    assert out.endswith("\nzero violations, 1 shortfalls\n")


@pytest.mark.parametrize(("seeds", "code"), [("0:99", 0), ("0:100", 1)])
def test_a_hundred_seeds_are_a_whole_run(
    seeds: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calm = Counter(name for name in KINDS if name != "crash")
    in_this_process(monkeypatch, lambda seed: made_up(seed, faults=calm))
    assert main(["--seeds", seeds]) == code
    assert ("no seed had the fault 'crash'" in capsys.readouterr().out) is bool(code)


def test_a_whole_run_that_went_through_everything_is_good(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = in_this_process(monkeypatch, made_up)
    assert main(["--seeds", "0:100", "--jobs", "200"]) == 0
    assert pool.jobs == 100, "no more processes than seeds"
    assert capsys.readouterr().out.endswith("\nzero violations\n")


# --- profiles


def test_mixed_takes_all_profiles_in_turn() -> None:
    assert [profile_of(MIXED, seed) for seed in range(len(PROFILES))] == list(PROFILES)
    assert profile_of(MIXED, len(PROFILES)) == "standard"
    assert profile_of("store", 5) == "store"


@pytest.mark.parametrize("name", [name for name in PROFILES if name != "standard"])
def test_a_seed_of_every_profile(name: str) -> None:
    result = run_seed(list(PROFILES).index(name), MIXED)
    assert result.profile == name
    assert (result.violations, result.error) == ([], "")
    assert shortfalls([result], whole=False) == []
    assert sorted({*result.tally.faults} - {*PROFILES[name].kinds, "cut", "crash"}) == []


def test_a_seed_on_a_store_that_commits_one_key() -> None:
    """S8: everything that the product commits is a commit of one key, or this raises."""
    result = run_seed(0, "one-key")
    assert (result.violations, result.error) == ([], "")
    assert shortfalls([result], whole=False) == []


def test_every_kind_of_fault_is_of_some_profile() -> None:
    assert sorted(FAULTS) == sorted({kind for spec in PROFILES.values() for kind in spec.kinds})


@pytest.mark.parametrize("count", [MANY - 1, MANY])
def test_many_seeds_must_strike_every_common_step_with_every_kind(count: int) -> None:
    hits = Counter((kind, step) for kind in KINDS for step in (*STEPS, MID_MOVE))
    gone = [("crash", EVERYWHERE[0]), ("crash", SHORTER[0]), ("stalled write", EVERYWHERE[1])]
    for pair in (*gone, ("stalled write", SHORTER[0]), ("crash", "coordinator listing")):
        del hits[pair]
    results = [made_up(seed, hits=hits) for seed in range(count)]
    wanted = [f"no seed had the fault {kind!r} at the step {step!r}" for kind, step in gone]
    assert shortfalls(results, whole=True) == (wanted if count == MANY else [])


def test_a_strike_that_is_left_out_changes_nothing_about_those_before_it(one: Result) -> None:
    last = one.strikes[-1]
    without = run_seed(3, skip=[last])
    assert without.strikes == one.strikes[:-1]
    before = [struck for struck in one.tally.strikes if struck.number != last]
    assert [struck for struck in without.tally.strikes if struck.at < before[-1].at] == before[:-1]
    assert last not in [struck.number for struck in without.tally.strikes]
    assert without.violations == []


def test_a_strike_that_is_left_out_changes_nothing_that_the_others_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def draw(m: Mischief, number: int, fault: Fault, random: Random) -> None:
        drawn[-1][number] = (m.sim.world.now, fault, random.random())

    drawn: list[dict[int, tuple[float, Fault, float]]] = []
    monkeypatch.setattr(Mischief, "_run", draw)
    for skip in ((), (1, 3)):
        drawn.append({})
        run = Profile(3, "network", skip)
        assert campaign.judge(run).error == ""
        run.sim.close()
    whole, part = drawn
    # An ambush strikes at the step that it waits for, and that may come at another time.
    timed = [strike.number for strike in run.mischief.plan if not strike.step]
    assert len(timed) >= 3
    kept = [number for number in timed if number not in (1, 3)]
    assert [part[number] for number in kept] == [whole[number] for number in kept]
    assert len({value for _, _, value in whole.values()}) == len(whole)


def test_a_seed_without_any_strike_is_calm(one: Result) -> None:
    calm = run_seed(3, skip=one.strikes)
    assert calm.ok
    assert calm.tally.strikes == []


def test_one_seed_tells_what_was_done_to_it(
    capsys: pytest.CaptureFixture[str], one: Result
) -> None:
    keep = one.strikes[1]
    arguments = ["--seed", "3", "--profile", "standard", "--keep", str(keep)]
    assert main(arguments) == 0
    first, *strikes = capsys.readouterr().out.splitlines()
    assert first == "seed 3 of standard: zero violations"
    assert {line.split("strike ")[1].split(":")[0] for line in strikes} == {str(keep)}
