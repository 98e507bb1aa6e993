"""Entities whose whole state is stored each time that it changes.

`save` shows the new state at once and stages it; `EntityLog` says when it is stored and what waits
for it. Nothing here may call a journal.
"""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from domicile.entity.hosting.cell import Cell
from domicile.errors import ConfigError
from domicile.persist.durable_entity import DurableEntity
from domicile.persist.entity_log import UNREAD, EntityLog
from domicile.persist.state_codec import StateCodec, type_argument
from domicile.ports.journal import Recovered

S = TypeVar("S")


class Durable(DurableEntity, Generic[S]):
    """State as a whole: define `initial(id)`, then `save` what replaces it."""

    __domicile_state__: ClassVar[StateCodec]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        state = type_argument(cls, Durable, 0)
        if state is not None and not isinstance(state, TypeVar):
            cls.__domicile_state__ = StateCodec(cls.__name__, state)

    @classmethod
    def __domicile_check__(cls) -> None:
        name = cls.__qualname__
        if not hasattr(cls, "__domicile_state__"):
            raise ConfigError(
                f"{name} does not say what its state is; write class {name}(Durable[State])"
            )
        if cls.initial is Durable.initial:
            raise ConfigError(f"{name} needs the static method initial(id)")

    @staticmethod
    def initial(id: str, /) -> Any:
        """The state before anything was saved."""
        raise ConfigError("a Durable entity needs a static method initial(id)")

    @staticmethod
    def upgrade(stored: Any, /) -> Any:
        """A state of today from the fields of one that an earlier version saved, as a dict.

        Called only if the fields do not fit the state's type any more. It must be pure.
        """
        raise ConfigError("a Durable entity without upgrade(stored) can't read an earlier state")

    async def state(self) -> S:
        """The current state, read from the journal on first use.

        It shows what earlier messages have saved, committed or not; what this handler answers or
        sends waits until that is committed.
        """
        log = self._state_log()
        if log.state is UNREAD or log.is_staged:
            return await log.shown()  # type: ignore[no-any-return]
        return log.state  # type: ignore[no-any-return]

    async def save(self, state: S, /) -> None:
        """Replace the state. It is stored when the handler ends, and dropped if the handler fails.

        What leaves the entity waits until it is committed: the reply, asks and tells.
        """
        log = self._state_log(writes=True)
        encoded = log.encoded(state)
        if log.state is UNREAD:
            await log.recover()
        log.stage(state, encoded)

    def _state_log(self, *, writes: bool = False) -> StateLog:
        log = self._domicile_log(writes=writes)
        assert isinstance(log, StateLog)
        return log

    @classmethod
    def __domicile_gate__(cls, context: Any, /) -> StateLog:
        return StateLog(context, cls)


class StateLog(EntityLog):
    """The state of one resident entity that stores it whole."""

    __slots__ = ("_encoded", "_kind", "codec")
    keeps_whole = True

    def __init__(self, cell: Cell, kind: type[Durable[Any]]) -> None:
        super().__init__(cell)
        self._kind = kind
        self.codec = kind.__domicile_state__
        self._encoded: bytes | None = None
        if self.codec.is_forgetful:
            self.vault = self._new_vault()

    def encoded(self, state: Any) -> bytes:
        """A state as it is stored."""
        if self.vault is None:
            return self.codec.encode(state)
        with self.vault.open():
            self.vault.begin()
            return self.codec.encode(state)

    def stage(self, state: Any, encoded: bytes) -> None:
        """Replace what the running turn stores, and show it."""
        self.before_content()
        self._encoded = encoded
        self.state = state
        self._note("staged", 1)

    # as `EntityLog` wants it

    @property
    def _has_content(self) -> bool:
        return self._encoded is not None

    def _take_content(self) -> tuple[tuple[()], bytes | None, None]:
        encoded = self._encoded
        self._forget_content()
        return (), encoded, None

    def _forget_content(self) -> None:
        self._encoded = None

    def _initial(self) -> Any:
        return self._kind.initial(self._cell.id)

    def _fold(self, state: Any, found: Recovered) -> Any:
        if found.state is None:
            return state
        with self._at_hand():
            return self._read_state(found.state)

    def _read_state(self, stored: bytes) -> Any:
        try:
            return self.codec.read(stored)
        except msgspec.ValidationError as error:
            kind = self._kind
            if kind.upgrade is not Durable.upgrade:
                return kind.upgrade(self.codec.fields(stored))
            raise ConfigError(
                f"the journal holds a state of {kind.__name__} {self._cell.id!r} that this version "
                f"can't read: {error}; give new fields a default, or add a static method "
                "upgrade(stored) that makes today's state from the stored fields"
            ) from None

    def _with_staged(self, state: Any) -> Any:
        return state if self._encoded is None else self.state
