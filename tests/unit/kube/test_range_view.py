"""What an instance of a range ring may take, by what it knows of Leases that came and went (K8)."""

from __future__ import annotations

from domicile.kube.conventions import INCARNATION
from domicile.kube.ranges import RANGE, RANGE_RING, GiveRange, RangeStep, RangeView, TakeRange
from domicile.kubeapi.objects import KubeLease, LeaseSpec, ObjectMeta

RING, COUNT = "sites", 4
OWN_S = 15


def instance(
    name: str,
    incarnation: str = "1",
    *,
    holder: str | None = None,
    transitions: int = 0,
    uid: str = "",
) -> KubeLease:
    """The Lease of an instance."""
    return KubeLease(
        metadata=ObjectMeta(
            name=name,
            uid=uid or f"{name}-{incarnation}",
            labels={RANGE_RING: RING},
            annotations={INCARNATION: incarnation},
        ),
        spec=LeaseSpec(
            holder_identity=name if holder is None else holder,
            lease_transitions=transitions,
            lease_duration_seconds=OWN_S,
        ),
    )


def part(
    index: int, holder: str, incarnation: str = "1", version: int = 1, s: int = 30
) -> KubeLease:
    """The Lease of a range."""
    return KubeLease(
        metadata=ObjectMeta(
            name=f"{RING}-range-{index}",
            resource_version=str(version),
            labels={RANGE_RING: RING, RANGE: str(index)},
            annotations={INCARNATION: incarnation},
        ),
        spec=LeaseSpec(holder_identity=holder, lease_duration_seconds=s),
    )


def all_of(holder: str, incarnation: str = "1") -> list[KubeLease]:
    return [part(index, holder, incarnation) for index in range(COUNT)]


def seen_by(me: str, *leases: KubeLease, incarnation: str = "1", at: float = 100.0) -> RangeView:
    view = RangeView(RING, me, incarnation, COUNT, OWN_S)
    view.listed(leases, at)
    return view


def taken(steps: list[RangeStep]) -> list[int]:
    return [one.index for one in steps if isinstance(one, TakeRange)]


def given(steps: list[RangeStep]) -> list[int]:
    return [one.index for one in steps if isinstance(one, GiveRange)]


def test_a_lease_that_was_made_shows_no_end_of_the_incarnation_before() -> None:
    """Somebody deleted the Lease of `a`; another process of that name made it. The first one acts
    until its time is over, whoever looks at the Leases for the first time."""
    view = seen_by("a", instance("a", "2"), *all_of("a", "1"), incarnation="2")
    assert taken(view.steps((), 100.0)) == []
    assert taken(view.steps((), 129.9)) == []
    assert view.next_time(129.9) == 130.0
    assert taken(view.steps((), 130.0)) == [0, 1, 2, 3]


def test_a_lease_that_was_taken_shows_it() -> None:
    taken_over = instance("a", "2", transitions=1)
    view = seen_by("a", taken_over, *all_of("a", "1"), incarnation="2")
    assert taken(view.steps((), 100.0)) == [0, 1, 2, 3]


def test_a_lease_that_was_made_anew_between_two_lists_is_another_one() -> None:
    view = seen_by("b", instance("b"), instance("a", "1", transitions=3), *all_of("a", "1"))
    view.listed([instance("b"), instance("a", "2"), *all_of("a", "1")], 200.0)
    assert taken(view.steps((), 229.9)) == []
    assert taken(view.steps((), 230.0))


def test_a_later_incarnation_that_leaves_frees_only_its_own_ranges() -> None:
    left = instance("a", "2", holder="")
    view = seen_by("b", instance("b"), left, part(0, "a", "1"), *all_of("a", "2")[1:])
    assert taken(view.steps((), 100.0)) == [1, 2, 3]
    assert taken(view.steps((), 130.0)) == [0, 1, 2, 3]


def test_a_range_without_a_lease_is_taken_after_a_duration() -> None:
    """Somebody may have deleted it, and its holder is at work."""
    view = seen_by("a", instance("a"))
    assert taken(view.steps((), 114.9)) == []
    assert view.next_time(114.9) == 115.0
    assert taken(view.steps((), 115.0)) == [0, 1, 2, 3]


def test_a_range_whose_lease_is_deleted_waits_for_the_time_that_it_had() -> None:
    view = seen_by("b", instance("b"), instance("a"), *all_of("a"))
    (gone,) = (one for one in all_of("a") if one.metadata.name.endswith("-2"))
    view.removed(gone, 200.0)
    view.instances.pop("a")
    assert 2 not in taken(view.steps((), 229.9))
    assert 2 in taken(view.steps((), 230.0))


def test_its_holder_makes_it_again_at_once() -> None:
    leases = [part(index, "a") for index in range(COUNT)]
    view = seen_by("a", instance("a"), *leases)
    view.removed(leases[2], 200.0)
    steps = view.steps(range(COUNT), 200.0)
    assert taken(steps) == [2]
    assert not given(steps)


def test_a_range_that_another_one_has_is_given_up() -> None:
    view = seen_by("a", instance("a"), instance("b"), *all_of("a"))
    view.saw(part(1, "b", version=2), 101.0)
    assert 1 in given(view.steps(range(COUNT), 101.0))


def test_old_news_of_a_range_does_not_count() -> None:
    """The answer to a write comes before what the watch has to tell from before it."""
    view = seen_by("a", instance("a"), *all_of("b"))
    view.saw(part(1, "a", version=3), 101.0)
    view.saw(part(1, "", version=2), 101.0)
    view.removed(part(1, "b", version=2), 101.0)
    assert view.is_ours(view.ranges[1])
