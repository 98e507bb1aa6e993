"""The profiles of a campaign by name: which faults strike, and what the cluster is like.

The campaign and the command line choose from `PROFILES`. A profile is data and functions that
strike through the simulator's verbs; every one ends in a calm in which everything must succeed.
"""

from __future__ import annotations

from dataclasses import replace

from proving import desks
from proving.profiles import (
    clocks,
    handoffs,
    journals,
    links,
    nodes,
    rolling,
    stores,
    storms,
    types,
)
from proving.profiles.spec import Spec
from proving.seed_result import SETTINGS

FEW_SHARDS = replace(SETTINGS, shards=32)
"""Where everything moves all the time, half as many are enough."""

STANDARD = Spec(
    about="crashes, freezes, cuts, blocks, outages and lost replies, many in the middle of a move",
    faults=(
        nodes.crash, nodes.crash, nodes.freeze, nodes.freeze, links.cut, links.cut, links.cut,
        links.partition, links.block, stores.outage, stores.watch, links.slow,
        stores.lost_replies, nodes.stop, nodes.freeze_leader, nodes.stalled_write,
        nodes.stalled_write, links.late_answers, links.late_answers,
    ),
    kinds=(
        "block", "crash", "cut", "freeze", "freeze past the lease", "late answers",
        "leader frozen", "lost replies", "outage", "partition", "slow", "stalled write", "stop",
        "watch",
    ),
)  # fmt: skip

CLOCKS = Spec(
    about="machines with clocks of their own, and wall clocks set by an hour, the store's too",
    faults=(
        clocks.step_store, clocks.step_store, clocks.step_store, clocks.step_node, clocks.replace,
        clocks.replace, nodes.crash, nodes.freeze, nodes.freeze, nodes.freeze_leader,
        stores.outage, links.cut, nodes.stop,
    ),
    kinds=(
        "crash", "cut", "freeze", "freeze past the lease", "leader frozen", "new machine",
        "outage", "stop", "store clock", "wall clock",
    ),
    prepare=clocks.prepare,
)  # fmt: skip

STORE = Spec(
    about="the whole store away or down, put back to a backup, compacted, with unknown outcomes",
    faults=(
        stores.whole_outage, stores.whole_outage, stores.rewind, stores.forgotten_home,
        stores.raised_fence, stores.unknown, stores.compaction, stores.compaction, stores.watch,
        stores.lost_replies, nodes.crash, links.cut, nodes.freeze_leader,
    ),
    kinds=(
        "compaction", "crash", "cut", "forgotten home", "leader frozen", "lost replies",
        "raised fence", "rewind", "store away", "store down", "unknown", "watch",
    ),
    pace_s=(1.5, 4.5),
)  # fmt: skip

NETWORK = Spec(
    about="one-way blocks for long, nodes that nobody hears, lingering and repeated connections",
    faults=(
        links.block, links.long_block, links.long_block, links.unheard, links.unheard, links.slow,
        links.slow_way, links.slow_way, links.linger, links.linger, links.duplicate,
        links.duplicate, links.late_answers, links.late_owner, links.partition, links.cut,
        nodes.crash,
    ),
    kinds=(
        "block", "crash", "cut", "duplicate", "late answers", "late owner", "linger", "long block",
        "partition", "slow", "slow way", "unheard",
    ),
)  # fmt: skip

STORMS = Spec(
    about="many processes killed at once, all of them, and the coordinator again and again",
    faults=(
        storms.several, storms.several, storms.all_at_once, storms.flapping, storms.leaders,
        storms.leaders, storms.stops, nodes.crash, nodes.freeze, links.cut,
    ),
    kinds=(
        "all crash", "crash", "cut", "flapping", "freeze", "freeze past the lease",
        "leaders crash", "several crash", "two stop",
    ),
    settings=FEW_SHARDS,
    pace_s=(1.2, 4.5),
    locks=0.4,
)  # fmt: skip

ROLLING = Spec(
    about="rolling updates, surging and in place, rollbacks, scaling, drains, stops of two at once",
    faults=(
        rolling.surge, rolling.surge, rolling.in_place, rolling.in_place, rolling.rollback,
        rolling.rollback,
        rolling.scale_out, rolling.scale_in, rolling.drain, rolling.two_stop, nodes.stop,
        nodes.crash, links.cut,
    ),
    kinds=(
        "crash", "cut", "drain", "in-place update", "rollback", "scale in", "scale out", "stop",
        "surge", "two stop",
    ),
    settings=FEW_SHARDS,
    prepare=rolling.prepare,
    pace_s=(1.0, 4.0),
)  # fmt: skip

HEALTH = Spec(
    about='fencing="health": only proof of death frees a home, however long a freeze or an outage',
    faults=(
        nodes.crash, nodes.crash, nodes.freeze, nodes.freeze_leader, nodes.freeze_for_long,
        stores.outage, stores.whole_outage, stores.unknown, links.cut, links.partition, nodes.stop,
        storms.several,
    ),
    kinds=(
        "crash", "cut", "freeze", "freeze past the lease", "leader frozen", "long freeze",
        "outage", "partition", "several crash", "stop", "store away", "store down", "unknown",
    ),
    settings=replace(FEW_SHARDS, fencing="health"),
    locks=1.0,
)  # fmt: skip

