"""What makes up a profile of a campaign. Data only."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from domicile.entity.model.entity import Entity
from domicile.settings import Settings
from proving.fault_plan import Fault
from proving.seed_result import SETTINGS

if TYPE_CHECKING:
    from proving.profile import Profile

LEAST_MOVES = 10


@dataclass(frozen=True)
class Spec:
    """One kind of weather: what can strike, how often, and what the cluster is like."""

    about: str
    faults: tuple[Fault, ...]
    """A fault that is named twice is twice as likely."""
    kinds: tuple[str, ...]
    """What its faults call themselves; each must occur in a campaign."""
    settings: Settings = SETTINGS
    one_key: bool = False
    """Whether the store commits one key at a time, so that leaders seal blocks (S8)."""
    locks: float = 0.15
    """The share of seeds in which all are on one machine, where a kernel proves deaths (L6)."""
    pace_s: tuple[float, float] = (0.8, 3.6)
    ambush: float = 0.6
    """The share of strikes that wait for a step of a hand-off."""
    least_moves: int = LEAST_MOVES
    prepare: Callable[[Profile], None] | None = None
    """Changes the cluster before it starts."""
    entities: tuple[type[Entity], ...] = ()
    """Types beside those of every seed."""
    load: Callable[[Profile], Coroutine[Any, Any, None]] | None = None
    """Runs beside the load of every seed."""
