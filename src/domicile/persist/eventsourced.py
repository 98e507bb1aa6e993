"""Entities whose state is the fold of their journaled events (J1, J2, J4, J5).

An ask with a key is one transaction: its events, the key and the reply commit together, so that
repeating it gives the stored reply and no second effect. What such a handler has persisted also
commits before anything it sends.
"""

from __future__ import annotations

import asyncio
import types
import typing
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from domicile.concurrency.single_flight import SingleFlight
from domicile.core.ids import ShardKey
from domicile.entity.hosting.cell import Cell, Turn, current_turn
from domicile.entity.hosting.execution import OutcomeUnknown
from domicile.entity.hosting.shard_host import ShardHost
from domicile.entity.model.entity import Entity
from domicile.errors import ConfigError, Fenced, HandlerFailed
from domicile.ports.journal import (
    Append,
    Appended,
    Claim,
    Journal,
    JournalUnknown,
    Refusal,
)
from domicile.ports.work import UnitOfWork

S = TypeVar("S")
Ev = TypeVar("Ev")
T = TypeVar("T")

TRIES = 5
"""How often an unanswered journal is asked again before the outcome is called unknown."""

_UNREAD: Any = object()


class EventCodec:
    """Events as (class name, fields): the name is durable, fields evolve by name."""

    __slots__ = ("_decoders", "_encode")

    def __init__(self, owner: str, kinds: tuple[Any, ...]) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {}
        for kind in kinds:
            if not isinstance(kind, type):
                raise ConfigError(
                    f"{owner}: an event type must be a class, {kind!r} is not; write "
                    f"class {owner}(EventSourced[State, Added | Removed])"
                )
            if kind.__name__ in self._decoders:
                raise ConfigError(f"{owner}: two event classes are named {kind.__name__!r}")
            try:
                self._decoders[kind.__name__] = msgspec.msgpack.Decoder(kind)
            except (TypeError, NameError) as error:
                raise ConfigError(
                    f"{owner}: event {kind.__name__} cannot be stored: {error}; use built-in "
                    "types, dataclasses, enums or msgspec Structs, defined at module level"
                ) from None

    def encode(self, event: Any) -> bytes:
        """The stored form of an event."""
        name = type(event).__name__
        if name not in self._decoders:
            known = ", ".join(self._decoders)
            raise TypeError(f"{event!r} is not one of this entity's events ({known})")
        return self._encode((name, event))

    def decode(self, data: bytes) -> Any:
        """An event from its stored form."""
        name, raw = msgspec.msgpack.decode(data, type=tuple[str, msgspec.Raw])
        decoder = self._decoders.get(name)
        if decoder is None:
            raise ConfigError(f"the journal holds an event {name!r} that this version lacks")
        return decoder.decode(raw)


