"""Which entity or shard is to blame for the deaths of its owners, and is put away (DX-20, DX-24).

The planner calls `judge`; owners ask `on_the_brink`. A death alone says nothing about a shard: it
counts against all shards of its node. Blame needs the owner's own record: an owner stores what it
has on trial before a handler of a shard that lost owners runs for the first time. The rules are:

- A shard of which something was on trial at its dead owner is blamed; any other shard is cleared of
  earlier blame. Entities that had just begun to run are its *suspects*. At the next death, only
  those that had just begun to run again remain; if there are none, those of the new death follow.
- A shard that was blamed for all but the first two of `poison_deaths` deaths is *on the brink*. Its
  owner tries the suspects one at a time. If they are too many to name, it tries all entities so.
- If the owner dies while it tries exactly one such entity, and this entity was a suspect before,
  it is put away. So the same entity must have begun a moment before at least two deaths in a row.
- An entity that has run for a while is no suspect: it may be innocent and run at every crash. Its
  shard must be blamed twice as often, with twice `poison_deaths` deaths. It is put away if nothing
  else of its shard ran at the last death, and no other shard of the owner was like that.

A poisonous entity that kills at once is put away with death number `poison_deaths`. It takes one or
two deaths more if entities that ran beside it hid its name. An innocent entity is put away only if
two unrelated crashes of its owners in a row both hit the first moments of its trials. With
`poison_deaths` of 1 or 2 there are no two trials to compare: one such crash is enough then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from domicile.core.ids import EntityKey, Incarnation
from domicile.core.placement.model import RoleInput, ShardTrials, fallen
from domicile.core.placement.slices import PAUSE, Slices
from domicile.core.state.shardmap import (
    INNOCENT,
    MOST_BARRED,
    MOST_SUSPECTS,
    Entry,
    Suspicion,
)
from domicile.settings import Settings

TOGETHER = 2
"""Multiplier on `poison_deaths` while several owners die together, e.g. in a store outage: a
poisonous shard kills one owner at a time."""

LONG = 2
"""Multiplier on `poison_deaths` and on the blame for an entity that has run for a while."""

FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 600.0


def blames_needed(poison_deaths: int) -> int:
    """Deaths in a row for which a shard must be blamed before it is put away. The first death of
    an owner can blame nobody, because only shards that lost owners are on trial."""
    return max(1, poison_deaths - 1)


def on_the_brink(entry: Entry, entity: EntityKey, poison_deaths: int) -> bool:
    """Whether an entity must be tried alone, because one or two more blames would put it away."""
    needed = blames_needed(poison_deaths)
    suspect = not entry.suspects or entity in entry.suspects
    return suspect and entry.deaths >= needed and entry.blamed >= needed - 1


def pause_s(tries: int) -> float:
    """Seconds that a shard or an entity stays away when it was put away for the n-th time."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * (1 << min(max(0, tries - 1), 16)))


def tried_again(old: Suspicion, poison_deaths: int) -> Suspicion:
    """A pause is over: everything is served again. The first further blame puts an entity away
    that was put away before."""
    suspects = dict.fromkeys((*old.suspects, *old.barred))
    return Suspicion(
        poison_deaths,
        blames_needed(poison_deaths) - 1,
        old.tries,
        suspects=tuple(suspects)[:MOST_SUSPECTS],
    )


def faded(old: Suspicion, recent_deaths: int) -> Suspicion:
    """The suspicion without deaths that are too old to count."""
    if recent_deaths:
        return old._replace(deaths=recent_deaths)
    return Suspicion(tries=old.tries if old.barred else 0, barred=old.barred)


def judge(
    part: RoleInput, homeless: Sequence[int], settings: Settings
) -> Slices[tuple[dict[int, Suspicion], dict[int, Suspicion]]]:
    """By shard without a home: what then speaks against it. First the shards that may get a home,
    then those that are put away."""
    homes: dict[int, Suspicion] = {}
    away: dict[int, Suspicion] = {}
    fell = fallen(part, homeless)
    yield len(homeless)
    most = settings.poison_deaths
    together = len(dict.fromkeys(fell.values())) > 1
    enough = TOGETHER * most if together else most
    lasting = _lasting(part.named, fell)
    for done, shard in enumerate(homeless, 1):
        if not done % PAUSE:
            yield PAUSE
        entry = part.entries[shard]
        if entry.state == "quarantined":
            cleared = shard in part.cleared
            homes[shard] = INNOCENT if cleared else tried_again(entry.suspicion, most)
            continue
        known = faded(entry.suspicion, part.recent_deaths.get(shard, 0))
        if shard not in fell:
            homes[shard] = known
            continue
        trials = part.named.get(shard)
        if trials is None:
            homes[shard] = known._replace(deaths=known.deaths + 1, blamed=0, suspects=())
            continue
        known = known._replace(deaths=known.deaths + 1, blamed=known.blamed + 1)
        entity = _culprit(known, trials, enough, most) or (
            lasting.get(shard) if _lasted(known, most) else None
        )
        if entity is None:
            homes[shard] = known._replace(suspects=_suspects(known.suspects, trials))
        elif entity.id and len(known.barred) < MOST_BARRED:
            barred = (*known.barred, entity)
            homes[shard] = Suspicion(known.deaths, 0, known.tries + 1, barred)
        else:
            away[shard] = Suspicion(known.deaths, 0, known.tries + 1, known.barred, (entity,))
    return homes, away


def _culprit(
    known: Suspicion, trials: ShardTrials, enough: int, poison_deaths: int
) -> EntityKey | None:
    """The entity that was tried alone and was a suspect before, after enough deaths and blames."""
    needed = blames_needed(poison_deaths)
    if known.blamed < needed or known.deaths < enough:
        return None
    return trials.alone if needed == 1 or trials.alone in known.suspects else None


def _lasted(known: Suspicion, poison_deaths: int) -> bool:
    """Whether there were enough deaths and blames for an entity that runs for long."""
    needed = blames_needed(poison_deaths)
    return known.blamed >= LONG * needed and known.deaths >= LONG * poison_deaths


def _lasting(
    named: Mapping[int, ShardTrials], fell: Mapping[int, Incarnation]
) -> dict[int, EntityKey]:
    """By shard: the one entity that ran in it, for long, if no other shard of the owner has one."""
    found = {
        shard: trials.long[0]
        for shard in fell
        if (trials := named.get(shard)) is not None
        and len(trials.long) == 1
        and not trials.new
        and not trials.crowd
    }
    count = Counter(fell[shard] for shard in found)
    alone = [shard for shard in fell if shard in named and named[shard].alone is not None]
    hidden = dict.fromkeys(fell[shard] for shard in alone)
    return {
        shard: entity
        for shard, entity in found.items()
        if count[fell[shard]] == 1 and fell[shard] not in hidden
    }


def _suspects(known: tuple[EntityKey, ...], trials: ShardTrials) -> tuple[EntityKey, ...]:
    """The suspects after one more death; none if they can not all be named."""
    if trials.crowd:
        return known
    again = tuple(entity for entity in known if entity in trials.new)
    return again or (trials.new if len(trials.new) <= MOST_SUSPECTS else ())
