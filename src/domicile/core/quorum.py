"""Who stays when members of a cluster can't reach each other: one answer for all who ask (§5).

Every member publishes whom it reaches; from the same claims everybody names the same evicted
ones. Pure arithmetic over member numbers: whether a decision stands is the store's matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Claims = Mapping[int, Sequence[int] | None]
"""By member number, the numbers that it reaches. None: it has not said, and claims all."""


def survivors(claims: Claims) -> tuple[int, ...]:
    """The members that stay: all of them reach each other, both ways.

    As long as some pair does not, the member with the fewest ways to others goes, and of several
    the one with the highest number.
    """
    members = sorted(claims)
    reached = {one: dict.fromkeys(_claimed(claims, one, members)) for one in members}
    edges = {
        one: {
            other: None
            for other in members
            if other != one and other in reached[one] and one in reached[other]
        }
        for one in members
    }
    while any(len(ways) < len(edges) - 1 for ways in edges.values()):
        leaver = min(edges, key=lambda one: (len(edges[one]), -one))
        del edges[leaver]
        for ways in edges.values():
            ways.pop(leaver, None)
    return tuple(edges)


def evicted(claims: Claims) -> tuple[int, ...]:
    """The members that must stop, in order of number."""
    staying = dict.fromkeys(survivors(claims))
    return tuple(one for one in sorted(claims) if one not in staying)


def _claimed(claims: Claims, one: int, members: Sequence[int]) -> Sequence[int]:
    claim = claims[one]
    return members if claim is None else claim
