"""Which of two versions is newer, and which versions may receive shards while several are there.

Called by the planner, and for what operators ask for. A version is a text of the application's
own: whole numbers, PEP 440 or ISO times, all that are present read as one kind. Where they are not
of one kind nothing is newer than anything else. Empty versions are versions too: equal to each
other, newer than none.
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
    """Each version's place from oldest to newest, equal ones at the same; None: not of one kind."""
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
    """Of the versions that are present, those whose nodes may receive.

    With a stored target the ones equal to it, else the newest. All of them where that names none,
    since a shard must have a home, or where nothing says which is newer.
    """
    texts = tuple(dict.fromkeys(present))
    if stored:
        return tuple(text for text in texts if same(text, stored)) or texts
    found = ranks(texts)
    if not found:
        return texts
    newest = max(found.values())
    return tuple(text for text in texts if found[text] == newest)
