"""Store calls with a deadline: what takes too long or fails has an unknown outcome (S1)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from member_lab import SETTINGS, Lab, Tampered

from domicile.core.state.txn import Absent, Committed, Conflict, Outcome, Put, Unknown, Write
from domicile.errors import StoreRewound, StoreUnavailable
from domicile.membership.store_calls import StoreCalls

PUT = Put(b"key", b"value")


@pytest.fixture
def lab() -> Lab:
    return Lab()


def made(lab: Lab) -> tuple[StoreCalls, Tampered]:
    store = Tampered(lab.backend)
    return StoreCalls(store, SETTINGS.op_timeout_s), store


async def never(writes: Sequence[Write]) -> Outcome:
    await asyncio.get_running_loop().create_future()
    return Unknown()


async def rewound(writes: Sequence[Write]) -> Outcome:
    raise StoreRewound("older")


async def hasty(writes: Sequence[Write]) -> Outcome:
    raise TimeoutError


def test_a_call_without_an_answer_ends_at_its_deadline(lab: Lab) -> None:
    async def main() -> None:
        calls, store = made(lab)
        store.on_commit = never
        began = lab.world.now
        with pytest.raises(StoreUnavailable):
            await calls.bounded(store.commit((), (PUT,)))
        assert lab.world.now == began + SETTINGS.op_timeout_s

    lab.run(main())


def test_several_calls_in_one_have_one_deadline(lab: Lab) -> None:
    async def main() -> None:
        calls, _ = made(lab)

        async def two() -> None:
            await asyncio.sleep(SETTINGS.op_timeout_s * 0.6)
            await asyncio.sleep(SETTINGS.op_timeout_s * 0.6)

        began = lab.world.now
        with pytest.raises(StoreUnavailable):
            await calls.bounded(two())
        assert lab.world.now == began + SETTINGS.op_timeout_s

    lab.run(main())


def test_a_store_that_gives_up_itself_is_unavailable(lab: Lab) -> None:
    async def main() -> None:
        calls, store = made(lab)
        store.on_commit = hasty
        with pytest.raises(StoreUnavailable):
            await calls.bounded(store.commit((), (PUT,)))

    lab.run(main())


def test_what_the_store_says_is_passed_on(lab: Lab) -> None:
    async def main() -> None:
        calls, store = made(lab)
        assert isinstance(await calls.try_commit((Absent(b"key"),), (PUT,)), Committed)
        assert isinstance(await calls.try_commit((Absent(b"key"),), (PUT,)), Conflict)
        store.on_commit = rewound
        with pytest.raises(StoreRewound):
            await calls.bounded(store.commit((), (PUT,)))

    lab.run(main())


@pytest.mark.parametrize("fault", [never, rewound, hasty])
def test_a_try_to_commit_that_fails_is_unknown(
    lab: Lab, fault: Callable[[Sequence[Write]], Coroutine[Any, Any, Outcome]]
) -> None:
    async def main() -> None:
        calls, store = made(lab)
        store.on_commit = fault
        assert isinstance(await calls.try_commit((), (PUT,)), Unknown)

    lab.run(main())
