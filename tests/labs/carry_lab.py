"""Carried fields and their way, as the tests of both share them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

from domicile import Entity
from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.state.shardmap import Entry
from domicile.core.wire import Carried, Carry
from domicile.entity.model.entity import entity_type
from domicile.entity.model.fields import Fields

SHARD = ShardKey("default", 3)
OTHER = ShardKey("default", 4)
A, B, C = (Incarnation(letter * 32) for letter in "abc")
MOVING = Entry(A, 7, "moving", B, 3)


def key(id: str) -> EntityKey:
    return EntityKey("cart", id)


def fields_of(cls: type[Entity]) -> Fields:
    found = entity_type(cls).fields
    assert found is not None
    return found


def made(cls: type[Any]) -> Any:
    return cls.__new__(cls)


def part(epoch: int, id: int, *ids: str, body: bytes = b"x", shard: ShardKey = SHARD) -> Carry:
    return Carry(*shard, epoch, id, tuple(Carried("cart", one, body) for one in ids))


@dataclass
class Line:
    name: str
    count: int = 1


class Cart(Entity, name="carry-cart", carry=True):
    limit: ClassVar[int] = 10
    total: float = 0.0
    lines: list[Line]
    _seen: set[str]
    at: datetime | None = None

    def __init__(self) -> None:
        self.lines = []
        self._seen = set()
        self.lock = threading.Lock()
