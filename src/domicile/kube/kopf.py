"""A kopf operator as an instance of a ring: many replicas, each with its part of the objects (K7).

    from domicile.kube.kopf import ring

    ring("websites")

Call it above the handlers, and run the program by `kopf run`. It takes the instance's Lease before
kopf starts, and gives kopf a session that lists and watches only the instance's own objects and
refuses writes without the Lease. When the sharder asks for an object, its labels are removed after
the object's handlers, in the cycle of kopf that runs them. When the Lease is lost, the process
ends.

Kopf's daemons and timers run beside that cycle. Those of the ring's objects are made by the ring
(`daemon`, `timer`); an operator with others does not start. Nor does one with handlers of a kind
that the ring's objects control. This module must never act on an object by itself.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, TypeVar

from domicile.errors import ConfigError
from domicile.kube.conventions import DEFAULT_DURATION_S
from domicile.kube.member import Ring, RingMember
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.credentials import Credentials, find_credentials
from domicile.kubeapi.errors import KubeNotFound
from domicile.kubeapi.follow import ObjectChanged, ObjectsListed, follow
from domicile.kubeapi.http_exchange import HttpExchange, tls_context
from domicile.kubeapi.kinds import RINGS, ApiKind
from domicile.kubeapi.objects import ControllerRing, PartialObject

try:
    import aiohttp
    import kopf
    from kopf._cogs.clients.errors import APINotFoundError
except ImportError as missing:
    raise ConfigError(
        "operators of kopf need more packages: pip install 'domicile[kopf]'"
    ) from missing

log = logging.getLogger("domicile.kube")

SETTLE_S = 5.0
"""How long a leaving operator lets handlers end before it cancels them."""

READS = ("GET", "HEAD", "OPTIONS")

MAX_GONE = 10_000
"""I6: objects that were let go of and are remembered."""

JSON_PATCH = "application/json-patch+json"

_LETS_GO: ContextVar[str] = ContextVar("domicile-lets-go", default="")
"""The version of the object whose labels are removed by the next JSON patch of this task."""

_Handler = TypeVar("_Handler", bound=Callable[..., Awaitable[Any]])


def ring(
    name: str,
    *,
    instance: str | None = None,
    namespace: str | None = None,
    duration_s: int = DEFAULT_DURATION_S,
    unique_name: bool | None = None,
    kubeconfig: str | None = None,
    context: str | None = None,
    on_loss: Callable[[str], None] | None = None,
    registry: kopf.OperatorRegistry | None = None,
) -> KopfRing:
    """Make the kopf operator of this process an instance of a ring.

    The instance's name is the pod's unless another one is given. The server is that of the pod or
    of the kubeconfig. `unique_name` is that of `Ring.member`. `on_loss` is called with the reason
    instead of ending the process; its caller then has to stop `kopf.operator` at once.
    """
    made = KopfRing(
        Ring(name),
        instance=instance,
        namespace=namespace,
        duration_s=duration_s,
        unique_name=unique_name,
        credentials=functools.partial(find_credentials, kubeconfig, context),
        on_loss=on_loss,
        registry=registry if registry is not None else kopf.get_default_registry(),
    )
    made.register()
    return made


class KopfRing:
    """The membership of an operator. `ring` makes it; kopf calls its hooks."""

    def __init__(
        self,
        of: Ring,
        *,
        instance: str | None,
        namespace: str | None,
        duration_s: int,
        unique_name: bool | None,
        credentials: Callable[[], Credentials],
        on_loss: Callable[[str], None] | None,
        registry: kopf.OperatorRegistry,
    ) -> None:
        self.ring = of
        self._instance, self._namespace, self._duration_s = instance, namespace, duration_s
        self._unique_name = unique_name
        self._find_credentials = credentials
        self._on_loss = on_loss
        self._registry = registry
        self._credentials: Credentials | None = None
        self._client: KubeClient | None = None
        self._member: RingMember | None = None
        self._resources: dict[tuple[str, str], str] = {}
        self._running: dict[str, dict[asyncio.Task[Any], None]] = {}
        self._draining: dict[str, None] = {}
        self._writing: dict[str, int] = {}
        self._written = asyncio.Event()
        self._gone: dict[str, str] = {}
        self._present: frozenset[asyncio.Task[Any]] = frozenset()
        self._own: list[asyncio.Task[None]] = []
        self._leaving = False
        self.failure = ""
        """Why the operator is over; empty before that."""

    # For handlers.

    @property
    def member(self) -> RingMember:
        """The instance, once kopf has started."""
        if self._member is None:
            raise RuntimeError(f"the ring {self.ring.name} is joined when kopf starts, not before")
        return self._member

    @property
    def client(self) -> KubeClient:
        """A client whose writes are refused once the Lease is not valid."""
        return self.member.client

    def guard(self) -> None:
        """Raise `Fenced` unless this instance may act now. To be called before each write that goes
        neither through kopf nor through `client`."""
        self.member.guard()

    def daemon(
        self, *where: str, labels: Mapping[str, Any] | None = None, **more: Any
    ) -> Callable[[_Handler], _Handler]:
        """`kopf.daemon` for objects of the ring: cancelled when the sharder asks for the object,
        which is given up after the function has ended. The function has to be asynchronous."""
        return self._beside(kopf.daemon, where, labels, more)

    def timer(
        self, *where: str, labels: Mapping[str, Any] | None = None, **more: Any
    ) -> Callable[[_Handler], _Handler]:
        """`kopf.timer` for objects of the ring, as `daemon`."""
        return self._beside(kopf.timer, where, labels, more)

    def _beside(
        self,
        decorator: Callable[..., Any],
        where: tuple[str, ...],
        labels: Mapping[str, Any] | None,
        more: Mapping[str, Any],
    ) -> Callable[[_Handler], _Handler]:
        # Kopf stops it when the label comes, and starts it again if the object stays here.
        filter = {**(labels or {}), self.ring.drain_label: kopf.ABSENT}
        registered = decorator(*where, labels=filter, registry=self._registry, **more)

        def register(function: _Handler) -> _Handler:
            registered(self._tracked(function))
            return function

        return register

    def _tracked(self, function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        if not inspect.iscoroutinefunction(function):
            name = getattr(function, "__name__", "the function")
            raise TypeError(f"{name} has to be async: a thread can't be cancelled")

        @functools.wraps(function)
        async def run(*args: Any, **kwargs: Any) -> Any:
            uid = str(kwargs["uid"])
            if uid in self._draining:
                return None
            self.guard()
            work = asyncio.ensure_future(function(*args, **kwargs))
            self._running.setdefault(uid, {})[work] = None
            try:
                await asyncio.wait((work,))
            except asyncio.CancelledError:
                work.cancel()
                await asyncio.wait((work,))
                raise
            finally:
                self._running[uid].pop(work)
                if not self._running[uid]:
                    del self._running[uid]
            if uid not in self._draining:
                return work.result()
            if not work.cancelled() and work.exception() is not None:
                log.warning("a daemon of a drained object failed: %s", work.exception())
            kwargs["patch"].clear()  # the object is not ours to write to any more
            stopped = kwargs.get("stopped")
            if stopped is not None:
                await stopped.wait()
            return None

        run.__domicile_ring__ = self  # type: ignore[attr-defined]
        return run

    # Hooks of kopf.

    def register(self) -> None:
        """Add the hooks to kopf's registry."""
        name, registry = self.ring.name, self._registry
        kopf.on.startup(id=f"domicile-join-{name}", registry=registry)(self._start)
        kopf.on.login(id=f"domicile-login-{name}", registry=registry)(self._login)
        kopf.on.cleanup(id=f"domicile-leave-{name}", registry=registry)(self._stop)

    async def _start(self, settings: kopf.OperatorSettings, **_: Any) -> None:
        try:
            await self._join(settings)
        except ConfigError as error:
            raise kopf.PermanentError(str(error)) from error

    async def _join(self, settings: kopf.OperatorSettings) -> None:
        self._present = frozenset(asyncio.all_tasks())
        found = self._credentials = self._find_credentials()
        client = self._client = KubeClient(HttpExchange(found), account=found.account)
        try:
            wanted = await client.get(RINGS, self.ring.name)
        except KubeNotFound as error:
            raise ConfigError(
                f"there is no ControllerRing {self.ring.name} at {client.server}: create it first, "
                "with the resources of this operator"
            ) from error
        resources = _resources_of(wanted)
        kinds: list[ApiKind[PartialObject]] = []
        for group, plural in resources:
            kind = await client.discover(group, plural)
            kinds.append(kind)
            self._resources[group, plural] = kind.version
            self.check_handlers(kind, main=resources[group, plural])
            if resources[group, plural]:
                kopf.on.event(
                    group=kind.group,
                    version=kind.version,
                    plural=kind.plural,
                    id=f"domicile-drain-{self.ring.name}",
                    registry=self._registry,
                )(self._let_go)
        if others := self.unshared(kinds):
            log.warning(
                "handlers of what is not in the ring %s run in every replica at once: %s; put "
                "their kinds into the ring, or them into a program of one replica",
                self.ring.name,
                ", ".join(others),
            )
        # Peering would pause all operators but one. A move is no change of an object.
        settings.peering.standalone = True
        for label in (self.ring.shard_label, self.ring.drain_label):
            field = ("metadata", "labels", label)
            settings.persistence.diffbase_storage.ignored_fields.append(field)
        member = self.ring.member(
            client,
            instance=self._instance,
            namespace=self._namespace or found.namespace,
            duration_s=self._duration_s,
            unique_name=self._unique_name,
            ends_process=self._on_loss is None,
        )
        await member.join()
        self._member = member
        loop = asyncio.get_running_loop()
        self._own = [
            loop.create_task(self._watch_lease()),
            loop.create_task(self._watch_ring(resources)),
        ]

    def unshared(self, kinds: Collection[ApiKind[PartialObject]]) -> list[str]:
        """Handlers of objects that are of none of these kinds, with what they are for. Indexes are
        left out: each replica needs its own."""
        registry = self._registry
        found: dict[str, None] = {}
        for part in (registry._watching, registry._changing, registry._spawning):  # pyright: ignore[reportPrivateUsage]
            for handler in part.get_all_handlers():
                told = handler.selector
                if told is not None and not any(_may_match(told, kind) for kind in kinds):
                    found[f"{handler.id} ({told})"] = None
        return list(found)

    def check_handlers(self, kind: ApiKind[PartialObject], *, main: bool) -> None:
        """Raise `ConfigError` for a handler of this kind that would go on after its object belongs
        to another instance. Kopf does not say which daemons run for an object, so each has to tell
        us. Of the end of a cycle nobody is told: what an owner controls moves after the owner, and
        the ring could not wait for a cycle of it (K7)."""
        registry = self._registry
        daemons = registry._spawning.get_all_handlers()  # pyright: ignore[reportPrivateUsage]
        for handler in daemons if main else ():
            ours = getattr(handler.fn, "__domicile_ring__", None) is self
            if _may_match(handler.selector, kind) and not ours:
                raise ConfigError(
                    f"{handler.id} is a daemon or timer of {kind.shown} and would go on after its "
                    f"object belongs to another instance: use the ring's own decorator, "
                    f"ring({self.ring.name!r}).daemon or .timer, instead of kopf's"
                )
        if main:
            return
        for part in (registry._watching, registry._changing, registry._spawning):  # pyright: ignore[reportPrivateUsage]
            for one in part.get_all_handlers():
                if _may_match(one.selector, kind):
                    raise ConfigError(
                        f"{one.id} is a handler of {kind.shown}, which the ring "
                        f"{self.ring.name} moves without asking, after their owners: handle the "
                        "resource that owns them and read them by an index, or put them into the "
                        "ring's resources instead of controlledResources"
                    )

    async def _login(self, **_: Any) -> kopf.AiohttpSession:
        found = self._credentials
        if found is None:
            raise kopf.TemporaryError("the ring has not been joined yet", delay=1)
        tls = tls_context(found) if found.server.startswith("https://") else False
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls),
            middlewares=(self._between,),
            trace_configs=[self._checked_when_connected()],
        )
        return kopf.AiohttpSession(
            server=found.server, default_namespace=found.namespace, aiohttp_session=session
        )

    def _checked_when_connected(self) -> aiohttp.TraceConfig:
        """A connection may have taken seconds: a write is checked again directly before it is
        sent. What these callbacks raise, kopf's request raises."""

        async def began(
            _: aiohttp.ClientSession, context: Any, params: aiohttp.TraceRequestStartParams
        ) -> None:
            context.writes = params.method not in READS

        async def connected(_: aiohttp.ClientSession, context: Any, __: Any) -> None:
            if context.writes:
                self.guard()

        found = aiohttp.TraceConfig()
        found.on_request_start.append(began)
        found.on_connection_create_end.append(connected)
        found.on_connection_reuseconn.append(connected)
        return found

    async def _between(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """A request of kopf to the API server, on its way."""
        assert self._credentials is not None
        listed = listed_resource(request.url.path) if request.method == "GET" else None
        if request.method not in READS:
            self.guard()
        elif listed is not None and (listed[0], listed[2]) in self._resources:
            self._check_version(*listed)
            selectors = (request.url.query.get("labelSelector", ""), self.member.selector)
            wanted = ",".join(one for one in selectors if one)
            request.url = request.url.update_query(labelSelector=wanted)
        token = await self._credentials.bearer_now()
        if token:
            request.headers["Authorization"] = f"Bearer {token}"
        if self._credentials.server_name:
            request.server_hostname = self._credentials.server_name
        one = written_object(request.url.path) if request.method == "PATCH" else None
        if one is None or one[:2] not in self._resources:
            return await handler(request)
        if request.headers.get("Content-Type") == JSON_PATCH and _LETS_GO.get():
            return await self._let_go_by("/".join(one), request, handler)
        return await self._write_to("/".join(one), request, handler)

    async def _let_go_by(
        self, one: str, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """After all writes to the object that are on their way; what a timer returned is sent when
        it has ended (K7). None begins any more."""
        version = _LETS_GO.get()
        _LETS_GO.set("")
        repeated = self._gone.pop(one, None) == version
        self._gone[one] = version
        if len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]
        while one in self._writing:
            self._written.clear()
            await self._written.wait()
        try:
            answer = await handler(request)
        except BaseException:
            _LETS_GO.set(version)  # kopf repeats it
            raise
        if answer.status >= 500 or answer.status in (403, 429):
            _LETS_GO.set(version)
        if 400 <= answer.status < 500 and not repeated:
            self._gone.pop(one, None)  # nothing happened
        return answer

    async def _write_to(
        self, one: str, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        if one in self._gone:
            # As if it did not exist: kopf lets such a patch drop.
            said = f"{one} was let go of; nothing was written"
            raise APINotFoundError(said, status=404, headers={})
        self._writing[one] = self._writing.get(one, 0) + 1
        try:
            return await handler(request)
        finally:
            self._writing[one] -= 1
            if not self._writing[one]:
                del self._writing[one]
            self._written.set()

    def _check_version(self, group: str, version: str, plural: str) -> None:
        """Kopf works on an object once per version, and one of them can't wait for the other."""
        if self._resources[group, plural] != version:
            self._end(
                f"a handler names {plural}.{group} in version {version}, but the API server "
                f"prefers {self._resources[group, plural]}: name that one in all handlers"
            )

    async def _let_go(
        self,
        uid: str,
        labels: Mapping[str, str],
        patch: kopf.Patch,
        type: str | None,
        resource: Any,
        name: str,
        namespace: str | None,
        **_: Any,
    ) -> None:
        """See whether the sharder asks for the object. Its other handlers wait for this one, and
        the patch is sent after them."""
        ours = labels.get(self.ring.shard_label) == self.member.instance
        one = "/".join((resource.group, resource.plural, namespace or "", name))
        away = ours and type != "DELETED" and one in self._gone
        if away and await self._is_here(resource, namespace or "", name):
            del self._gone[one]  # it has come back, or was not let go of
        if type == "DELETED" or not ours or self.ring.drain_label not in labels:
            self._draining.pop(uid, None)
            return
        self._draining[uid] = None
        for work in self._running.get(uid, {}):
            work.cancel()
        while running := self._running.get(uid):
            await asyncio.wait(tuple(running))
            await asyncio.sleep(0)
        patch.fns.append(self._without_labels)

    async def _is_here(self, resource: Any, namespace: str, name: str) -> bool:
        """Whether an object that was let go of belongs to this instance, as it is now: an event may
        be older, and nobody may know what became of the patch."""
        assert self._client is not None
        kind = ApiKind(
            resource.group, resource.version, resource.plural, resource.kind or "",
            bool(namespace), PartialObject,
        )  # fmt: skip
        try:
            found = await self._client.get_metadata(kind, name, namespace)
        except KubeNotFound:
            return False
        return self.member.owns(found.metadata)

    def _without_labels(self, body: Any) -> None:
        """Kopf sends the difference with the version of this body."""
        labels: dict[str, str] = body["metadata"].get("labels", {})
        ours = labels.get(self.ring.shard_label) == self.member.instance
        if ours and self.ring.drain_label in labels:
            del labels[self.ring.drain_label], labels[self.ring.shard_label]
            _LETS_GO.set(str(body["metadata"].get("resourceVersion") or "0"))

    async def _stop(self, **_: Any) -> None:
        """Kopf has ended: give the Lease back, unless a handler is still at work."""
        self._leaving = True
        for task in self._own:
            task.cancel()
        member, client = self._member, self._client
        if member is not None:
            left = await self._settle()
            if left:
                member.work_goes_on(f"these go on: {', '.join(sorted(left))}")
            await member.leave()
        if client is not None:
            await client.close()
        if self.failure:
            raise kopf.PermanentError(self.failure)

    async def _settle(self) -> list[str]:
        """Wait for what kopf has left running, then cancel it. Returns what does not end."""
        known = {*self._present, *self._own, asyncio.current_task()}
        left: list[asyncio.Task[Any]] = []
        for cancel in (False, True):
            left = [
                task
                for task in asyncio.all_tasks()
                if task not in known
                and not task.get_name().startswith(("kube-lease-", "stop-flag waiter"))
            ]
            if not left:
                break
            if cancel:
                for task in left:
                    task.cancel()
            _, pending = await asyncio.wait(left, timeout=SETTLE_S)
            left = list(pending)
        return [task.get_name() for task in left]

    # Endings.

    async def _watch_lease(self) -> None:
        member = self.member
        await member.wait_lost()
        if not self._leaving:
            self._end(
                f"{member.instance} lost its Lease of the ring {self.ring.name}: {member.reason}; "
                "its objects belong to others now"
            )

    async def _watch_ring(self, resources: Mapping[tuple[str, str], bool]) -> None:
        """Other resources need other selectors from their first list on."""
        assert self._client is not None
        async with aclosing(follow(self._client, RINGS)) as changes:
            async for change in changes:
                match change:
                    case ObjectsListed(items):
                        rings = items
                    case ObjectChanged(one):
                        rings = (one,)
                    case _:
                        rings = ()
                for one in rings:
                    if one.metadata.name == self.ring.name and _resources_of(one) != resources:
                        self._end(f"the resources of the ring {self.ring.name} have changed")

    def _end(self, reason: str) -> None:
        if self.failure:
            return
        self.failure = reason
        log.error("%s; the process ends", reason)
        if self._on_loss is not None:
            self._on_loss(reason)
        else:
            # Kopf ends in good order; the member's watchdog is for what does not.
            os.kill(os.getpid(), signal.SIGTERM)


def listed_resource(path: str) -> tuple[str, str, str] | None:
    """Group, version and plural of a list or watch of many objects, by the path of its URL; None
    for a single object and for anything else."""
    parts = path.strip("/").split("/")
    match parts:
        case ["api", version, *rest]:
            group = ""
        case ["apis", group, version, *rest]:
            pass
        case _:
            return None
    if len(rest) == 3 and rest[0] == "namespaces":
        rest = rest[2:]
    return (group, version, rest[0]) if len(rest) == 1 else None


def written_object(path: str) -> tuple[str, str, str, str] | None:
    """Group, resource, namespace and name of an object, by the path of its URL or of a subresource;
    None for anything else."""
    match path.strip("/").split("/"):
        case ["api", _, *rest]:
            group = ""
        case ["apis", group, _, *rest]:
            pass
        case _:
            return None
    match rest:
        case ["namespaces", namespace, plural, name, *_]:
            return group, plural, namespace, name
        case [plural, name] | [plural, name, "status"]:
            return group, plural, "", name
        case _:
            return None


def _resources_of(ring: ControllerRing) -> dict[tuple[str, str], bool]:
    """The ring's resources: those with a right of their own (True), and those they control."""
    found: dict[tuple[str, str], bool] = {}
    for main in ring.spec.resources:
        for one in main.controlled_resources:
            found.setdefault((one.group, one.resource), False)
    for main in ring.spec.resources:
        found[main.group, main.resource] = True
    return found


def _may_match(selector: Any, kind: ApiKind[PartialObject]) -> bool:
    """Whether a handler may be one of this kind; True in doubt."""
    if selector is None:
        return False
    if selector.group not in (None, kind.group):
        return False
    names = (kind.plural.lower(), kind.kind.lower())
    told = (selector.plural, selector.kind, selector.singular, selector.any_name)
    return all(not isinstance(one, str) or one.lower() in names for one in told)
