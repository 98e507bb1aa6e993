"""Which of two versions is newer, and which versions may receive shards while several are present.

The planner and operators' commands call this module. A version is a text of the application: a
whole number, a PEP 440 version or an ISO time. All versions that are present are read as one kind;
if they are not of one kind, none is newer than another. Empty versions are equal to each other and
newer than none. Nothing here raises for a text that it cannot read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, Protocol

from packaging.version import Version


class _Ordered(Protocol):
    def __lt__(self, other: Any, /) -> bool: ...


def _whole(text: str) -> _Ordered:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(text)
    return int(text)


def _time(text: str) -> _Ordered:
    """An ISO 8601 date or time; one without a zone is UTC."""
    time = datetime.fromisoformat(text)
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


_KINDS: tuple[Callable[[str], _Ordered], ...] = (_whole, Version, _time)


def ranks(versions: Iterable[str]) -> dict[str, int] | None:
    """The rank of each version, the oldest first; equal versions have the same rank. None: the
    versions are not of one kind."""
    texts = tuple(dict.fromkeys(versions))
    if len(texts) <= 1:
        return dict.fromkeys(texts, 0)
    for kind in _KINDS:
        try:
            keys = {text: kind(text) for text in texts}
        except ValueError:
            continue
        found: dict[str, int] = {}
        rank, last = -1, None
        for text in sorted(texts, key=keys.__getitem__):
            if last is None or last < keys[text]:
                rank += 1
            last = keys[text]
            found[text] = rank
        return found
    return None


def same(one: str, other: str) -> bool:
    """Whether two texts are one version: "1.0" and "1.0.0" are."""
    if one == other:
        return True
    found = ranks((one, other))
    return found is not None and found[one] == found[other]


def mixed(versions: Iterable[str]) -> bool:
    """Whether there is more than one version."""
    texts = tuple(dict.fromkeys(versions))
    found = ranks(texts)
    return len(texts) > 1 if found is None else any(found.values())


def target_versions(present: Iterable[str], stored: str = "") -> tuple[str, ...]:
    """The present versions whose nodes may receive shards.

    With a stored target: the versions equal to it; without: the newest. All versions if that
    selects none, since a shard must have a home, or if nothing says which version is newer.
    """
    texts = tuple(dict.fromkeys(present))
    if stored:
        return tuple(text for text in texts if same(text, stored)) or texts
    found = ranks(texts)
    if not found:
        return texts
    newest = max(found.values())
    return tuple(text for text in texts if found[text] == newest)
