"""Entities whose state is the fold of their journaled events.

`persist` shows the new state at once and stages the events; `EntityLog` says when they are stored
and what waits for it. Nothing here may call a journal.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import msgspec

from domicile.entity.hosting.cell import Cell
from domicile.errors import ConfigError
from domicile.persist.durable_entity import DurableEntity
from domicile.persist.entity_log import UNREAD, EntityLog
from domicile.persist.forgettable import hide, is_forgetful, read_stored
from domicile.persist.state_codec import StateCodec, storable, type_argument
from domicile.ports.journal import BLIND, Recovered

S = TypeVar("S")
Ev = TypeVar("Ev")
F = TypeVar("F", bound=Callable[..., Any])


_UPCASTS = "__domicile_upcasts__"


def upcast(name: str, /) -> Callable[[F], F]:
    """Mark a static method that makes an event of today from one that was stored before.

    It is called with the stored fields, as a dict, if no event class of the entity has this name,
    or if the class of this name can't take them any more. It must be pure.
    """

    def mark(fn: F) -> F:
        # A static method keeps its function inside.
        target: Any = getattr(fn, "__func__", fn)
        target.__dict__.setdefault(_UPCASTS, []).append(name)
        return fn

    return mark


class EventCodec:
    """Events as (class name, fields): the name is durable, fields evolve by name."""

    __slots__ = ("_decoders", "_encode", "_owner", "_upcasts", "is_forgetful")

    def __init__(
        self,
        owner: str,
        kinds: tuple[Any, ...],
        upcasts: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> None:
        self._owner = owner
        self._upcasts: dict[str, Callable[[Any], Any]] = dict(upcasts or {})
        self._encode = msgspec.msgpack.Encoder(enc_hook=hide).encode
        self.is_forgetful = False
        """Whether a vault must be at hand."""
        self._decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {}
        for kind in kinds:
            if not isinstance(kind, type):
                raise ConfigError(
                    f"{owner}: an event type must be a class, {kind!r} is not; write "
                    f"class {owner}(EventSourced[State, Added | Removed])"
                )
            if kind.__name__ in self._decoders:
                raise ConfigError(f"{owner}: two event classes are named {kind.__name__!r}")
            self._decoders[kind.__name__] = storable(owner, f"event {kind.__name__}", kind)
            self.is_forgetful = self.is_forgetful or is_forgetful(kind)

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
        if decoder is not None:
            try:
                return decoder.decode(raw)
            except msgspec.ValidationError as error:
                unfit = error
        else:
            unfit = None
        change = self._upcasts.get(name)
        if change is not None:
            return change(read_stored(bytes(raw)))
        known = ", ".join(self._decoders)
        if unfit is None:
            raise ConfigError(
                f"the journal holds an event {name!r} that this version of {self._owner} lacks; "
                f"add the class to its events again, or a static method with @upcast({name!r}) "
                f"that makes one of {known} from it"
            )
        raise ConfigError(
            f"the journal holds an event {name!r} that no longer fits its class in {self._owner}: "
            f"{unfit}; give new fields a default, or add a static method with @upcast({name!r}) "
            "that makes today's event from the stored fields"
        )


class EventSourced(DurableEntity, Generic[S, Ev]):
    """State as a fold of events: define `initial(id)` and a pure `apply(state, event)`."""

    __domicile_events__: ClassVar[EventCodec]
    __domicile_snapshots__: ClassVar[SnapshotPolicy | None] = None

    def __init_subclass__(cls, *, snapshot_every: int | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        state, kinds = _state_and_events(cls)
        if kinds is not None:
            cls.__domicile_events__ = EventCodec(cls.__name__, kinds, _upcasts_of(cls))
        cls.__domicile_snapshots__ = None
        if snapshot_every is not None:
            if snapshot_every < 1 or state is None:
                raise ConfigError(
                    f"{cls.__name__}: snapshot_every={snapshot_every!r} must be a number of "
                    "events, and the class must name its state, as in EventSourced[State, Added]"
                )
            codec = StateCodec(cls.__name__, state)
            cls.__domicile_snapshots__ = SnapshotPolicy(snapshot_every, codec)

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
        """The current state, recovered from the journal on first use.

        It shows what earlier messages have persisted, committed or not; what this handler answers
        or sends waits until that is committed.
        """
        log = self._event_log()
        if log.state is UNREAD or log.is_staged:
            return await log.shown()  # type: ignore[no-any-return]
        return log.state  # type: ignore[no-any-return]

    async def persist(self, *events: Ev) -> S:
        """Apply events and return the new state at once; they are stored when the handler ends.

        What leaves the entity waits until they are committed: the reply, asks and tells. If the
        handler fails, its events are dropped, except those that it has sent before an ask, a tell
        or `committed()`.
        """
        log = self._event_log(writes=True)
        encoded = log.encoded(events)
        if log.state is UNREAD:
            await log.recover()
        log.stage(events, encoded)
        return log.state  # type: ignore[no-any-return]

    async def append(self, *events: Ev) -> None:
        """Store events without reading the state: an entity that only appends is never recovered.

        If the state is known already, it follows the events, as with `persist`.
        """
        log = self._event_log(writes=True)
        encoded = log.encoded(events)
        await log.claim()
        log.stage(events, encoded)

    def _event_log(self, *, writes: bool = False) -> EventLog:
        log = self._domicile_log(writes=writes)
        assert isinstance(log, EventLog)
        return log

    @classmethod
    def __domicile_gate__(cls, context: Any, /) -> EventLog:
        return EventLog(context, cls)


class SnapshotPolicy(NamedTuple):
    """How often the state is stored beside its events, and how."""

    every: int
    codec: StateCodec


class EventLog(EntityLog):
    """The events of one resident entity."""

    __slots__ = ("_encoded", "_events", "_kind", "_since", "_snapshots", "codec")

    def __init__(self, cell: Cell, kind: type[EventSourced[Any, Any]]) -> None:
        super().__init__(cell)
        self._kind = kind
        self.codec = kind.__domicile_events__
        self._snapshots = kind.__domicile_snapshots__
        self._since = 0
        """How many events came after the last snapshot, as far as that is known."""
        policy = self._snapshots
        if self.codec.is_forgetful or (policy is not None and policy.codec.is_forgetful):
            self.vault = self._new_vault()
        self._events: list[Any] = []
        self._encoded: list[bytes] = []
        """The events that are staged, and how they are stored."""

    def encoded(self, events: Sequence[Any]) -> list[bytes]:
        """Events as they are stored."""
        encode = self.codec.encode
        if self.vault is None:
            return [encode(event) for event in events]
        with self.vault.open():
            return [encode(event) for event in events]

    def stage(self, events: Sequence[Any], encoded: Sequence[bytes]) -> None:
        """Add events to what the running turn stores, and show them."""
        self.before_content()
        state = self._applied(self.state, events)
        self._events += events
        self._encoded += encoded
        self.state = state
        self._note("staged", len(self._encoded))

    def _applied(self, state: Any, events: Iterable[Any]) -> Any:
        if state is not UNREAD:
            apply = self._kind.apply
            for event in events:
                state = apply(state, event)
        return state

    # as `EntityLog` wants it

    @property
    def _has_content(self) -> bool:
        return bool(self._encoded)

    def _take_content(self) -> tuple[tuple[bytes, ...], None, tuple[int, bytes] | None]:
        encoded, snapshots = tuple(self._encoded), self._snapshots
        self._forget_content()
        snapshot: tuple[int, bytes] | None = None
        self._since += len(encoded)
        is_due = snapshots is not None and self._since >= snapshots.every
        if snapshots is not None and is_due and encoded and self.seq != BLIND:
            with self._at_hand():
                snapshot = (self.seq + len(encoded), snapshots.codec.encode(self.state))
            self._since = 0
        return encoded, None, snapshot

    def _forget_content(self) -> None:
        self._events, self._encoded = [], []

    def _initial(self) -> Any:
        return self._kind.initial(self._cell.id)

    def _fold(self, state: Any, found: Recovered) -> Any:
        with self._at_hand():
            return self._folded(state, found)

    def _folded(self, state: Any, found: Recovered) -> Any:
        if found.snapshot is not None:
            state = UNREAD
            if self._snapshots is not None:
                state = self._snapshots.codec.decode(found.snapshot[1], unfit=UNREAD)
            if state is UNREAD:
                return UNREAD
            self._since = 0
        decode, apply = self.codec.decode, self._kind.apply
        for data in found.events:
            state = apply(state, decode(data))
        self._since += len(found.events)
        return state

    def _with_staged(self, state: Any) -> Any:
        return self._applied(state, self._events)


def _upcasts_of(cls: type[Any]) -> dict[str, Callable[[Any], Any]]:
    """The static methods of a class that make events of today from earlier ones."""
    found: dict[str, Callable[[Any], Any]] = {}
    for base in reversed(cls.__mro__):
        for member in vars(base).values():
            fn = member.__func__ if isinstance(member, staticmethod) else member
            names = getattr(fn, _UPCASTS, ()) if callable(fn) else ()
            if names and not isinstance(member, staticmethod):
                raise ConfigError(f"{cls.__name__}: @upcast needs a static method: {member!r}")
            found.update(dict.fromkeys(names, fn))
    return found


def _state_and_events(cls: type[Any]) -> tuple[Any, tuple[Any, ...] | None]:
    """The state and the event classes named in `EventSourced[State, A | B]`, also by way of a
    generic base of one's own; None for what is still generic."""
    state, event = (type_argument(cls, EventSourced, place) for place in (0, 1))
    if event is None or isinstance(event, TypeVar):
        return None, None
    state = None if isinstance(state, TypeVar) else state
    if typing.get_origin(event) in (types.UnionType, typing.Union):
        return state, typing.get_args(event)
    return state, (event,)
