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
- After the second death the owner names every run of the shard. A handler that has run well there
  before, or has run for a while now, is *lasting*. It says less: a busy entity may be innocent and
  run at every crash. From death number `poison_deaths` on, such runs come one at a time, with rests
  in between. A crash that is not their doing seldom hits one then.
- A lasting entity needs blame that is twice as frequent, with twice `poison_deaths` deaths. It is
  put away if it was the only suspect of its shard that ran at the last death, ran at the one
  before, too, and no other shard of the owner has as much against it.

A poisonous entity that kills at once is put away with death number `poison_deaths`. It takes one or
two deaths more if entities that ran beside it hid its name. One that serves for a while and then
kills takes twice `poison_deaths`. An innocent entity is put away only if two unrelated crashes of
its owners in a row both hit the first moments of its trials, or if twice `poison_deaths` crashes
in a row follow its shard and the last four of them (with `poison_deaths` of 3) hit its runs. With
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
"""Multiplier on `poison_deaths` and on the blame for an entity that lasts."""

RECURRENT = 2
"""Owner deaths in a row after which every run of a shard is on trial, not only first ones."""

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


def always_on_trial(entry: Entry, poison_deaths: int) -> bool:
    """Whether handlers that have run well at this owner are on trial as well: nothing else could
    name an entity that serves for a while and then kills."""
    return entry.deaths >= max(RECURRENT, blames_needed(poison_deaths))


def rests_between_runs(entry: Entry, entity: EntityKey, poison_deaths: int) -> bool:
    """Whether runs of an entity that ran well before wait for each other and rest in between.

    All of the shard do, so that a crash that is not their doing seldom blames the shard. After a
    quarantine only the suspects do: the others had their time.
    """
    if entry.deaths < poison_deaths or entry.blamed < blames_needed(poison_deaths) - 1:
        return False
    return not (entry.tries and entry.suspects) or entity in entry.suspects


def loses_owners(entry: Entry) -> bool:
    """Whether a shard lost more owners in a row than one expects of unrelated crashes, and nothing
    of it was put away: perhaps nobody can be blamed, and operators have to look."""
    return entry.deaths > RECURRENT and not entry.tries and entry.state != "quarantined"


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
    lasting = _lasting(part, fell, most)
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
        known = _blamed(known)
        entity = _culprit(known, trials, enough, most) or lasting.get(shard)
        if entity is None:
            homes[shard] = known._replace(suspects=_suspects(known, trials, most))
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


def _blamed(known: Suspicion) -> Suspicion:
    return known._replace(deaths=known.deaths + 1, blamed=known.blamed + 1)


def _lasting(
    part: RoleInput, fell: Mapping[int, Incarnation], poison_deaths: int
) -> dict[int, EntityKey]:
    """By shard: the one lasting entity that is put away, if the owner had no other shard with as
    much against it."""
    found: dict[int, EntityKey] = {}
    for shard in fell:
        trials = part.named.get(shard)
        if trials is not None and trials.long and not trials.new and not trials.crowd:
            recent = part.recent_deaths.get(shard, 0)
            known = _blamed(faded(part.entries[shard].suspicion, recent))
            ran = [entity for entity in trials.long if entity in known.suspects]
            if len(ran) == 1 and _lasted(known, poison_deaths):
                found[shard] = ran[0]
    count = Counter(fell[shard] for shard in found)
    alone = [shard for shard in fell if shard in part.named and part.named[shard].alone is not None]
    hidden = dict.fromkeys(fell[shard] for shard in alone)
    return {
        shard: entity
        for shard, entity in found.items()
        if count[fell[shard]] == 1 and fell[shard] not in hidden
    }


def _lasted(known: Suspicion, poison_deaths: int) -> bool:
    """Whether there were enough deaths and blames for a lasting entity. One is enough if it is the
    first since the shard is served again after a quarantine."""
    relapse = (poison_deaths + 1, blames_needed(poison_deaths))
    if known.tries and (known.deaths, known.blamed) == relapse:
        return True
    return _deaths_left(known, poison_deaths) <= 0


def _deaths_left(known: Suspicion, poison_deaths: int) -> int:
    """Deaths, each with blame, that are still missing before a lasting entity is put away."""
    blames = LONG * blames_needed(poison_deaths) - known.blamed
    return max(blames, LONG * poison_deaths - known.deaths)


def _suspects(known: Suspicion, trials: ShardTrials, poison_deaths: int) -> tuple[EntityKey, ...]:
    """The suspects after one more death; none if they can not all be named. One death before a
    lasting entity may be put away, such entities are suspects as well."""
    if trials.crowd:
        return known.suspects
    ran = trials.new
    if _deaths_left(known, poison_deaths) <= 1:
        ran = tuple(dict.fromkeys((*ran, *trials.long)))
    again = tuple(entity for entity in known.suspects if entity in ran)
    return again or (ran if len(ran) <= MOST_SUSPECTS else ())