TYPES = Spec(
    about="nodes of one role with different entity types, which change as nodes come back",
    faults=(
        types.other_types, types.other_types, types.other_types, nodes.crash, nodes.freeze,
        nodes.freeze_leader, links.cut, links.cut, links.slow, stores.outage, stores.watch,
        stores.lost_replies, stores.unknown, nodes.stop,
    ),
    kinds=(
        "crash", "cut", "freeze", "freeze past the lease", "leader frozen", "lost replies",
        "other types", "outage", "slow", "stop", "unknown", "watch",
    ),
    settings=FEW_SHARDS,
    prepare=types.prepare,
)  # fmt: skip

REVERTS = Spec(
    about="handlers that outlast the drain deadline, and moves that are taken back in between",
    faults=(
        handoffs.overdue, handoffs.overdue, handoffs.overdue, handoffs.lone_return,
        handoffs.lone_return, handoffs.missed, handoffs.late_release, nodes.crash, nodes.freeze,
        nodes.freeze_leader, links.cut, nodes.stop,
    ),
    kinds=(
        "crash", "cut", "freeze", "freeze past the lease", "late release", "leader frozen",
        "lone return", "missed move", "overdue drain", "stop",
    ),
    settings=replace(FEW_SHARDS, drain_deadline_s=1.5),
)  # fmt: skip

STAMPS = Spec(
    about="senders that know newer entries than owners do, and owners that know newer ones",
    faults=(
        handoffs.parked, handoffs.parked, handoffs.parked, handoffs.missed, handoffs.missed,
        handoffs.lone_return, handoffs.late_release, links.late_owner, links.late_answers,
        stores.watch, links.cut, nodes.crash,
    ),
    kinds=(
        "crash", "cut", "late answers", "late owner", "late release", "lone return", "missed move",
        "parked", "watch",
    ),
)  # fmt: skip

JOURNALS = Spec(
    about="journals that know more than the store: rewinds, forgotten homes, raised fences",
    faults=(
        stores.forgotten_homes, stores.forgotten_homes, stores.busy_fence, stores.busy_fence,
        stores.busy_fence, handoffs.clinging, stores.rewind, stores.lost_replies,
        nodes.stalled_write, nodes.crash, links.cut,
    ),
    kinds=(
        "busy fence", "clinging", "crash", "cut", "forgotten homes", "lost replies", "rewind",
        "stalled write",
    ),
    settings=FEW_SHARDS,
    pace_s=(1.5, 4.5),
)  # fmt: skip

DEPOSED = Spec(
    about="leaders that live on without the leader key, and messages that reach the wrong one late",
    faults=(
        nodes.deposed, nodes.deposed, nodes.deposed, handoffs.late_release, handoffs.late_release,
        handoffs.parked, nodes.freeze_leader, nodes.freeze_leader, stores.unknown, links.slow_way,
        links.cut, nodes.crash,
    ),
    kinds=(
        "crash", "cut", "deposed", "late release", "leader frozen", "parked", "slow way",
        "unknown",
    ),
    settings=FEW_SHARDS,
)  # fmt: skip

ONE_KEY = Spec(
    about="a store that commits one key at a time, under leaders that live on without their key",
    faults=(
        nodes.deposed, nodes.deposed, nodes.deposed, nodes.freeze_leader, nodes.freeze_leader,
        storms.leaders, handoffs.late_release, stores.unknown, stores.unknown, stores.lost_replies,
        stores.watch, stores.watch, stores.outage, nodes.crash, nodes.crash, nodes.freeze,
        nodes.stop, links.cut, links.unheard,
    ),
    kinds=(
        "crash", "cut", "deposed", "freeze", "freeze past the lease", "late release",
        "leader frozen", "leaders crash", "lost replies", "outage", "stop", "unheard", "unknown",
        "watch",
    ),
    settings=replace(SETTINGS, shards=160),
    one_key=True,
)  # fmt: skip

COMMITS = Spec(
    about="journals that are slow, unsure, busy or ahead, under entities that read, refuse and ask",
    faults=(
        journals.slow_commits, journals.slow_commits, journals.unsure, journals.unsure,
        journals.repeated_claims, journals.busy_shards, journals.claim_behind_a_row,
        journals.raised_fence, journals.raised_fence, journals.late_settling,
        journals.crash_in_commit, journals.crash_in_commit, nodes.crash, nodes.freeze, nodes.stop,
        links.cut,
    ),
    kinds=(
        "busy shards", "crash", "crash in commit", "cut", "freeze", "freeze past the lease",
        "late settling", "raised fence", "repeated claims", "slow commits", "stop",
        "unsure writes", "waiting claim",
    ),
    settings=FEW_SHARDS,
    locks=0.5,
    entities=(desks.Desk,),
    load=desks.serve,
)  # fmt: skip

PROFILES: dict[str, Spec] = {
    "standard": STANDARD,
    "clocks": CLOCKS,
    "store": STORE,
    "network": NETWORK,
    "storms": STORMS,
    "rolling": ROLLING,
    "health": HEALTH,
    "types": TYPES,
    "reverts": REVERTS,
    "stamps": STAMPS,
    "journals": JOURNALS,
    "deposed": DEPOSED,
    "commits": COMMITS,
}
"""All that "mixed" takes in turn; see `profile_of`."""

ALONE: dict[str, Spec] = {"one-key": ONE_KEY}
"""Those of clusters on other stores, which run by their names only."""

SPECS = PROFILES | ALONE
"""Every one by its name."""

MIXED = "mixed"


def profile_of(name: str, seed: int) -> str:
    """The profile that a seed has: of "mixed" they come in turn."""
    return list(PROFILES)[seed % len(PROFILES)] if name == MIXED else name
