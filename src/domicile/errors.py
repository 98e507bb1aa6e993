"""Everything Domicile raises, in one tree. Each branch answers "did it run?" (I9).

::

    DomicileError
    ├── NotExecuted          it did not run and never will: safe to retry
    │   ├── Unavailable      no home could be reached in time, or none exists
    │   ├── Overloaded       a bounded queue is full (I6)
    │   ├── CallCycle        the target already waits for this call (N2)
    │   └── CallTooDeep      more than 16 handlers wait on each other (N1)
    ├── MaybeExecuted        it may have run: retry only with a key, or check first
    ├── HandlerFailed        it ran and raised, or exceeded its own time limit
    ├── Rejection            it ran and refused: the caller gets the subclass that was raised
    ├── Fenced               this process lost the shard: nothing was committed
    ├── ConfigError          a setting or a definition is wrong; nothing was started
    └── StoreError           the coordination store did not do what was asked
        ├── StoreUnavailable it could not be reached in time
        ├── StoreRewound     it lost commits: everything known from it is invalid (S5)
        └── WatchCompacted   it no longer keeps the wanted revision: list again

Every module may import this one; it imports no other module of Domicile.
"""

from __future__ import annotations

from typing import Any, ClassVar


class DomicileError(Exception):
    """Base of all errors that Domicile raises on purpose."""


class NotExecuted(DomicileError):
    """The message did not run and never will. Safe to retry."""


class Unavailable(NotExecuted):
    """No home of the entity could be reached before the deadline, or none exists."""


class Overloaded(NotExecuted):
    """A bounded queue on the way is full (I6). Send more slowly, then retry."""


class CallCycle(NotExecuted):
    """The target entity already waits for this call; running it would deadlock (N2)."""


class CallTooDeep(NotExecuted):
    """More than 16 handlers wait on each other (N1)."""


class MaybeExecuted(DomicileError):
    """The message was sent and its outcome is unknown. It may have run."""


class HandlerFailed(DomicileError):
    """The handler ran and raised something other than a `Rejection`, or exceeded its time limit.

    `remote_traceback` says where it was raised; the error's own traceback shows it too.
    """

    remote_traceback: str = ""
    """The application's own frames at the handler's home, one per line, the innermost last."""


class Rejection(DomicileError):
    """A handler's deliberate refusal. Subclass it: the caller gets an instance of the subclass.

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
        # A program that runs as a script may also be imported by name: that is the same class.
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
    """The store lost commits; everything known from it is invalid (S5)."""


class WatchCompacted(StoreError):
    """The store no longer keeps the changes since the wanted revision; list again and watch from
    there."""
