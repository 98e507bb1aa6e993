"""A set of tasks with one owner: it knows those that run, and leaves none behind."""

from __future__ import annotations

import asyncio

import pytest

from domicile.concurrency.task_set import TaskSet


def test_a_task_leaves_the_set_when_it_ends() -> None:
    async def main() -> None:
        tasks: TaskSet[int] = TaskSet("some")
        task = tasks.spawn(asyncio.sleep(0, 7))
        assert (len(tasks), task.get_name()) == (1, "some")
        assert await task == 7
        await asyncio.sleep(0)
        assert len(tasks) == 0

    asyncio.run(main())


def test_closing_waits_for_the_clean_up_of_all() -> None:
    ended: list[int] = []

    async def work(number: int) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            ended.append(number)
            if number == 1:
                raise ValueError("a failure while it ends")

    async def main() -> None:
        tasks: TaskSet[None] = TaskSet("some")
        for number in range(3):
            tasks.spawn(work(number))
        await asyncio.sleep(0)
        await tasks.close()
        assert ended == [0, 1, 2]
        assert len(tasks) == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await tasks.close()

    asyncio.run(main())


def test_tasks_of_a_group_fail_with_it() -> None:
    async def fail() -> None:
        raise ValueError("on purpose")

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            tasks: TaskSet[None] = TaskSet("some", group)
            tasks.spawn(asyncio.sleep(3600))
            tasks.spawn(fail())

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(main())
    assert caught.group_contains(ValueError, match="on purpose")


def test_cancelling_ends_the_tasks_of_a_group_and_not_the_group() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            tasks: TaskSet[None] = TaskSet("some", group)
            tasks.spawn(asyncio.sleep(3600))
            other = group.create_task(asyncio.sleep(0))
            tasks.cancel()
        assert other.done()
        assert not other.cancelled()

    asyncio.run(main())
