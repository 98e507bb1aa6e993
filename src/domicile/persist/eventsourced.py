"""Entities whose state is the fold of their journaled events (J2, J4).

An ask with a key is one unit of work: its events, the key and the reply commit together, so that
repeating it gives the stored reply and no second effect. What such a handler has persisted also
commits before anything it sends. Everything goes through the incarnation's `JournalWriter`; nothing
here may call a journal itself.
"""

from __future__ import annotations

import asyncio
import types
import typing
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from domicile.concurrency.single_flight import SingleFlight
from domicile.entity.hosting.cell import Cell, Turn, current_turn
from domicile.entity.hosting.execution import OutcomeUnknown
from domicile.entity.model.entity import Entity
from domicile.errors import ConfigError, Fenced, HandlerFailed
from domicile.persist.writer import JournalWriter
from domicile.ports.journal import JournalWrite, WriteRefused, Written
from domicile.ports.work import UnitOfWork

S = TypeVar("S")
Ev = TypeVar("Ev")
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

    _domicile_log: EventLog | None = None

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
        log = self._domicile_log or self.__domicile_open__()
        if log.staged_state is not _UNREAD and not _turn().shared:
            return log.staged_state  # type: ignore[no-any-return]
        if log.state is _UNREAD:
            await log.recover()
        return log.state  # type: ignore[no-any-return]

    async def persist(self, *events: Ev) -> S:
        """Commit events and return the new state; `Fenced` if the shard moved on (I2)."""
        turn = _turn()
        if turn.shared and turn.began:
            raise RuntimeError("a shared handler cannot persist: drop shared=True")
        log = self._domicile_log or self.__domicile_open__()
        encoded = tuple([log.codec.encode(event) for event in events])
        async with log.writing:
            state: Any = await self.state()
            for event in events:
                state = type(self).apply(state, event)
            log.staged += encoded
            log.staged_state = state
            # What `on_start` persists is its own, not part of the message that woke the entity.
            work = turn.work
            if isinstance(work, KeyedWork) and work.log is log:
                work.is_due = True
            else:
                await log.commit()
        return state  # type: ignore[no-any-return]

    def __domicile_work__(self, key: str) -> UnitOfWork:
        """The unit of work of a keyed ask."""
        return KeyedWork(self._domicile_log or self.__domicile_open__(), key)

    def __domicile_open__(self) -> EventLog:
        """Made on first use: an entity that is only woken needs none."""
        context = self._domicile_context()
        assert isinstance(context, Cell)
        log = self._domicile_log = EventLog(context, type(self))
        return log


