"""What the processes beside a server tell while they wait."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from member_lab import Tampered

from domicile.core.state.txn import Item
from domicile.errors import StoreUnavailable
from domicile.failover import serve
from domicile.failover.replica_settings import ReplicaSettings
from domicile.membership.clock import SystemClock
from domicile.membership.store_calls import StoreCalls
from domicile.stores.memory.store import MemoryStore


class Late(Tampered):
    """A store that answers only after some calls."""

    failures = 0

    async def get(self, key: bytes) -> Item | None:
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("nobody listens at 10.0.0.2:2379")
        return await super().get(key)


@pytest.mark.parametrize("failures", [0, 3])
def test_an_agent_says_that_it_waits_for_its_store(
    failures: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a wrong address of the store an agent said nothing at all."""
    monkeypatch.setattr(serve, "AGAIN_S", 0.0)
    settings = ReplicaSettings(
        store="etcd://10.0.0.2:2379", group="g", driver="valkey", id="s1",
        url="redis://127.0.0.1:6379", state=tmp_path,
    )  # fmt: skip

    async def main() -> None:
        store = Late(MemoryStore(SystemClock()).client("agent"))
        store.failures = failures
        async with asyncio.timeout(60):
            await serve._tell_whether_it_answers(settings, StoreCalls(store, 1.0))

    with caplog.at_level("INFO", "domicile"):
        asyncio.run(main())
    assert [one.message for one in caplog.records] == [
        "s1: the store is waited for: nobody listens at 10.0.0.2:2379",
        "s1: the store answers",
    ][: 2 if failures else 0]


@pytest.mark.parametrize(("slow_s", "told"), [(0.0, ["s1 is looked at"]), (600.0, [])])
def test_what_takes_longer_than_a_moment_is_told(
    slow_s: float,
    told: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "SLOW_S", slow_s)

    async def main() -> None:
        async with asyncio.timeout(60), serve._told_if_slow("%s is looked at", "s1"):
            while [one.message for one in caplog.records] != told:  # noqa: ASYNC110
                await asyncio.sleep(0)

    with caplog.at_level("INFO", "domicile"):
        asyncio.run(main())
