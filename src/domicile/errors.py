"""Everything Domicile raises, in one tree. Each branch answers "did it run?" (I9).

::

    DomicileError
    ├── NotExecuted          it did not run and never will: safe to retry
    │   ├── Unavailable      no home could be reached in time, or none exists
    │   ├── Overloaded       a bounded queue is full (I6)
    │   ├── CallCycle        the target waits for this very call (N2)
    │   └── CallTooDeep      more than 16 handlers wait on each other (N1)
    ├── MaybeExecuted        it may have run: retry only with a key, or look first
    ├── HandlerFailed        it ran and raised, or ran out of its own time
    ├── Rejection            it ran and said no: subclass it, it crosses the wire as itself
    ├── Fenced               this process lost the shard: nothing was committed
    ├── ConfigError          a setting or a definition is wrong; nothing was started
    └── StoreError           the coordination store did not do what was asked
        ├── StoreUnavailable it could not be reached in time
        ├── StoreRewound     its history went back: everything known is void (S5)
        └── WatchCompacted   the wanted revision is gone: list again

May be imported from anywhere; imports nothing.
"""

from __future__ import annotations

from typing import Any, ClassVar


class DomicileError(Exception):
    """Base of all errors that Domicile raises on purpose."""


class NotExecuted(DomicileError):
    """The message did not run and never will. Safe to retry."""


class Unavailable(NotExecuted):
    """No home for the key could be reached before the deadline, or there is none."""


class Overloaded(NotExecuted):
    """A bounded queue on the way is full (I6). Slow down, then retry."""


class CallCycle(NotExecuted):
    """The target entity already waits for this call; running it would deadlock (N2)."""


class CallTooDeep(NotExecuted):
    """More than 16 handlers wait on each other (N1)."""


class MaybeExecuted(DomicileError):
    """The message was handed over and its outcome is unknown. It may have run."""


class HandlerFailed(DomicileError):
    """The handler ran and raised something other than a `Rejection`, or ran out of time.

    Where it was raised is in `remote_traceback`, and shown with the error's own traceback.
    """

    remote_traceback: str = ""
    """The application's own frames at the handler's home, one a line, the innermost last."""


class Rejection(DomicileError):
    """A handler's deliberate "no". Subclass it; subclasses cross the wire as themselves.

    The wire name is `name=` of the class statement, else the qualified name. Only the
    positional arguments travel, so a subclass must be constructible from `self.args`.
    """

    wire_name: ClassVar[str] = "Rejection"
    registry: ClassVar[dict[str, type[Rejection]]] = {}

    def __init_subclass__(cls, *, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.wire_name = name or cls.__qualname__
        known = Rejection.registry.get(cls.wire_name)
        modules = [cls.__module__] if known is None else [known.__module__, cls.__module__]
        # A program run as a script may be imported by its own name, too: that is one class.
        if known is not None and modules[0] != modules[1] and "__main__" not in modules:
            raise ConfigError(
                f"{known.__module__} and {cls.__module__} both define a rejection that is called "
                f"{cls.wire_name!r} on the wire; give one of them its own: "
                f"class {cls.__name__}(Rejection, name=...)"
            )
        Rejection.registry[cls.wire_name] = cls


class Fenced(DomicileError):
    """The shard moved on: nothing was committed under the stale epoch (I2)."""


class ConfigError(DomicileError, ValueError):
    """A setting or definition is wrong. Nothing was started."""


class StoreError(DomicileError):
    """The coordination store did not do what was asked."""


class StoreUnavailable(StoreError):
    """The store could not be reached in time; a write may or may not have happened."""


class StoreRewound(StoreError):
    """The store's history went back; everything known from it is void (S5)."""


class WatchCompacted(StoreError):
    """Changes since the wanted revision are no longer kept; list again and watch from there."""
