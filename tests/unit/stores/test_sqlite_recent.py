"""The newest commits as watches take them: all of them in order, or nothing at all (I8)."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from domicile.core.state.txn import Change, Changes, Item
from domicile.stores.sqlite.jobs import News
from domicile.stores.sqlite.recent import Recent

KEYS = (b"a/1", b"a/2", b"b/1")


def commit(revision: int, *keys: bytes) -> Changes:
    return Changes(revision, tuple(Change(key, Item(key, b"", revision, revision)) for key in keys))


@dataclass
class File:
    """The whole history, and how far the looks have come."""

    commits: list[Changes] = field(default_factory=list[Changes])
    looked: int = 0
    trimmed: int = 0

    def look(self, *, crowded: bool) -> News:
        since, self.looked = self.looked, len(self.commits)
        changes = None if crowded else self.commits[since:]
        return News(since, self.looked, changes, self.trimmed, 0)

    def after(self, prefix: bytes, seen: int) -> list[Changes]:
        found: list[Changes] = []
        for one in self.commits[seen : self.looked]:
            changes = tuple(change for change in one.changes if change.key.startswith(prefix))
            if changes:
                found.append(Changes(one.revision, changes))
        return found


STEPS = st.lists(
    st.one_of(
        st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True),
        st.sampled_from(["look", "look", "crowded", "lose", "trim"]),
    ),
    max_size=40,
)


@given(STEPS, st.integers(1, 6), st.sampled_from([b"", b"a/", b"b/", b"c"]), st.integers(0, 40))
def test_what_it_tells_is_what_the_file_says_and_it_tells_whenever_it_can(
    steps: list[list[bytes] | str], kept: int, prefix: bytes, seen: int
) -> None:
    file, recent = File(), Recent(kept)
    known_from = 10**9
    for step in steps:
        if isinstance(step, list):
            file.commits.append(commit(len(file.commits) + 1, *step))
            continue
        if step == "trim":
            file.trimmed = len(file.commits)
            continue
        news = file.look(crowded=step == "crowded")
        if step == "lose":
            known_from = 10**9
            continue
        recent.add(news)
        known_from = news.upto if news.changes is None else min(known_from, news.since)
        known_from = max(known_from, news.upto - kept, file.trimmed)
        found = recent.after(prefix, seen, 0)
        if known_from <= seen <= news.upto:
            assert found is not None
        if seen < file.trimmed:
            assert found is None
        if found is not None:
            assert found.changes == file.after(prefix, seen)
            assert found.upto == file.looked >= seen


def test_nothing_of_another_history_is_told() -> None:
    recent = Recent()
    recent.add(News(3, 4, [commit(4, b"k")], 0, 0))
    assert recent.after(b"", 3, 1) is None
    recent.add(News(4, 5, [commit(5, b"k")], 0, 1))
    assert recent.after(b"", 4, 0) is None
    assert recent.after(b"", 3, 1) is None, "that was before the rewind"
    found = recent.after(b"", 4, 1)
    assert found is not None
    assert [one.revision for one in found.changes] == [5]