class EventLog:
    """The events of one resident entity: its state, what is staged, and its commits."""

    __slots__ = (
        "_cell", "_in_doubt", "_kind", "_reading", "_seq", "_writer", "codec", "staged",
        "staged_state", "state", "writing",
    )  # fmt: skip

    def __init__(self, cell: Cell, kind: type[EventSourced[Any, Any]]) -> None:
        writer = cell.host.runtime.durability
        assert isinstance(writer, JournalWriter), "a node with durable entities has a journal"
        self._cell = cell
        self._kind = kind
        self._writer = writer
        self.codec = kind.__domicile_events__
        self.state: Any = _UNREAD
        """The fold of all committed events."""
        self.staged: tuple[bytes, ...] = ()
        self.staged_state: Any = _UNREAD
        """The fold with those that are staged, if there are any."""
        self.writing = asyncio.Lock()
        """Tasks of one handler persist one after the other: each builds on the last state."""
        self._seq = 0
        self._in_doubt = False
        self._reading = SingleFlight()

    @property
    def _where(self) -> str:
        return f"{self._cell.key.type} {self._cell.key.id!r}"

    def drop_staged(self) -> None:
        """What is staged never was."""
        self.staged, self.staged_state = (), _UNREAD

    async def commit(
        self,
        inbox: tuple[tuple[str, bytes | None], ...] = (),
        replies: tuple[tuple[str, bytes], ...] = (),
    ) -> None:
        """Write what is staged; the state follows the commit (J2, J4)."""
        cell = self._cell
        if self._in_doubt:
            # A handler that went on after a failed commit: a reply must not outlive its events.
            raise OutcomeUnknown(
                f"an earlier commit of {self._where} failed; nothing more is stored"
            )
        claim = await self._writer.claimed(cell.host, cell.epoch)
        if self.state is _UNREAD:
            await self.recover()
        state = self.staged_state
        write = JournalWrite(cell.host.shard, cell.key, self._seq, self.staged, inbox, replies)
        self._in_doubt = True
        try:
            outcome = await self._writer.write(claim, write)
        except BaseException:
            cell.host.restart(cell)
            raise
        finally:
            self.drop_staged()
        if isinstance(outcome, Written):
            self._in_doubt = False
            self._seq = outcome.seq
            if state is not _UNREAD:
                self.state = state
            return
        cell.host.restart(cell)
        if isinstance(outcome, WriteRefused) and outcome.why == "fenced":
            raise Fenced(
                f"{self._where} has a newer home (epoch {outcome.epoch} > {cell.epoch}); nothing "
                f"was committed here"
            )
        raise OutcomeUnknown(
            f"the journal does not say whether events of {self._where} were stored"
        )

    async def recall(self, key: str) -> bytes | None:
        """The stored reply of a key that was used before."""
        cell = self._cell
        await self._writer.claimed(cell.host, cell.epoch)
        stored = await self._writer.inbox(cell.key, key)
        if stored is None:
            return None
        if stored.reply is None:
            raise HandlerFailed(
                f"the effects of key {key!r} on {self._where} are stored, but its handler was "
                f"interrupted before it replied; read the state instead"
            )
        return stored.reply

    async def recover(self) -> None:
        """Read and fold all events. The first caller does it, the others wait for it."""
        landing = self._reading.join()
        if landing is not None:
            await landing
            if self.state is _UNREAD:
                await self.recover()
            return
        try:
            cell, kind, codec = self._cell, self._kind, self.codec
            await self._writer.claimed(cell.host, cell.epoch)
            state, seq, more = kind.initial(cell.id), 0, True
            while more:
                found = await self._writer.recover(cell.key, seq)
                for data in found.events:
                    state = kind.apply(state, codec.decode(data))
                seq, more = found.seq, found.more
            self._seq = seq
            self.state = state
        finally:
            self._reading.land()


class KeyedWork:
    """A keyed ask: its events, its key and its reply commit together. Implements `UnitOfWork`."""

    __slots__ = ("_is_stored", "_key", "is_due", "log")

    def __init__(self, log: EventLog, key: str) -> None:
        self.log = log
        self._key = key
        self._is_stored = False
        """Whether the key is in the journal, without a reply."""
        self.is_due = False
        """Whether something must be stored before anything leaves the entity."""

    async def recall(self) -> bytes | None:
        """The stored reply, if the key was used before."""
        return await self.log.recall(self._key)

    async def flush(self) -> None:
        """Commit before something is sent; the reply follows when the handler ends."""
        async with self.log.writing:
            # Cleared after the commit: what a task sends meanwhile waits for it, too (I4).
            if self.is_due:
                await self.log.commit(inbox=() if self._is_stored else ((self._key, None),))
                self._is_stored = True
                self.is_due = False

    async def finish(self, reply: bytes) -> None:
        """Commit what is left, with the reply."""
        async with self.log.writing:
            stored = ((self._key, reply),)
            if self._is_stored:
                await self.log.commit(replies=stored)
            else:
                await self.log.commit(inbox=stored)

    def abort(self) -> None:
        """Forget what is not stored."""
        self.log.drop_staged()


def _turn() -> Turn:
    turn = current_turn.get()
    if turn is None or not turn.active:
        raise RuntimeError("state() and persist() work inside a running handler only")
    return turn


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
