"""Passivation policies against models that are slow and obvious."""

from __future__ import annotations

import tracemalloc
from bisect import bisect
from collections.abc import Callable, Iterable
from itertools import accumulate
from random import Random
from typing import Protocol

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from domicile.entity.hosting.policies import (
    LFU,
    LRU,
    MOST_COUNT,
    MRU,
    POLICIES,
    SAMPLE,
    SLRU,
    TOP,
    Policy,
    Sketch,
    TinyLFU,
    policy,
)
from domicile.errors import ConfigError

LIMIT = 10


def digest(key: int) -> int:
    return int(xxhash.xxh3_64_intdigest(b"%d" % key))


class Model(Protocol):
    """What a policy is compared with."""

    def touch(self, key: int) -> None: ...
    def forget(self, key: int) -> None: ...
    def order(self) -> list[int]: ...


class Recency:
    """Keys in a list, the longest unused first."""

    def __init__(self, *, last_first: bool = False) -> None:
        self.keys: list[int] = []
        self._last_first = last_first

    def touch(self, key: int) -> None:
        self.forget(key)
        self.keys.append(key)

    def forget(self, key: int) -> None:
        if key in self.keys:
            self.keys.remove(key)

    def order(self) -> list[int]:
        return self.keys[::-1] if self._last_first else list(self.keys)


class Segments:
    """Two lists: used once, and used again."""

    def __init__(self, limit: int) -> None:
        self.once: list[int] = []
        self.again: list[int] = []
        self._most = int(limit * 0.8) or 1

    def touch(self, key: int) -> None:
        if key in self.again:
            self.again.remove(key)
            self.again.append(key)
        elif key in self.once:
            self.once.remove(key)
            self.again.append(key)
            while len(self.again) > self._most:
                self.once.append(self.again.pop(0))
        else:
            self.once.append(key)

    def forget(self, key: int) -> None:
        for part in (self.once, self.again):
            if key in part:
                part.remove(key)

    def order(self) -> list[int]:
        return self.once + self.again


class Frequency:
    """Ranks with the time of their last change, sorted on demand."""

    def __init__(self) -> None:
        self.ranks: dict[int, tuple[int, int]] = {}
        self.floor = 0
        self.time = 0

    def touch(self, key: int) -> None:
        self.time += 1
        rank, _ = self.ranks.get(key, (0, 0))
        rank = min(rank + 1, self.floor + MOST_COUNT)
        self.ranks[key] = (max(rank, self.floor + 1), self.time)

    def forget(self, key: int) -> None:
        self.ranks.pop(key, None)

    def order(self) -> list[int]:
        if self.ranks:
            self.floor = max(self.floor, min(self.ranks.values())[0] - 1)
        return sorted(self.ranks, key=lambda key: self.ranks[key])


PAIRS: dict[str, tuple[Callable[[], Policy[int]], Callable[[], Model]]] = {
    "lru": (LRU, Recency),
    "mru": (MRU, lambda: Recency(last_first=True)),
    "slru": (lambda: SLRU(LIMIT), lambda: Segments(LIMIT)),
    "lfu": (LFU, Frequency),
}

steps = st.lists(
    st.tuples(st.sampled_from(("touch", "touch", "touch", "forget", "victims")), st.integers(0, 14))
)


@pytest.mark.parametrize("name", PAIRS)
@given(script=steps)
def test_a_policy_chooses_as_its_model_does(name: str, script: list[tuple[str, int]]) -> None:
    made, model = (make() for make in PAIRS[name])
    assert isinstance(model, Recency | Segments | Frequency)
    for step, key in script:
        if step == "touch":
            made.touch(key)
            model.touch(key)
        elif step == "forget":
            made.forget(key)
            model.forget(key)
        else:
            expected = model.order()
            assert made.victims(key) == expected[:key]
            assert len(made) == len(expected)


@pytest.mark.parametrize("name", POLICIES)
@given(script=steps)
def test_victims_are_residents_each_once_and_as_many_as_asked(
    name: str, script: list[tuple[str, int]]
) -> None:
    made = policy(name, LIMIT, digest)
    resident: dict[int, None] = {}
    for step, key in script:
        if step == "touch":
            made.touch(key)
            resident[key] = None
        elif step == "forget":
            made.forget(key)
            resident.pop(key, None)
        else:
            victims = made.victims(key)
            assert len(victims) == len(set(victims)) == min(key, len(resident))
            assert set(victims) <= resident.keys()
        assert len(made) == len(resident)


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_calls_give_the_same_victims(name: str) -> None:
    def run() -> list[list[int]]:
        random, made = Random(5), policy(name, LIMIT, digest)
        found: list[list[int]] = []
        for _ in range(500):
            made.touch(random.randrange(40))
            found.append(made.victims(len(made) - LIMIT))
            for key in found[-1]:
                made.forget(key)
        return found

    assert run() == run()


