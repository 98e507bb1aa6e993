"""The long campaign: it goes on where it stopped, and with nothing but the code it began with."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from proving import long
from proving.campaign import Result
from proving.long import State, code_digest, load, main, save
from proving.profiles import PROFILES, profile_of
from proving.seed_result import Tally


def made_up(seed: int) -> Result:
    kinds = Counter({kind: 1 for spec in PROFILES.values() for kind in spec.kinds})
    hits = Counter({(kind, "home lost"): 1 for kind in kinds})
    struck = Counter({"home lost": 2})
    tally = Tally(1_000, kinds, struck, hits, [], 10, True, "")
    return Result(seed, tally, 0.25, profile=profile_of("mixed", seed))


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds that were run, in this process and by nobody."""
    ran: list[int] = []

    def stream(
        wanted: Sequence[int], jobs: int, profile: str, chunk: int
    ) -> Generator[Result, None, None]:
        assert profile == "mixed"
        for seed in wanted:
            ran.append(seed)
            yield made_up(seed)

    monkeypatch.setattr(long, "stream_seeds", stream)
    return ran


def test_it_runs_all_and_counts(
    seeds: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "state.json"
    assert main(["--until", "100", "--state", str(path)]) == 0
    assert seeds == list(range(100))
    state = load(path)
    assert state is not None
    assert (state.next_seed, state.messages, state.mid_move) == (100, 100_000, 100)
    assert state.struck == {"home lost": 200}
    out = capsys.readouterr().out
    assert "40/100 seeds, 0 bad, about " in out
    assert "100 of 100 seeds; CPU per seed 0.25 s" in out
    assert [file.name for file in path.parent.iterdir()] == ["state.json"]


def test_it_goes_on_where_it_stopped(
    seeds: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "state.json"
    main(["--until", "80", "--state", str(path)])
    first = capsys.readouterr().out
    assert "going on" not in first
    assert main(["--until", "120", "--state", str(path)]) == 0
    assert seeds == list(range(120))
    assert "going on from seed 80" in capsys.readouterr().out
    state = load(path)
    assert state is not None
    assert state.messages == 120_000
    assert main(["--until", "120", "--state", str(path)]) == 0
    assert len(seeds) == 120


@pytest.mark.parametrize("at", [0, 1, 39, 40, 41, 99])
def test_a_stop_at_any_seed_loses_and_repeats_nothing_in_the_tallies(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stream(
        wanted: Sequence[int], jobs: int, profile: str, chunk: int
    ) -> Generator[Result, None, None]:
        for seed in wanted:
            if seed == at and not stopped:
                stopped.append(seed)
                raise KeyboardInterrupt
            yield made_up(seed)

    stopped: list[int] = []
    monkeypatch.setattr(long, "stream_seeds", stream)
    path = tmp_path / "state.json"
    arguments = ["--until", "100", "--state", str(path)]
    assert main(arguments) == 0
    assert "stopped; go on with: python -m proving.long" in capsys.readouterr().out
    state = load(path)
    assert (state.next_seed if state else 0) == at // 40 * 40
    assert main(arguments) == 0
    state = load(path)
    assert state is not None
    assert (state.next_seed, state.messages) == (100, 100_000)


def test_other_code_is_refused_unless_wanted(
    seeds: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "state.json"
    save(path, State("another", next_seed=7))
    arguments = ["--until", "9", "--state", str(path)]
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert "the source has changed since" in capsys.readouterr().err
    assert seeds == []
    assert main([*arguments, "--other-code"]) == 0
    assert seeds == [7, 8]
    state = load(path)
    assert state is not None
    assert state.code == code_digest()


def test_a_file_that_is_none_of_its_own_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "state.json"
    for text in ("{", json.dumps({"x": 1})):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(SystemExit):
            main(["--state", str(path)])
        assert "is not the state of a long campaign" in capsys.readouterr().err
        assert path.read_text(encoding="utf-8") == text


def test_a_bad_seed_is_told_kept_and_fails_the_campaign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stream(
        wanted: Sequence[int], jobs: int, profile: str, chunk: int
    ) -> Generator[Result, None, None]:
        for seed in wanted:
            result = made_up(seed)
            result.violations = ["I6 broken at 3.0: gone"] if seed == 5 else []
            yield result

    monkeypatch.setattr(long, "stream_seeds", stream)
    path = tmp_path / "state.json"
    assert main(["--until", "8", "--state", str(path)]) == 1
    state = load(path)
    assert state is not None
    profile = profile_of("mixed", 5)
    assert state.bad == [{"seed": 5, "profile": profile, "why": "I6 broken at 3.0: gone"}]
    out = capsys.readouterr().out
    assert f"--seed 5 --profile {profile}" in out
    assert "1 bad seeds, 0 seeds that fell short" in out


def test_the_digest_of_code_sees_every_change(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n", encoding="utf-8")
    first = code_digest(tmp_path)
    assert code_digest(tmp_path) == first
    (tmp_path / "a.py").write_text("x = 2\n", encoding="utf-8")
    second = code_digest(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({first, second, code_digest(tmp_path)}) == 3


def test_a_state_that_can_not_be_written_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    save(path, State("x", next_seed=3))

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(json, "dump", fail)
    with pytest.raises(OSError, match="disk full"):
        save(path, State("x", next_seed=4))
    monkeypatch.undo()
    state = load(path)
    assert state is not None
    assert state.next_seed == 3
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]