class EventSourced(Entity, Generic[S, Ev]):
    """State as a fold of events: define `initial(id)` and a pure `apply(state, event)`."""

    __domicile_durable__: ClassVar[bool] = True
    __domicile_events__: ClassVar[EventCodec]

    _domicile_state: Any = _UNREAD
    _domicile_seq: int = 0
    _domicile_staged: tuple[bytes, ...] = ()
    _domicile_staged_state: Any = _UNREAD
    _domicile_reading: SingleFlight | None = None
    _domicile_writing: asyncio.Lock | None = None
    _domicile_in_doubt: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        kinds = _event_kinds(cls)
        if kinds is not None:
            cls.__domicile_events__ = EventCodec(cls.__name__, kinds)

    @classmethod
    def __domicile_check__(cls) -> None:
        name = cls.__qualname__
        if not hasattr(cls, "__domicile_events__"):
            raise ConfigError(
                f"{name} does not say what its state and events are; write "
                f"class {name}(EventSourced[State, Added | Removed])"
            )
        if cls.initial is EventSourced.initial or cls.apply is EventSourced.apply:
            raise ConfigError(
                f"{name} needs the static methods initial(id) and apply(state, event)"
            )

    @staticmethod
    def initial(id: str, /) -> Any:
        """The state before any event."""
        raise ConfigError("an EventSourced entity needs a static method initial(id)")

    @staticmethod
    def apply(state: Any, event: Any, /) -> Any:
        """The state after one more event. Pure: it runs again at every recovery."""
        raise ConfigError("an EventSourced entity needs a static method apply(state, event)")

    async def state(self) -> S:
        """The current state, recovered from the journal on first use."""
        if self._domicile_staged_state is not _UNREAD and not _turn().shared:
            return self._domicile_staged_state  # type: ignore[no-any-return]
        if self._domicile_state is _UNREAD:
            await self._recover()
        return self._domicile_state  # type: ignore[no-any-return]

    async def persist(self, *events: Ev) -> S:
        """Commit events and return the new state; `Fenced` if the shard moved on (I2)."""
        turn = _turn()
        if turn.shared and turn.began:
            raise RuntimeError("a shared handler cannot persist: drop shared=True")
        encoded = tuple(self.__domicile_events__.encode(event) for event in events)
        async with self._writing():
            state: Any = await self.state()
            for event in events:
                state = type(self).apply(state, event)
            self._domicile_staged += encoded
            self._domicile_staged_state = state
            # What `on_start` persists is its own, not part of the message that woke the entity.
            work = turn.work
            if isinstance(work, KeyedWork) and work.entity is self:
                work.is_due = True
            else:
                await self._commit("", None)
        return state  # type: ignore[no-any-return]

    def __domicile_work__(self, key: str) -> UnitOfWork:
        """The unit of work of a keyed ask."""
        return KeyedWork(self, key)

    async def _recall(self, key: str) -> bytes | None:
        """The stored reply of a key that was used before."""
        await self._claimed()
        entity = _cell(self).key
        stored = await _ask(lambda: _journal(self).inbox(entity, key))
        if stored is not None and stored.reply is None:
            raise HandlerFailed(
                f"the effects of key {key!r} on {entity.type} {entity.id!r} are stored, but "
                f"its handler was interrupted before it replied; read the state instead"
            )
        return None if stored is None else stored.reply

    def _drop_staged(self) -> None:
        self._domicile_staged, self._domicile_staged_state = (), _UNREAD

    def _writing(self) -> asyncio.Lock:
        """Tasks of one handler persist one after the other: each builds on the last state."""
        if self._domicile_writing is None:
            self._domicile_writing = asyncio.Lock()
        return self._domicile_writing

    async def _commit(self, key: str, reply: bytes | None) -> None:
        """J2, J4, J5: append what is staged; the state follows the commit."""
        cell = _cell(self)
        where = f"{cell.key.type} {cell.key.id!r}"
        if self._domicile_in_doubt:
            # A handler that went on after a failed commit: a reply must not outlive its events.
            raise OutcomeUnknown(f"an earlier commit of {where} failed; nothing more is stored")
        claim = await self._claimed()
        if self._domicile_state is _UNREAD:
            await self._recover()
        staged, state = self._domicile_staged, self._domicile_staged_state
        self._domicile_in_doubt = True
        append_id = f"{cell.random.getrandbits(128):032x}"
        append = Append(append_id, cell.key, self._domicile_seq, staged, key, reply)
        journal = _journal(self)
        result: Appended | Refusal | None
        try:
            try:
                result = await journal.append(claim, append)
            except JournalUnknown:
                result = await _ask(lambda: journal.appended(claim, append_id))
        except BaseException:
            cell.host.restart(cell)
            raise
        finally:
            self._drop_staged()
        if isinstance(result, Appended):
            self._domicile_in_doubt = False
            self._domicile_seq = result.seq
            if state is not _UNREAD:
                self._domicile_state = state
            return
        cell.host.restart(cell)
        if isinstance(result, Refusal) and result.fenced:
            raise Fenced(
                f"{where} has a newer home (epoch {result.epoch} > {claim.epoch}); nothing was "
                f"committed here"
            )
        raise OutcomeUnknown(f"the journal does not say whether events of {where} were stored")

    async def _recover(self) -> None:
        """Read and fold all events, once, whoever asks first."""
        flight = self._domicile_reading
        if flight is None:
            flight = self._domicile_reading = SingleFlight()
        landing = flight.join()
        if landing is not None:
            await landing
            if self._domicile_state is _UNREAD:
                await self._recover()
            return
        try:
            await self._claimed()
            cell = _cell(self)
            events = await _ask(lambda: _journal(self).read(cell.key))
            state = type(self).initial(cell.id)
            for data in events:
                state = type(self).apply(state, self.__domicile_events__.decode(data))
            self._domicile_seq = len(events)
            self._domicile_state = state
        finally:
            self._domicile_reading = None
            flight.land()

    async def _claimed(self) -> Claim:
        """J1: the fence is raised to this epoch before the first read or append."""
        cell = _cell(self)
        host = cell.host
        if not isinstance(host.fence_claim, ShardClaim) or host.fence_claim.epoch != cell.epoch:
            host.fence_claim = ShardClaim(host, cell.epoch)
        return await host.fence_claim.get()


