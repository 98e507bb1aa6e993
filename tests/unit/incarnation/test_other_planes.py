"""An incarnation names no control plane: it works with one that has no leader."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

import pytest

from domicile import Entity, Node, handler
from domicile.control import planes
from domicile.core.ids import Incarnation, ShardKey
from domicile.core.state.txn import Changes, Listing
from domicile.core.wire import AskRevert, Pong, Probe, Probed, Released, Suspect
from domicile.ports.control import ControlPlane, ControlWiring
from domicile.ports.transport import AnswerTakers, RequestTakers


class Desk(Entity, name="desk"):
    """Is at home nowhere, for nobody places it."""

    @handler
    async def note(self) -> int:
        return 1


class Undecided:
    """A plane that hears everything, holds nothing and places no shard."""

    leading, status, decides = False, "undecided", False
    owed: Iterable[str] = ()

    def __init__(self, wiring: ControlWiring, calls: Counter[str]) -> None:
        self._calls = calls
        self.requests: RequestTakers = dict.fromkeys(
            (Probe, Probed, Suspect, Released, AskRevert), lambda *_: None
        )
        self.answers: AnswerTakers = {Pong: lambda *_: None}

    def on_listing(self, listing: Listing) -> None:
        self._calls["on_listing"] += 1

    def on_changes(self, changes: Changes) -> None:
        self._calls["on_changes"] += 1

    def released(self, shard: ShardKey, epoch: int, floor: int) -> None:
        raise AssertionError("nothing was ever open")

    def ask_revert(self, shard: ShardKey, epoch: int) -> None:
        raise AssertionError("nothing was ever open")

    def may_place(self, role: str) -> bool:
        return False

    def heard(self, peer: Incarnation) -> None:
        self._calls["heard"] += 1

    def suspect(self, node: Incarnation) -> None:
        self._calls["suspect"] += 1

    def speaks_for_map(self, peer: Incarnation) -> bool:
        return False

    async def run(self) -> None:
        self._calls["run"] += 1

    def stand_aside(self) -> None:
        self._calls["stand_aside"] += 1

    def must_stay(self, since: float) -> bool:
        self._calls["must_stay"] += 1
        return False

    async def resign(self) -> None:
        self._calls["resign"] += 1

    async def close(self) -> None:
        self._calls["close"] += 1


def test_nodes_join_and_leave_with_a_plane_that_has_no_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: Counter[str] = Counter()

    def undecided(wiring: ControlWiring) -> ControlPlane:
        return Undecided(wiring, calls)

    monkeypatch.setattr(planes, "PLANES", {"elected": undecided})

    async def main() -> None:
        first, second = (
            Node("memory://undecided", entities=[Desk], node_id=name) for name in ("a", "b")
        )
        async with first:
            async with second:
                assert second.life is not None
                assert not second.life.control.leading
                assert first.life is not None
                while second.life.me not in first.life.member.members.nodes:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert calls["resign"] == 2, "by leaving, and at its end"
            assert not first.life.runtime.hosts

    asyncio.run(main())
    assert calls["on_listing"] >= 2
    assert calls["on_changes"]
    assert calls["run"] == calls["stand_aside"] == calls["close"] == 2
    assert calls["must_stay"] == 4, "before and after each of them said goodbye"
    assert calls["resign"] == 4
