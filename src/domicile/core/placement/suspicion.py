"""Which entity or shard is to blame for the deaths of its owners, and is put away (DX-20, DX-24).

The planner calls `judge`; owners ask `on_the_brink`. A death alone says nothing about a shard: it
counts against all shards of its node. Blame needs the owner's own record: an owner stores what it
has on trial before an entity of a shard that lost owners starts. The rules are:

- A shard that its dead owner had on trial is blamed; a shard that it did not have on trial is
  cleared of earlier blame.
- A shard that was blamed for all but the first two of `poison_deaths` deaths is *on the brink*. Its
  owner tries its entities one at a time, and names the entity.
- If the owner dies while it tries exactly one such entity, that entity is put away. If it tried
  more, nobody is: the next owner tries them one at a time again.

So an innocent entity is put away only if an unrelated crash hits its owner in the few milliseconds
of its own trial, soon after another crash that hit its shard's trial.
"""

from __future__ import annotations

from collections.abc import Sequence

from domicile.core.placement.model import RoleInput, fallen
from domicile.core.state.shardmap import INNOCENT, MOST_BARRED, Entry, Suspicion
from domicile.settings import Settings

TOGETHER = 2
"""Multiplier on `poison_deaths` while several owners die together, e.g. in a store outage: a
poisonous shard kills one owner at a time."""

FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 600.0


def blames_needed(poison_deaths: int) -> int:
    """Deaths in a row for which a shard must be blamed before it is put away. The first death of
    an owner can blame nobody, because only shards that lost owners are on trial."""
    return max(1, poison_deaths - 1)


def on_the_brink(entry: Entry, poison_deaths: int) -> bool:
    """Whether one more blame would put an entity of this shard away."""
    needed = blames_needed(poison_deaths)
    return entry.deaths >= needed and entry.blamed >= needed - 1


def pause_s(tries: int) -> float:
    """Seconds that a shard or an entity stays away when it was put away for the n-th time."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * (1 << min(max(0, tries - 1), 16)))


def tried_again(old: Suspicion, poison_deaths: int) -> Suspicion:
    """A pause is over: everything is served again, and the first further blame puts it away."""
    return Suspicion(poison_deaths, blames_needed(poison_deaths) - 1, old.tries)


def faded(old: Suspicion, recent_deaths: int) -> Suspicion:
    """The suspicion without deaths that are too old to count."""
    if recent_deaths:
        return old._replace(deaths=recent_deaths)
    return Suspicion(tries=old.tries if old.barred else 0, barred=old.barred)


def judge(
    part: RoleInput, homeless: Sequence[int], settings: Settings
) -> tuple[dict[int, Suspicion], dict[int, Suspicion]]:
    """By shard without a home: what then speaks against it. First the shards that may get a home,
    then those that are put away."""
    homes: dict[int, Suspicion] = {}
    away: dict[int, Suspicion] = {}
    fell = fallen(part, homeless)
    most, needed = settings.poison_deaths, blames_needed(settings.poison_deaths)
    enough = most if len(dict.fromkeys(fell.values())) == 1 else TOGETHER * most
    for shard in homeless:
        entry = part.entries[shard]
        if entry.state == "quarantined":
            cleared = shard in part.cleared
            homes[shard] = INNOCENT if cleared else tried_again(entry.suspicion, most)
            continue
        known = faded(entry.suspicion, part.recent_deaths.get(shard, 0))
        if shard not in fell:
            homes[shard] = known
            continue
        deaths = known.deaths + 1
        blamed = known.blamed + 1 if shard in part.named else 0
        entity = part.named.get(shard)
        if blamed < needed or deaths < enough or entity is None:
            homes[shard] = known._replace(deaths=deaths, blamed=min(blamed, needed - 1))
        elif entity.id and len(known.barred) < MOST_BARRED:
            barred = (*known.barred, entity)
            homes[shard] = Suspicion(deaths, 0, known.tries + 1, barred)
        else:
            away[shard] = Suspicion(deaths, 0, known.tries + 1, known.barred)
    return homes, away