class KeyedWork:
    """A keyed ask: its events, its key and its reply commit together. Implements `UnitOfWork`."""

    __slots__ = ("_key", "entity", "is_due")

    def __init__(self, entity: EventSourced[Any, Any], key: str) -> None:
        self.entity = entity
        self._key = key
        self.is_due = False
        """Whether something must be stored before anything leaves the entity."""

    async def recall(self) -> bytes | None:
        """The stored reply, if the key was used before."""
        return await self.entity._recall(self._key)  # pyright: ignore[reportPrivateUsage]

    async def flush(self) -> None:
        """Commit before something is sent; the reply follows when the handler ends."""
        entity = self.entity
        async with entity._writing():  # pyright: ignore[reportPrivateUsage]
            # Cleared after the commit: what a task sends meanwhile waits for it, too (I4).
            if self.is_due:
                await entity._commit(self._key, None)  # pyright: ignore[reportPrivateUsage]
                self.is_due = False

    async def finish(self, reply: bytes) -> None:
        """Commit what is left, with the reply."""
        async with self.entity._writing():  # pyright: ignore[reportPrivateUsage]
            await self.entity._commit(self._key, reply)  # pyright: ignore[reportPrivateUsage]

    def abort(self) -> None:
        """Forget what is not stored."""
        self.entity._drop_staged()  # pyright: ignore[reportPrivateUsage]


class ShardClaim:
    """One shard's claim under one epoch, made once for all its entities."""

    def __init__(self, host: ShardHost, epoch: int) -> None:
        self.epoch = epoch
        self._host = host
        self._claim = Claim(ShardKey(*host.shard), epoch, host.runtime.me)
        self._granted = False
        self._flight = SingleFlight()

    async def get(self) -> Claim:
        """The granted claim; `Fenced` if a newer one stands."""
        while not self._granted:
            landing = self._flight.join()
            if landing is None:
                await self._make()
            else:
                await landing
        return self._claim

    async def _make(self) -> None:
        journal = self._host.runtime.journal
        assert journal is not None
        try:
            refusal = await _ask(lambda: journal.claim(self._claim))
            if refusal is not None:
                self._host.outrun(refusal.epoch)
                raise Fenced(
                    f"shard {self._claim.shard.role}/{self._claim.shard.shard} was claimed under "
                    f"epoch {refusal.epoch}; this home has epoch {self.epoch}"
                )
            self._granted = True
        finally:
            self._flight.land()


async def _ask(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call that changes nothing twice until the journal answers."""
    for _ in range(TRIES - 1):
        try:
            return await call()
        except JournalUnknown:
            continue
    try:
        return await call()
    except JournalUnknown:
        raise OutcomeUnknown("the journal does not answer") from None


def _turn() -> Turn:
    turn = current_turn.get()
    if turn is None or not turn.active:
        raise RuntimeError("state() and persist() work inside a running handler only")
    return turn


def _cell(entity: Entity) -> Cell:
    context = entity._domicile_context()  # pyright: ignore[reportPrivateUsage]
    assert isinstance(context, Cell)
    return context


def _journal(entity: Entity) -> Journal:
    journal = _cell(entity).host.runtime.journal
    assert journal is not None, "a node with durable entities has a journal"
    return journal


def _event_kinds(cls: type[Any]) -> tuple[Any, ...] | None:
    """The event classes named in `EventSourced[State, A | B]`, also by way of a generic base of
    one's own; None for a class still generic."""
    event = _event_of(cls)
    if event is None or isinstance(event, TypeVar):
        return None
    if typing.get_origin(event) in (types.UnionType, typing.Union):
        return typing.get_args(event)
    return (event,)


def _event_of(cls: type[Any]) -> Any:
    """What stands for `Ev` in a class: a type, or a type variable of the class itself."""
    for base in cls.__dict__.get("__orig_bases__", cls.__bases__):
        origin = typing.get_origin(base) or base
        if not (isinstance(origin, type) and issubclass(origin, EventSourced)):
            continue
        args = typing.get_args(base)
        if origin is EventSourced:
            return args[1] if args else None
        generic: Any = typing.get_origin(base) or base
        event = _event_of(generic)
        names: tuple[Any, ...] = getattr(generic, "__parameters__", ())
        return args[names.index(event)] if args and event in names else event
    return None
