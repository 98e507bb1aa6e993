"""What one durable entity does: given a past, when a message comes, then these events and a reply.

::

    given(Cart, "c1", Added("tea", 1)).when(Cart.add, "tea", 2).then(reply=3)

Plain tests use it. The past is stored in a journal, the entity recovers from it in a simulated
node, and what it stores is read back: so an event or a state that does not survive storing fails
here, and so does an `apply` that is not pure. Nothing stands in for the product's own code.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any, Concatenate, Generic, Never, ParamSpec, Self, TypeVar, overload

from domicile.core.ids import NOBODY, EntityKey
from domicile.entity.model.entity import Entity, entity_type
from domicile.errors import HandlerFailed, Rejection
from domicile.persist.durable import Durable
from domicile.persist.entity_log import UNREAD, EntityLog
from domicile.persist.eventsourced import EventSourced
from domicile.persist.forgettable import Vault, vault_key
from domicile.ports.journal import Batch, Claim, JournalWrite, Wanted, Written
from domicile.settings import Settings
from domicile.testing.sim.cluster import Sim

# Pytest shows the lines of a test, not those that run it; `--full-trace` shows all.
__tracebackhide__ = True

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")
Ev = TypeVar("Ev")

MOST_BYTES = 1 << 30
AFTERWARDS_S = 0.1
"""Virtual seconds for what runs after the reply, such as hooks of `after_commit`."""

_ANY: Any = object()


@overload
def given(
    kind: type[EventSourced[S, Ev]],
    id: str,
    /,
    *events: Ev,
    resources: Mapping[type[Any], Any] | None = ...,
    beside: Sequence[type[Entity]] = ...,
) -> Given[S, Ev]: ...
@overload
def given(
    kind: type[Durable[S]],
    id: str,
    /,
    *,
    state: S = ...,
    resources: Mapping[type[Any], Any] | None = ...,
    beside: Sequence[type[Entity]] = ...,
) -> Given[S, Never]: ...
def given(
    kind: Any,
    id: str,
    /,
    *events: Any,
    state: Any = _ANY,
    resources: Mapping[type[Any], Any] | None = None,
    beside: Sequence[type[Entity]] = (),
) -> Given[Any, Any]:
    """An entity with a past: the events that it has stored, or the state of a `Durable`.

    `resources` are what `self.resource` finds. `beside` are the entities that it asks or tells.
    """
    if not (isinstance(kind, type) and issubclass(kind, EventSourced | Durable)):
        raise TypeError(f"given() needs an EventSourced or Durable class, not {kind!r}")
    if issubclass(kind, Durable) and events:
        raise TypeError(f"{kind.__name__} is Durable, it has no events; pass state=...")
    if issubclass(kind, EventSourced) and state is not _ANY:
        raise TypeError(f"{kind.__name__} is EventSourced; pass the events that lead to the state")
    return Given(_Case(kind, id, resources or {}, beside), list(events), state)


class Given(Generic[S, Ev]):
    """An entity with a past. Made by `given`."""

    def __init__(self, case: _Case, events: list[Any], state: Any) -> None:
        self._case, self._events, self._state = case, events, state

    def when(
        self,
        method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Outcome[R, S, Ev]:
        """Ask the entity, and see what came of it."""
        sim = Sim(
            0,
            entities=[self._case.kind, *self._case.beside],
            nodes=0,
            settings=Settings(shards=1),
            resources=self._case.resources,
        )
        try:
            main = self._case.run(sim, self._events, self._state, method, args, kwargs)
            found = sim.world.run(main, sim.loop)
        finally:
            sim.close()
        for process, context in sim.world.errors:
            error = context.get("exception")
            raise AssertionError(f"{process}: {context.get('message')}") from error
        return Outcome(self._case, *found)


class Outcome(Generic[R, S, Ev]):
    """What came of a message. `then`, `rejects` and `fails` compare, and return the same object."""

    def __init__(
        self, case: _Case, past: list[Any], events: list[Any], state: Any, reply: Any, error: Any
    ) -> None:
        self._case, self._past, self._reply, self._error = case, past, reply, error
        self.events: list[Ev] = events
        """The events that the message has stored."""
        self.state: S = state
        """The state that the journal holds now."""

    @property
    def reply(self) -> R:
        """What the handler returned; raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._reply  # type: ignore[no-any-return]

    @property
    def error(self) -> BaseException | None:
        """What the caller got instead of a reply."""
        return self._error  # type: ignore[no-any-return]

    def then(self, *, events: Sequence[Ev] = _ANY, reply: R = _ANY, state: S = _ANY) -> Self:
        """The message was handled, with these new events, this reply, this state: what is given."""
        got = self.reply
        if events is not _ANY:
            _same("events", list(events), self.events)
        if reply is not _ANY:
            _same("reply", reply, got)
        if state is not _ANY:
            _same("state", state, self.state)
        return self

    def rejects(self, kind: type[Rejection], /, *args: Any) -> Self:
        """The handler has raised this rejection, with these arguments if any are given.

        A message that is rejected stores nothing.
        """
        if not isinstance(self._error, kind):
            raise AssertionError(f"expected {kind.__name__}, got {self._told()}") from self._error
        if args:
            _same(f"arguments of {kind.__name__}", args, self._error.args)
        _same("events of a rejected message", [], self.events)
        return self

    def fails(self, text: str = "") -> Self:
        """The handler has failed, with this text somewhere in its error."""
        if not isinstance(self._error, HandlerFailed) or text not in str(self._error):
            raise AssertionError(
                f"expected a failure with {text!r}, got {self._told()}"
            ) from self._error
        return self

    def when(
        self,
        method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Outcome[T, S, Ev]:
        """Ask the entity again, after what has happened."""
        later: Given[S, Ev] = Given(self._case, [*self._past, *self.events], self.state)
        return later.when(method, *args, **kwargs)

    def _told(self) -> str:
        if self._error is None:
            return f"the reply {self._reply!r}"
        return f"{type(self._error).__name__}: {self._error}"


class _Case:
    """What all messages of one test have in common."""

    def __init__(
        self,
        kind: Any,
        id: str,
        resources: Mapping[type[Any], Any],
        beside: Sequence[type[Entity]],
    ) -> None:
        self.kind, self.id, self.beside = kind, id, beside
        self._resources = resources
        self.is_whole = issubclass(kind, Durable)

    @asynccontextmanager
    async def resources(self) -> AsyncGenerator[Mapping[type[Any], Any], None]:
        yield self._resources

    async def run(
        self, sim: Sim, past: list[Any], state: Any, method: Any, args: Any, kwargs: Any
    ) -> tuple[list[Any], list[Any], Any, Any, BaseException | None]:
        """Store the past, ask, and read what is stored: past, new events, state, reply, error."""
        reply, error = None, None
        async with sim:
            await self._store(sim, past, state)
            sim.add()
            await sim.wait_until(sim.settled)
            try:
                reply = await sim.ref(self.kind, self.id).ask(method, *args, **kwargs)
            except Exception as raised:
                error = raised
            await sim.advance(AFTERWARDS_S)
            live = self._live(sim)
            first, events, stored = await self._load(sim)
            if live is not UNREAD:
                _same_stored(f"the state of {self.kind.__name__}", live, stored)
        # What an erasure or a deletion has left of the past comes first.
        kept = max(0, len(past) + 1 - first)
        return events[:kept], events[kept:], stored, reply, error

    async def _store(self, sim: Sim, past: list[Any], state: Any) -> None:
        key, shard = EntityKey(entity_type(self.kind).name, self.id), sim.shard(self.kind, self.id)
        vault = Vault(Random(0), is_whole=self.is_whole)
        events: list[bytes] = []
        whole: bytes | None = None
        with vault.open():
            if not self.is_whole:
                codec = self.kind.__domicile_events__
                for event in past:
                    events.append(codec.encode(event))
                    _same_stored(f"the event {event!r}", event, codec.decode(events[-1]))
            elif state is not _ANY:
                whole = self.kind.__domicile_state__.encode(state)
                read = self.kind.__domicile_state__.read(whole)
                _same_stored(f"the state of {self.kind.__name__}", state, read)
        values = vault.take()
        writes: list[JournalWrite] = []
        if values is not None:
            kept = ((), values) if self.is_whole else ((values,), None)
            writes.append(JournalWrite(shard, vault_key(key), 0, kept[0], state=kept[1]))
        if events or whole is not None:
            writes.append(JournalWrite(shard, key, 0, tuple(events), state=whole))
        if writes:
            # Under the claim that a shard has before anybody claims it.
            first = Claim(shard, 0, 0, NOBODY)
            journal = sim.servers.remote_journal(sim.loop, sim.servers.faults("given"))
            answers = await journal.write(Batch(1, (first,), tuple(writes)))
            assert all(isinstance(one, Written) for one in answers), answers

    async def _load(self, sim: Sim) -> tuple[int, list[Any], Any]:
        """The number of the first stored event, all of them, and the state that they give."""
        key = EntityKey(entity_type(self.kind).name, self.id)
        journal = sim.servers.remote_journal(sim.loop, sim.servers.faults("then"))
        wanted = [Wanted(vault_key(key), 0), Wanted(key, 0, snapshot=False)]
        values, found = await journal.recover(wanted, MOST_BYTES)
        vault = Vault(Random(0), is_whole=self.is_whole)
        vault.refill(values.events if values.state is None else (values.state,))
        state = self.kind.initial(self.id)
        with vault.open():
            if self.is_whole:
                codec = self.kind.__domicile_state__
                return 1, [], state if found.state is None else codec.read(found.state)
            events = [self.kind.__domicile_events__.decode(data) for data in found.events]
            for event in events:
                state = self.kind.apply(state, event)
            policy = self.kind.__domicile_snapshots__
            if policy is not None:
                read = policy.codec.decode(policy.codec.encode(state), unfit=UNREAD)
                _same_stored(f"the state of {self.kind.__name__}", state, read)
        return found.seq - len(events) + 1, events, state

    def _live(self, sim: Sim) -> Any:
        """The state that the entity itself shows now; `UNREAD` if it has not read it."""
        shard, key = sim.shard(self.kind, self.id), (entity_type(self.kind).name, self.id)
        node = sim.nodes[0].node
        life = None if node is None else node.life
        cell = None if life is None else life.runtime.hosts[shard].cells.get(EntityKey(*key))
        log = None if cell is None else cell.gate
        return log.state if isinstance(log, EntityLog) else UNREAD


def _same(what: str, expected: Any, got: Any) -> None:
    if expected != got:
        raise AssertionError(f"{what}: expected {expected!r}, got {got!r}")


def _same_stored(what: str, before: Any, after: Any) -> None:
    """What is stored must come back as it was."""
    if before != after:
        raise AssertionError(
            f"{what} does not come back from the journal as it was: {before!r} became {after!r}. "
            "Store types that keep what they hold, such as tuples as tuple[...], and make apply() "
            "pure: it must depend on the state and the event alone"
        )