def test_nobody_has_to_go_while_nothing_is_over() -> None:
    for name in POLICIES:
        made = policy(name, LIMIT, digest)
        assert made.victims(3) == []
        made.touch(1)
        assert made.victims(0) == made.victims(-2) == []


def test_an_unknown_policy_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'fifo' must be one of 'lru', 'slru'"):
        policy("fifo", LIMIT, digest)


def test_what_was_hot_once_ages() -> None:
    made: LFU[int] = LFU()
    for _ in range(5 * MOST_COUNT):
        made.touch(0)
    for key in range(1, 100 * MOST_COUNT):
        made.touch(key)
        made.touch(key)
        if len(made) > 2:
            [victim] = made.victims(1)
            made.forget(victim)
            if victim == 0:
                return
    pytest.fail("the key that was hot long ago is never given up")


# the sketch


@given(uses=st.lists(st.integers(0, 60), max_size=150))
def test_a_sketch_never_counts_too_few(uses: list[int]) -> None:
    sketch = Sketch(16)
    for key in uses:
        sketch.add(digest(key))
    for key in uses:
        assert sketch.count(digest(key)) >= min(uses.count(key), TOP)


def test_a_sketch_is_about_right_and_forgets() -> None:
    sketch = Sketch(1_024)
    for key in range(1_024):
        for _ in range(key % 5):
            sketch.add(digest(key))
    wrong = sum(sketch.count(digest(key)) != key % 5 for key in range(1_024))
    assert wrong < 1_024 * 0.1
    size = len(sketch)
    for _ in range(SAMPLE * 1_024):
        sketch.add(digest(-1))
    assert max(sketch.count(digest(key)) for key in range(1_024)) <= 3
    assert len(sketch) == size


# what they are for


def zipf(random: Random, keys: int, uses: int) -> list[int]:
    """Some keys are asked for far more often than others."""
    weights = list(accumulate(1 / (rank + 1) for rank in range(keys)))
    return [bisect(weights, random.random() * weights[-1]) for _ in range(uses)]


def hits(made: Policy[int], limit: int, trace: Iterable[int]) -> int:
    found = 0
    resident: dict[int, None] = {}
    for key in trace:
        found += key in resident
        resident[key] = None
        made.touch(key)
        for victim in made.victims(len(made) - limit):
            made.forget(victim)
            del resident[victim]
        assert len(resident) <= limit
    return found


def traces() -> dict[str, list[int]]:
    random = Random(3)
    popular = zipf(random, 2_000, 15_000)
    scanned: list[int] = []
    for at, key in enumerate(popular):
        scanned.append(key)
        if at % 3_000 == 2_999:
            scanned.extend(range(10_000 + at, 10_000 + at + 1_000))
    shifting = [key + 5_000 * (at // 5_000) for at, key in enumerate(popular)]
    return {"popular": popular, "scanned": scanned, "shifting": shifting}


@pytest.mark.parametrize("name", ["popular", "scanned"])
def test_the_composite_hits_at_least_as_often_as_plain_lru(name: str) -> None:
    trace = traces()[name]
    plain, composite = hits(LRU(), 200, trace), hits(TinyLFU(200, digest), 200, trace)
    assert composite >= plain


def test_the_composite_is_not_swept_out_by_a_scan() -> None:
    trace = traces()["scanned"]
    assert hits(TinyLFU(200, digest), 200, trace) > 1.1 * hits(LRU(), 200, trace)


def test_the_composite_learns_when_everything_changes_at_once() -> None:
    trace = traces()["shifting"]
    assert hits(TinyLFU(200, digest), 200, trace) > 0.9 * hits(LRU(), 200, trace)


def test_mru_keeps_what_a_scan_comes_round_to() -> None:
    trace = list(range(250)) * 10
    assert hits(LRU(), 200, trace) == 0
    assert hits(MRU(), 200, trace) > 1_000


@pytest.mark.parametrize("name", POLICIES)
def test_a_long_life_takes_no_more_memory(name: str) -> None:
    made = policy(name, 500, digest)

    def churn(first: int, count: int) -> None:
        for key in range(first, first + count):
            made.touch(key)
            made.touch(first + (key - first) // 2)
            for victim in made.victims(len(made) - 500):
                made.forget(victim)

    churn(0, 5_000)
    tracemalloc.start()
    try:
        churn(10_000, 5_000)
        before = tracemalloc.get_traced_memory()[0]
        churn(20_000, 20_000)
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert after - before < 100_000
