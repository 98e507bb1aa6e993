"""What a user writes: `Entity` classes, and what the runtime makes of them.

`EntityType` holds the names, limits and handlers of a class. It is made once and checked then, so
that a mistake in a class is an error at its definition or at the start of a node. Nothing here
sends or runs a message.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import PurePath
from random import Random
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, Protocol, TypeVar
from weakref import WeakSet

from domicile.core.hashing import NAMED, ShardFunction, place_by, xxh3
from domicile.core.state.records import TypeRecord
from domicile.entity.model.fields import Fields
from domicile.entity.model.handlers import MARK, Handler, HandlerOptions, in_thread
from domicile.entity.model.timed import TimedMethods
from domicile.errors import ConfigError
from domicile.ports.work import OutputGate

if TYPE_CHECKING:
    from domicile.entity.model.ref import Ref

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound="Entity")

_TYPE = "__domicile_type__"
_LOCALS = "__domicile_locals__"
_SETTING = -1.0
"""Stands for an `idle_s` that was left out: then the node's setting holds."""


class Context(Protocol):
    """What the runtime gives to one resident entity."""

    @property
    def id(self) -> str:
        """The entity's id."""
        ...

    @property
    def epoch(self) -> int:
        """The epoch under which its shard is at home here."""
        ...

    @property
    def random(self) -> Random:
        """A source of randomness that a simulation can replay."""
        ...

    def ref(self, kind: type[E], id: str, /) -> Ref[E]:
        """The address of an entity, for calls made from this one."""
        ...

    def resource(self, kind: type[T], /) -> T:
        """The object that the node's `resources` gave for a type."""
        ...

    def now(self) -> datetime:
        """The time of day, in UTC."""
        ...

    def after(
        self,
        delay_s: float,
        method: Callable[..., Coroutine[Any, Any, Any]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Run a bound method later; this replaces an earlier timer for the same method."""
        ...

    def passivate(self) -> None:
        """Stop the entity once nothing runs in it, and cancel its timers."""
        ...

    async def run_blocking(self, name: str, work: Callable[[], T], /) -> T:
        """Run a plain function in a thread and return its value; until then the entity is busy."""
        ...


class Entity:
    """An addressable object that is in one process at a time and gets one message at a time.

    Class keywords: `name` is durable (hash input, journal key; the class name if left out), `role`
    says which nodes can be home. `idle_s` is the idle time after which it is passivated (None:
    never; if left out, the node's setting, or never with `carry=True`). `carry=True` takes the
    annotated fields along when the shard moves as planned: set before `on_start` at the new home,
    if they fit `carry_bytes`.
    `shard_id` finds the shard of an id: `xxh3` if left out, `murmur2`, `shardcake`, `by_message`,
    or a function of the id and the number of shards that returns a number from 0 to below that.
    """

    __slots__ = ("__weakref__", "_domicile")

    __domicile_durable__: ClassVar[bool] = False
    __domicile_remember__: ClassVar[bool] = False
    __domicile_keywords__: ClassVar[tuple[str, str, float | None]]
    __domicile_shard_id__: ClassVar[tuple[ShardFunction, str]]
    __domicile_fields__: ClassVar[Fields | None]
    _domicile: Context

    def __init_subclass__(
        cls,
        *,
        name: str | None = None,
        role: str = "default",
        idle_s: float | None = _SETTING,
        carry: bool = False,
        shard_id: ShardFunction = xxh3,
    ) -> None:
        super().__init_subclass__()
        wire_name = cls.__name__ if name is None else name
        if not wire_name or "\0" in wire_name:
            raise ConfigError(f"{cls.__qualname__}: name={name!r} must be text without NUL")
        if not role or "/" in role:
            raise ConfigError(f"{cls.__qualname__}: role={role!r} must be text without '/'")
        if idle_s is None:
            idle_s = math.inf
        elif idle_s is not _SETTING and not idle_s > 0:
            raise ConfigError(
                f"{cls.__qualname__}: idle_s={idle_s!r} must be positive, or None for never"
            )
        cls.__domicile_keywords__ = (wire_name, role, None if idle_s is _SETTING else idle_s)
        cls.__domicile_shard_id__ = (shard_id, _function_name(cls, shard_id))
        setattr(cls, _LOCALS, _defining_locals(cls))
        cls.__domicile_fields__ = Fields(cls, _names_in) if carry else None

    @property
    def id(self) -> str:
        """This entity's id."""
        return self._domicile_context().id

    @property
    def epoch(self) -> int:
        """The fencing number of this entity's shard: rises with each new home."""
        return self._domicile_context().epoch

    @property
    def random(self) -> Random:
        """Randomness that a simulation can replay."""
        return self._domicile_context().random

    async def on_start(self) -> None:
        """Called before the first handler at this home."""

    async def on_stop(self) -> None:
        """Called after the last handler at this home, unless the home is lost at once."""

    def ref(self, kind: type[E], id: str, /) -> Ref[E]:
        """The address of another entity."""
        return self._domicile_context().ref(kind, id)

    def resource(self, kind: type[T], /) -> T:
        """The object that the node's `resources` gave for a type."""
        return self._domicile_context().resource(kind)

    def now(self) -> datetime:
        """The time of day, in UTC; virtual in a simulation."""
        return self._domicile_context().now()

    def after(
        self,
        delay_s: float,
        method: Callable[P, Coroutine[Any, Any, Any]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Run one of this entity's own coroutine methods later, as a message of its own.

        This replaces an earlier timer for the same method. A planned move takes the timer along,
        with its arguments; `passivate` cancels it, and a crash loses it.
        """
        if not (
            inspect.ismethod(method)
            and method.__self__ is self
            and inspect.iscoroutinefunction(method.__func__)
        ):
            raise TypeError(
                f"{type(self).__qualname__}.after needs one of this entity's own `async def` "
                f"methods, such as `self.flush`, not {method!r}"
            )
        if in_thread.get():
            raise RuntimeError(
                f"{type(self).__qualname__}.after cannot be used inside a @blocking method, which "
                "runs in a thread; return, and call it in a handler"
            )
        if not (delay_s >= 0 and math.isfinite(delay_s)):
            raise ValueError(f"after() needs a finite delay of at least 0 s, not {delay_s!r}")
        self._domicile_context().after(delay_s, method, args, kwargs)

    def passivate(self) -> None:
        """Stop this entity after the current message and cancel its timers; the next message
        starts it again."""
        self._domicile_context().passivate()

    async def __domicile_block__(self, name: str, work: Callable[[], T], /) -> T:
        """Run a blocking method; without a thread if this entity was made by hand."""
        context: Context | None = getattr(self, "_domicile", None)
        return work() if context is None else await context.run_blocking(name, work)

    @classmethod
    def __domicile_gate__(cls, context: Any, /) -> OutputGate | None:
        """What holds back an entity's outputs until they may leave; made with its cell. Durable
        entities override it."""
        return None

    @classmethod
    def __domicile_check__(cls) -> None:
        """`ConfigError` if a node cannot be home to this class. Kinds of entities override it."""

    def _domicile_context(self) -> Context:
        try:
            return self._domicile
        except AttributeError:
            raise RuntimeError(
                f"this {type(self).__qualname__} has no home: it was made by hand, not by a node. "
                "Send messages through a ref; in tests, use a simulated cluster."
            ) from None


class EntityType:
    """An entity class as the runtime sees it: names, limits and handlers. Made once per class."""

    __slots__ = (
        "_by_function",
        "cls",
        "direct",
        "durable",
        "fields",
        "handlers",
        "idle_s",
        "name",
        "place",
        "remember",
        "role",
        "shard_id",
        "timed",
    )

    def __init__(self, cls: type[Entity]) -> None:
        self.cls = cls
        self.name, self.role, self.idle_s = cls.__domicile_keywords__
        function, self.shard_id = cls.__domicile_shard_id__
        self.place = place_by(function, self.shard_id)
        self.durable = cls.__domicile_durable__
        self.fields = cls.__domicile_fields__
        """The fields taken along on a planned move, for types with `carry=True`."""
        self.remember = cls.__domicile_remember__
        """Whether its entities start again by themselves at a new home."""
        if (self.fields is not None or self.remember) and self.idle_s is None:
            # Idling would lose the fields, or end what should always run; nobody asked for it.
            self.idle_s = math.inf
        self.timed = TimedMethods(cls, _namespace)
        """The methods that timers may call."""
        self.handlers: dict[str, Handler] = {}
        self.direct: dict[str, Handler] = {}
        """Handlers that need no thread, so they may begin at once."""
        self._by_function: dict[Any, Handler] = {}
        for attribute, fn in _effective_handlers(cls).items():
            options: HandlerOptions = fn.__dict__[MARK]
            name = options.name or attribute
            if name in self.handlers:
                other = self.handlers[name].fn.__name__
                raise ConfigError(
                    f"{cls.__qualname__}.{attribute} and .{other} are both called {name!r} on the "
                    "wire; give one of them another @handler(name=...)"
                )
            label = f"{cls.__qualname__}.{attribute}"
            found = Handler(name, options, fn, label, _namespace(cls, attribute))
            self.handlers[name] = found
            if not found.blocking:
                self.direct[name] = found
            for base in cls.__mro__:
                overridden = base.__dict__.get(attribute)
                if isinstance(overridden, FunctionType) and MARK in overridden.__dict__:
                    self._by_function.setdefault(overridden, found)

    @property
    def record(self) -> TypeRecord:
        """What all members of a cluster must agree on about this type (RG-24)."""
        return TypeRecord(self.role, self.shard_id)

    def find(self, method: Callable[..., Any]) -> Handler:
        """The handler of a function of this class or of one of its bases."""
        try:
            return self._by_function[method]
        except (KeyError, TypeError):
            raise TypeError(self._why_not(method)) from None

    def check(self) -> None:
        """Resolve all handlers' types; `ConfigError` names the first that cannot travel."""
        if self.fields is not None:
            self.fields.resolve()
        for found in self.handlers.values():
            found.check()

    def _why_not(self, method: Any) -> str:
        owner = self.cls.__qualname__
        if inspect.ismethod(method):
            name = method.__func__.__name__
            return f"pass the function {owner}.{name}, not the bound method {method!r}"
        if not isinstance(method, FunctionType):
            return f"{method!r} is not a handler of {owner}; pass one, such as {owner}.<method>"
        shown, name = method.__qualname__, method.__name__
        if not any(base.__dict__.get(name) is method for base in self.cls.__mro__):
            return f"{shown} is not a method of {owner} (entity {self.name!r})"
        if MARK in method.__dict__:
            return f"{owner}.{name} overrides the handler {shown} without @handler; add @handler"
        return f"{shown} is not marked with @handler, so no message can invoke it; add @handler"

    def __repr__(self) -> str:
        return f"<entity type {self.name!r} of {self.cls.__qualname__}>"


def entity_type(cls: type[Entity]) -> EntityType:
    """The type of an entity class; the same object every time."""
    if not isinstance(cls, type) or not issubclass(cls, Entity) or cls is Entity:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{cls!r} is not an entity class; derive a class from Entity")
    made: EntityType | None = cls.__dict__.get(_TYPE)
    if made is None:
        made = EntityType(cls)
        setattr(cls, _TYPE, made)
    return made


def catalogue(entities: Sequence[type[Entity]]) -> dict[str, EntityType]:
    """The types of entity classes by name, fully checked: what a node can be home to."""
    types: dict[str, EntityType] = {}
    given: object = entities
    if not isinstance(given, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        name = getattr(given, "__name__", repr(given))
        example = name if isinstance(given, type) else "Counter"
        raise ConfigError(
            f"entities={name} must be a list of entity classes, as in entities=[{example}]"
        )
    for cls in entities:
        try:
            made = entity_type(cls)
        except TypeError as error:
            raise ConfigError(f"entities=[...]: {error}") from None
        if made.name in types:
            other = types[made.name].cls
            raise ConfigError(
                f"{_full_name(other)} and {_full_name(cls)} are both named {made.name!r}; "
                "list a class once, and give every entity its own name="
            )
        if cls not in _sound:
            _check(cls, made)
            _sound.add(cls)
        types[made.name] = made
    return types


_sound: WeakSet[type[Entity]] = WeakSet()
"""Classes that passed their checks once."""


def _check(cls: type[Entity], made: EntityType) -> None:
    if inspect.isabstract(cls):
        raise ConfigError(f"{_full_name(cls)} is abstract; list the classes that complete it")
    try:
        inspect.signature(cls.__init__).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"{_full_name(cls)}.__init__ must work without arguments ({error}); an entity is "
            "made by its home, so read what it needs in on_start"
        ) from None
    cls.__domicile_check__()
    made.check()


def make(kind: EntityType, context: Context) -> Entity:
    """A new instance at its home; `__init__` already sees `self.id` and the rest."""
    entity = kind.cls.__new__(kind.cls)
    entity._domicile = context  # pyright: ignore[reportPrivateUsage]
    kind.cls.__init__(entity)
    return entity


def _effective_handlers(cls: type[Entity]) -> dict[str, FunctionType]:
    """Attribute name to function, overrides applied, an alias of a function left out."""
    attributes: dict[str, None] = {}
    for base in reversed(cls.__mro__):
        attributes.update(dict.fromkeys(base.__dict__))
    effective: dict[str, FunctionType] = {}
    known: dict[FunctionType, str] = {}
    for attribute in attributes:
        fn = inspect.getattr_static(cls, attribute)
        if isinstance(fn, FunctionType) and MARK in fn.__dict__ and fn not in known:
            known[fn] = attribute
            effective[attribute] = fn
    return effective


def _namespace(cls: type[Entity], attribute: str) -> dict[str, Any]:
    """Names beyond the module's that the annotations of a method may use."""
    return _names_in(next(base for base in cls.__mro__ if attribute in base.__dict__))


def _names_in(owner: type[Any]) -> dict[str, Any]:
    """Names beyond the module's that annotations inside a class may use."""
    names: dict[str, Any] = dict(owner.__dict__.get(_LOCALS, {}))
    names[owner.__name__] = owner
    for parameter in getattr(owner, "__type_params__", ()):
        names[parameter.__name__] = parameter
    names.update((name, value) for name, value in vars(owner).items() if isinstance(value, type))
    return names


def _defining_locals(cls: type[Entity]) -> dict[str, Any]:
    """Of the function around a class statement: the locals that the class's annotations name."""
    outer, inside, _ = cls.__qualname__.rpartition(".<locals>.")
    if not inside:
        return {}
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_qualname != outer:
        frame = frame.f_back
    if frame is None:
        return {}
    found = frame.f_locals
    names: dict[str, Any] = {}
    annotations = [*inspect.get_annotations(cls).values()]
    for fn in vars(cls).values():
        if isinstance(fn, FunctionType) and MARK in fn.__dict__:
            annotations += inspect.unwrap(fn).__annotations__.values()
    for annotation in annotations:
        text = annotation if isinstance(annotation, str) else repr(annotation)
        for word in re.findall(r"[^\W\d]\w*", text):
            if word in found:
                names[word] = found[word]
    return names


def _function_name(cls: type[Entity], function: Any) -> str:
    """The name of a shard function in the cluster: all members must mean the same one (RG-24)."""
    for known, named in NAMED.items():
        if function is named:
            return known
    name = getattr(function, "__qualname__", None)
    if name is None or isinstance(function, type) or inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{cls.__qualname__}: shard_id={function!r} must be a plain function with a name, "
            "because all members of a cluster compare it; write def ...(entity_id, shards)"
        )
    try:
        inspect.signature(function).bind("", 1)
    except TypeError as error:
        raise ConfigError(
            f"{cls.__qualname__}: shard_id={name} must take an entity id and the number of shards "
            f"({error})"
        ) from None
    return f"{_module_name(function)}:{name}"


def _module_name(function: Any) -> str:
    """The function's module, by the name under which others import a program that runs as a
    script."""
    if function.__module__ != "__main__":
        return str(function.__module__)
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    return str(spec.name) if spec is not None else PurePath(file or "__main__").stem


def _full_name(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
