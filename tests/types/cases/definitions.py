"""Misuse in definitions: plain functions, streams, unknown class keywords, wrong timers."""

from __future__ import annotations

from collections.abc import AsyncIterator

from domicile import Entity, Ref, blocking, handler


def plain(entity: Entity, amount: int) -> int:
    return amount


handler(plain)  # E: type-var
handler(shared=True)(plain)  # E: type-var
handler(timeout_s="1")  # E: call-overload
handler(share=True)  # E: call-overload


class Plain(Entity):
    @handler  # E: type-var
    def balance(self) -> int:
        return 0


class Carried(Entity, carry="yes"):  # E: arg-type
    count: int = 0


class Idle(Entity, idle_s="60"):  # E: arg-type
    pass


def by_number(entity_id: int, shards: int) -> int:
    return entity_id % shards


def by_name(entity_id: str) -> int:
    return len(entity_id)


def in_words(entity_id: str, shards: int) -> str:
    return entity_id


class Numbered(Entity, shard_id=by_number):  # E: arg-type
    pass


class Uncounted(Entity, shard_id=by_name):  # E: arg-type
    pass


class Worded(Entity, shard_id=in_words):  # E: arg-type
    pass


class Called(Entity, shard_id="murmur2"):  # E: arg-type
    pass


class Counting(Entity):
    @blocking
    def total(self, numbers: list[int]) -> int:
        return sum(numbers)

    @handler
    async def half(self) -> float:
        return self.total([1, 2]) / 2  # E: operator


async def counts(counting: Ref[Counting]) -> None:
    await counting.ask(Counting.total, "12")  # E: arg-type
    await counting.ask(Counting.total)  # E: call-arg


class Ticker(Entity):
    # The type of @handler admits it, so that the mistake is reported where it is asked.
    @handler
    async def watch(self, limit: int) -> AsyncIterator[int]:
        for number in range(limit):
            yield number

    @handler
    async def wait(self) -> None:
        self.after(1.0, self.wait)
        self.after(1.0, self.wait, 5)  # E: call-arg
        self.after(1.0, self.now)  # E: arg-type
        self.id = "other"  # E: misc
        self.epoch = 7  # E: misc


async def streams(ticker: Ref[Ticker]) -> None:
    await ticker.ask(Ticker.watch, 2)  # E: arg-type
    await ticker.tell(Ticker.watch, 2)  # E: arg-type
