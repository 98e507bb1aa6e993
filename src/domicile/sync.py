"""A way into a cluster for programs without an event loop: `connect_sync` (DX-12).

Each client has one thread of its own, with an event loop and an ordinary client in it; callers hand
their calls over and wait. Any number of threads may call. It must never block an event loop, leave
its thread behind, or touch a connection that another process opened before a fork.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import aclosing, contextmanager, suppress
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, Self, TypeVar

from domicile import config
from domicile.backends.registry import shown_url
from domicile.client import ConnectedClient, connect
from domicile.entity.model.entity import Entity, entity_type
from domicile.entity.model.ref import Call, Outbound, Ref
from domicile.errors import ConfigError, MaybeExecuted, Unavailable
from domicile.failover.following import Group, Primary
from domicile.ports.meter import Meter
from domicile.ports.trace import Tracer
from domicile.settings import Settings

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound=Entity)

_KEEP: Any = object()

_LONGEST_S = 3600.0
_LOOK_S = 0.5


class SyncClient:
    """A client of one cluster for plain threads. Made by `connect_sync`; any thread may use it.

    It connects when it is entered or first used, and leaves when it is closed, at the end of a
    `with` block or when the program ends.
    """

    def __init__(self, store: str, make: Callable[[], ConnectedClient], settings: Settings) -> None:
        self._store, self._make, self._settings = store, make, settings
        self._way = _Way()
        self._lock = threading.Lock()
        self._portal: _Portal | None = None
        self._closed = False
        make()  # so that a wrong URL is found here and now

    def ref(self, kind: type[E], id: str, /) -> SyncRef[E]:
        """The address of an entity. Nothing is sent, and the entity need not exist yet."""
        return SyncRef(Ref(entity_type(kind), id, self._way), self)

    def group(self, name: str, /) -> SyncGroup:
        """A replica group in the same store and cluster. Nothing is read yet."""
        return SyncGroup(name, self)

    def __repr__(self) -> str:
        standing = "closed" if self._closed else "not connected"
        if self._portal is not None and not self._closed:
            standing = "failed" if self._portal.failed else "connected"
        return f"<SyncClient in {shown_url(self._store)}: {standing}>"

    def close(self) -> None:
        """Leave the cluster and end the thread; calls under way get their answers first (H14)."""
        _check_thread()
        with self._lock:
            self._closed = True
            portal = self._portal
        if portal is not None and portal.pid == os.getpid():
            portal.close()

    def __enter__(self) -> Self:
        """Connect; `Unavailable` if that takes longer than an ask may."""
        try:
            self._connected(self._settings.ask_timeout_s)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        """Leave."""
        self.close()

    def call(self, timeout_s: float | None, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Have something done by the client's thread and wait for it; for refs."""
        limit_s = self._settings.ask_timeout_s if timeout_s is None else timeout_s
        return self._connected(limit_s).call(work)

    def grouped(self, name: str) -> Group:
        """The group of the connection that stands now; for `SyncGroup`."""
        return self._connected(self._settings.ask_timeout_s).client.group(name)

    def _connected(self, limit_s: float) -> _Portal:
        _check_thread()
        portal = self._portal
        if portal is None or portal.pid != os.getpid() or portal.failed:
            portal = self._connect()
        portal.wait_until_up(limit_s)
        return portal

    def _connect(self) -> _Portal:
        with self._lock:
            portal = self._portal
            if portal is not None and portal.pid != os.getpid():
                raise _forked(self._store)
            if self._closed:
                raise Unavailable("this client was closed; call connect_sync() again")
            if portal is None or portal.failed:
                if self._store in _inherited:
                    raise _forked(self._store)
                portal = self._portal = _Portal(self._store, self._make(), self._way)
            return portal


