"""In which order, and when, what waits at a sender goes out: small rules of `sender`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from domicile.core.ids import EntityKey
from domicile.core.letter import Letter

Wanted = Callable[[Letter], bool]

FIRST_WAVE_S = 0.25
WAVE_STEP_MAX_S = 0.5
"""Waves never lie further apart: a long chain may need one for each of its steps (N5)."""


def number_of(letter: Letter) -> int:
    """What a queue is ordered by (H1)."""
    return letter.n


def is_nested(letter: Letter) -> bool:
    """Whether a running handler awaits it."""
    return letter.ask and bool(letter.chain)


def lane(queue: Sequence[Letter], wanted: Wanted) -> tuple[list[Letter], list[Letter]]:
    """What goes out, and what stays: wanted ones, behind all others to the same entity (N4)."""
    last: dict[EntityKey, int] = {}
    for letter in queue:
        if wanted(letter):
            last[letter.entity] = letter.n
    goes: list[Letter] = []
    stays: list[Letter] = []
    for letter in queue:
        (goes if letter.n <= last.get(letter.entity, 0) else stays).append(letter)
    return goes, stays


def next_wave(moving_since: float, now: float) -> float:
    """When queued asks of running handlers go to a draining shard next (N5)."""
    delay_s = FIRST_WAVE_S
    while moving_since + delay_s <= now:
        delay_s += min(delay_s, WAVE_STEP_MAX_S)
    return moving_since + delay_s