class SyncRef(Generic[E]):
    """The address of one entity, for plain threads. Cheap to make; equal to others of the same."""

    __slots__ = ("_client", "_ref", "_timeout_s")

    def __init__(self, ref: Ref[E], client: SyncClient, timeout_s: float | None = None) -> None:
        self._ref, self._client, self._timeout_s = ref, client, timeout_s

    @property
    def id(self) -> str:
        """The entity's id."""
        return self._ref.id

    def ask(
        self,
        method: Callable[Concatenate[E, P], Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Run a handler at the entity's home and return its value: at most once, in order.

        Raises `NotExecuted`, `MaybeExecuted`, `HandlerFailed`, or the handler's `Rejection`. Ctrl-C
        ends the wait at once; the handler may have run.
        """
        return self._client.call(self._timeout_s, lambda: self._ref.ask(method, *args, **kwargs))

    def tell(
        self,
        method: Callable[Concatenate[E, P], Coroutine[Any, Any, Any]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Have a handler run at the entity's home; return once queued. At most once, in order."""
        self._client.call(self._timeout_s, lambda: self._ref.tell(method, *args, **kwargs))

    def options(self, *, timeout_s: float = _KEEP, key: str = _KEEP) -> Self:
        """The same address with other terms, as `Ref.options`."""
        terms: dict[str, Any] = {}
        if timeout_s is not _KEEP:
            terms["timeout_s"] = timeout_s
        if key is not _KEEP:
            terms["key"] = key
        limit_s = self._timeout_s if timeout_s is _KEEP else timeout_s
        return type(self)(self._ref.options(**terms), self._client, limit_s)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SyncRef):
            return NotImplemented
        return self._ref == other._ref  # pyright: ignore[reportUnknownMemberType]

    def __hash__(self) -> int:
        return hash(self._ref)

    def __repr__(self) -> str:
        return f"Sync{self._ref!r}"


class SyncGroup:
    """One replica group, for plain threads. Made by `SyncClient.group`."""

    def __init__(self, name: str, client: SyncClient) -> None:
        self.name, self._client = name, client

    def primary(self, *, wait_s: float | None = None) -> Primary:
        """As `Group.primary`."""
        group = self._client.grouped(self.name)
        return self._asked(lambda: group.primary(wait_s=wait_s))

    def primaries(self) -> Iterator[Primary]:
        """As `Group.primaries`: each step waits for the next one."""
        found = self._client.grouped(self.name).primaries()

        async def following() -> Primary:
            return await anext(found)

        try:
            while True:
                yield self._asked(following)
        finally:
            with suppress(Unavailable):
                self._asked(found.aclose)

    @contextmanager
    def followed(self, told: Callable[[Primary], None]) -> Generator[Callable[[], None]]:
        """Each new primary is told by the client's thread, for as long as the block lasts.

        `told` must not block. What the block is given raises why there is no more news, if there
        is none. For helpers; programs use `primaries`.
        """
        group = self._client.grouped(self.name)

        async def follow() -> None:
            async with aclosing(group.primaries()) as primaries:
                async for found in primaries:
                    told(found)

        async def begin() -> asyncio.Task[None]:
            return asyncio.create_task(follow(), name="domicile-primary-course")

        following = self._asked(begin)

        async def end() -> None:
            following.cancel()
            await asyncio.wait([following])
            if not following.cancelled():
                following.exception()

        def check() -> None:
            if following.cancelled():
                raise Unavailable("this client was closed; call connect_sync() again")
            if following.done():
                following.result()

        process = os.getpid()
        try:
            yield check
        finally:
            # A fork does not have the thread that follows.
            if os.getpid() == process:
                with suppress(Unavailable):
                    self._asked(end)

    def _asked(self, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        try:
            return self._client.call(None, work)
        except MaybeExecuted as error:
            # Nothing but reading was done.
            raise Unavailable("this client was closed; call connect_sync() again") from error

    def __repr__(self) -> str:
        return f"<SyncGroup {self.name!r}>"


def connect_sync(
    store: str,
    *,
    cluster: str = "domicile",
    token: str | None = None,
    settings: Settings | None = None,
    meter: Meter | None = None,
    tracer: Tracer | None = None,
) -> SyncClient:
    """A way into a cluster for a program without an event loop: Django, Flask, a script.

    `token` is the cluster's secret, else that of `DOMICILE_TOKEN`.

    ::

        client = connect_sync("sqlite:///.domicile/dev.db")
        client.ref(Counter, "c1").ask(Counter.add)
    """
    known = config.from_environment() if settings is None else settings
    return SyncClient(
        store,
        lambda: connect(
            store, cluster=cluster, token=token, settings=known, meter=meter, tracer=tracer
        ),
        known,
    )


class _Way:
    """Where the refs of a client send: whichever connection stands now."""

    def __init__(self) -> None:
        self.now: Outbound | None = None

    async def ask(self, call: Call) -> Any:
        """As `Outbound.ask`."""
        return await self._standing().ask(call)

    async def tell(self, call: Call) -> None:
        """As `Outbound.tell`."""
        await self._standing().tell(call)

    def _standing(self) -> Outbound:
        assert self.now is not None, "a portal sets it before it is up"
        return self.now


class _Portal:
    """One thread, one event loop, one connected client: from its making to its `close`."""

    def __init__(self, store: str, client: ConnectedClient, way: _Way) -> None:
        self.pid = os.getpid()
        self.store = store
        self.client, self._way = client, way
        self._up: Future[None] = Future()
        self._lock = threading.Lock()
        self._ended = False
        self._pending: dict[Future[Any], None] = {}
        self._loop = asyncio.new_event_loop()
        self._main: asyncio.Task[None] | None = None
        self._leave = asyncio.Event()
        # A daemon, so that a program that ends gets as far as the exit function below.
        self._thread = threading.Thread(target=self._run, name="domicile-sync", daemon=True)
        _portals[self] = None
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether it never stood, and never will."""
        return self._ended and self._up.done() and self._up.exception() is not None

    def wait_until_up(self, limit_s: float) -> None:
        """Until the client has joined; raises what kept it from it."""
        if self._up.done() and self._up.exception() is None:
            return
        try:
            error = self._up.exception(min(limit_s, _LONGEST_S))
        except TimeoutError:
            error = Unavailable(
                f"not connected to {shown_url(self.store)} within {limit_s:g} s: the store is "
                "away, locked or slow. Nothing was sent, so retry is safe"
            )
        if error is not None:
            _throw(error)

    def call(self, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """The result of a coroutine that this thread's loop runs, in the caller's context."""
        with self._lock:
            if self._ended:
                raise Unavailable("this client was closed; call connect_sync() again")
            future = asyncio.run_coroutine_threadsafe(work(), self._loop)
            self._pending[future] = None
        try:
            error = _outcome(future)
            if error is None:
                return future.result()
        except CancelledError:
            error = MaybeExecuted("this client was closed before the answer came; it may have run")
        except BaseException:
            # Ctrl-C, or whatever else a signal handler raises: nobody waits for it any more.
            future.cancel()
            raise
        finally:
            self._pending.pop(future, None)
        try:
            _throw(error)
        finally:
            # The error's traceback holds this frame: without this they hold each other.
            del error, future

    def close(self) -> None:
        """Leave, and return once the thread is gone."""
        with self._lock:
            if not self._ended:
                self._loop.call_soon_threadsafe(self._go)
        self._thread.join()

    def _go(self) -> None:
        self._leave.set()
        if not self._up.done() and self._main is not None:
            self._main.cancel()

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            failure = error
        self._ended = True  # also if `_serve` did not get as far
        pending = list(self._pending)
        if failure is None or isinstance(failure, asyncio.CancelledError):
            failure = Unavailable("this client was closed before it was connected")
        if not self._up.done():
            self._up.set_exception(failure)
        for future in pending:
            # The loop ended before it came to these.
            future.cancel()
        _portals.pop(self, None)

    async def _serve(self) -> None:
        self._main = asyncio.current_task()
        try:
            if not self._leave.is_set():
                async with self.client:
                    self._way.now = self.client.outbound
                    self._up.set_result(None)
                    await self._leave.wait()
        finally:
            # From here on the loop takes no more calls; those it has are cancelled.
            with self._lock:
                self._ended = True


def _outcome(future: Future[Any]) -> BaseException | None:
    """Wait for what a future ends with, and look up now and then.

    A signal that comes just before a thread begins to wait does not end that wait: Python runs its
    handler afterwards, and Ctrl-C would be heard once the answer is there.
    """
    while True:
        try:
            return future.exception(_LOOK_S)
        except TimeoutError:
            continue


def _throw(error: BaseException) -> NoReturn:
    """Raise in the caller's thread, without the frames of the client's own."""
    try:
        raise error.with_traceback(None)
    finally:
        del error


def _check_thread() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise ConfigError(
        "a client of connect_sync was used inside an event loop, which would stand still: use "
        "`async with connect(...)` there, or call it in a thread (asyncio.to_thread)"
    )


def _forked(store: str) -> ConfigError:
    return ConfigError(
        f"{shown_url(store)} was connected to before this process was forked, and neither its "
        "thread nor its open files survive a fork. Connect first in the new process: use the "
        "client for the first time there, or close it before the fork"
    )


_portals: dict[_Portal, None] = {}
"""Those of this process that are open."""

_inherited: dict[str, None] = {}
"""Stores that were open when this process was forked. SQLite's bookkeeping of file locks came along
with the memory, the locks did not: to open such a file again here could corrupt it."""


def _after_fork() -> None:
    _inherited.update((portal.store, None) for portal in _portals)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _close_all() -> None:
    for portal in list(_portals):
        if portal.pid == os.getpid():
            portal.close()
