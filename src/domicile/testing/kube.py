"""An API server of Kubernetes in memory, for tests of controllers, in virtual time or real.

    server = FakeApiServer()
    client = KubeClient(server.exchange("a"))

It has the verbs that `domicile.kubeapi` uses, with resource versions, conflicts, watches with
bookmarks, compaction (410), patches, selectors and mutating webhooks. It has no validation, no RBAC
and no garbage collection: what depends on those needs a real server. `faults` decides about each
request; `log` has each write.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from random import Random
from typing import Any, TypeVar, cast
from uuid import UUID

from domicile.kube.ranges import fnv1a
from domicile.kubeapi.exchange import ApiAnswer, ApiRequest, BrokenExchange

Json = dict[str, Any]
_T = TypeVar("_T")

PIECE_BYTES = 4096


class ApiFault(Enum):
    """What becomes of a request."""

    UNREACHABLE = "it does not reach the server"
    UNANSWERED = "it is carried out, and the answer is lost"
    BUSY = "the server refuses it for now (429)"
    BROKEN = "the server fails before it does anything (500)"


@dataclass(frozen=True, slots=True)
class ServedKind:
    """A kind of objects that the server knows."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True


SERVED = (
    ServedKind("", "v1", "namespaces", "Namespace", False),
    ServedKind("", "v1", "configmaps", "ConfigMap"),
    ServedKind("", "v1", "secrets", "Secret"),
    ServedKind("", "v1", "events", "Event"),
    ServedKind("", "v1", "pods", "Pod"),
    ServedKind("", "v1", "nodes", "Node", False),
    ServedKind("coordination.k8s.io", "v1", "leases", "Lease"),
    ServedKind("sharding.timebertt.dev", "v1alpha1", "controllerrings", "ControllerRing", False),
    ServedKind(
        "admissionregistration.k8s.io",
        "v1",
        "mutatingwebhookconfigurations",
        "MutatingWebhookConfiguration",
        False,
    ),
)


@dataclass(frozen=True, slots=True)
class ApiWrite:
    """A write that was carried out."""

    at: float
    client: str
    verb: str
    plural: str
    namespace: str
    name: str
    before: Json | None
    after: Json | None

    def labels(self) -> Mapping[str, str]:
        """The object's labels after it."""
        return (self.after or {}).get("metadata", {}).get("labels") or {}


@dataclass(slots=True)
class _Change:
    version: int
    served: ServedKind
    type: str
    before: Json | None
    after: Json
    at: float


@dataclass(slots=True)
class _Refusal(Exception):
    status: int
    reason: str
    message: str


Webhook = Callable[[str, bytes], "bytes | Awaitable[bytes]"]
"""Takes the path and an AdmissionReview, returns one; raises if it can't be reached. It may be
asynchronous, as `Sharder.answer` is."""


@dataclass(slots=True)
class FakeApiServer:
    """The server. Each client process gets an exchange of its own."""

    random: Random = field(default_factory=lambda: Random(0))
    delay_s: tuple[float, float] = (0.001, 0.01)
    bookmark_s: float = 10.0
    faults: Callable[[str, ApiRequest], ApiFault | None] = lambda client, request: None
    webhook: Webhook | None = None
    """What answers for all MutatingWebhookConfigurations."""
    cache_lag_s: Callable[[str], float] = lambda plural: 0.0
    """How old the cache is that answers a list of resourceVersion=0, by the plural of the kind."""
    log: list[ApiWrite] = field(default_factory=list[ApiWrite])
    filters_shards: bool = True
    """Whether lists and watches follow `shardSelector`, as behind ShardedListAndWatch. A server
    without that ignores it. One with it says so, but not of custom resources."""
    answers_nothing: bool = False
    """Whether something between answers every request: a 404 that is no object of the API."""
    kubernetes: str = "1.29"
    """The version that it says. It knows no CEL, so it is older than the `matchConditions` of
    webhooks."""
    webhook_calls: int = 0
    open_watches: int = 0
    requests: list[tuple[str, ApiRequest]] = field(default_factory=list[tuple[str, ApiRequest]])
    keep_requests: int = 10_000
    _version: int = 0
    _compacted: int = 0
    _kinds: dict[tuple[str, str], ServedKind] = field(
        default_factory=lambda: {(one.group, one.plural): one for one in SERVED}
    )
    _objects: dict[tuple[ServedKind, str, str], Json] = field(
        default_factory=dict[tuple[ServedKind, str, str], Json]
    )
    _changes: list[_Change] = field(default_factory=list[_Change])
    _waiting: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])
    _watches_broken: int = 0
    _owners: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])

    def __post_init__(self) -> None:
        self.put("namespaces", {"metadata": {"name": "default"}})

    # For tests.

    def serve(
        self, group: str, plural: str, kind: str, *, version: str = "v1", namespaced: bool = True
    ) -> None:
        """Know a kind of objects, as a CustomResourceDefinition would make it."""
        self._kinds[group, plural] = ServedKind(group, version, plural, kind, namespaced)

    def exchange(self, client: str) -> FakeExchange:
        """What a `KubeClient` is made with."""
        return FakeExchange(self, client)

    def remove(
        self, plural: str, name: str, group: str = "", *, namespace: str = "default"
    ) -> Json:
        """Delete an object at once, as an anonymous client."""
        served = self._kinds[group, plural]
        return self._do_delete(served, namespace if served.namespaced else "", name, {}, "")

    def objects(self, plural: str, group: str = "") -> list[Json]:
        """All objects of a kind, as they are now."""
        served = self._kinds[group, plural]
        found = [(key[1:], obj) for key, obj in self._objects.items() if key[0] is served]
        return [copy.deepcopy(obj) for _, obj in sorted(found, key=lambda one: one[0])]

    def put(self, plural: str, obj: Json, group: str = "") -> Json:
        """Make an object at once, through webhooks, as an anonymous client. An asynchronous webhook
        can't be asked at once: then an object that it is asked for is made by a client."""
        served = self._kinds[group, plural]
        namespace = obj.get("metadata", {}).get("namespace", "default" if served.namespaced else "")
        return _at_once(self._do_create(served, namespace, copy.deepcopy(obj), ""))

    def compact(self, version: int | None = None) -> None:
        """Forget old versions, up to one if it is given: watches that begin from them are answered
        with 410."""
        self._compacted = self._version if version is None else version
        self._changes[:] = [one for one in self._changes if one.version > self._compacted]
        self.break_watches()

    @property
    def watches_idle(self) -> bool:
        """Whether every watch has seen all changes so far and waits."""
        return self.open_watches == len([one for one in self._waiting if not one.done()])

    def break_watches(self) -> None:
        """Break the connections of all watches."""
        self._watches_broken += 1
        self._wake()

    # Requests.

    async def handle(self, client: str, request: ApiRequest) -> FakeAnswer:
        """Carry out a request."""
        if len(self.requests) < self.keep_requests:
            self.requests.append((client, request))
        await asyncio.sleep(self.random.uniform(*self.delay_s))
        if self.answers_nothing:
            return FakeAnswer(404, b"<html>404 page not found</html>")
        fault = self.faults(client, request)
        if fault is ApiFault.UNREACHABLE:
            raise BrokenExchange("unreachable", sent=False)
        try:
            if fault is ApiFault.BUSY:
                raise _Refusal(429, "TooManyRequests", "try again later")
            if fault is ApiFault.BROKEN:
                raise _Refusal(500, "InternalError", "broken")
            answer = await self._route(client, request)
        except _Refusal as refused:
            said = {
                "kind": "Status",
                "status": "Failure",
                "code": refused.status,
                "reason": refused.reason,
                "message": refused.message,
            }
            answer = FakeAnswer(refused.status, _body(said))
        await asyncio.sleep(self.random.uniform(*self.delay_s))
        if fault is ApiFault.UNANSWERED:
            raise BrokenExchange("the answer was lost", sent=True)
        return answer

    async def _route(self, client: str, request: ApiRequest) -> FakeAnswer:
        parts = request.path.strip("/").split("/")
        if parts == ["version"]:
            major, _, minor = self.kubernetes.partition(".")
            return FakeAnswer(200, _body({"major": major, "minor": minor}))
        if parts[0] == "api":
            group, rest = "", parts[2:]
        else:
            group, rest = parts[1], parts[3:]
        if not rest:
            return self._discovery(group, parts)
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        served = self._kinds.get((group, rest[0]))
        if served is None:
            raise _Refusal(404, "NotFound", "the server could not find the requested resource")
        name = rest[1] if len(rest) > 1 else ""
        subresource = rest[2] if len(rest) > 2 else ""
        body: Json = {}
        if request.body and request.method in ("POST", "PUT", "DELETE"):
            body = json.loads(request.body)
        match request.method:
            case "GET" if name:
                return FakeAnswer(200, _body(self._shown(served, namespace, name, request)))
            case "GET" if request.query.get("watch"):
                return self._watch(served, namespace, request)
            case "GET":
                return self._list(served, namespace, request)
            case "POST":
                return FakeAnswer(
                    201, _body(await self._do_create(served, namespace, body, client))
                )
            case "PUT" if served.plural == "leases" and not self._has(served, namespace, name):
                # As a real server does, whatever resourceVersion is named.
                return FakeAnswer(
                    201, _body(await self._do_create(served, namespace, body, client))
                )
            case "PUT":
                changed = await self._do_change(
                    served, namespace, name, lambda _: body, client, "update"
                )
                return FakeAnswer(200, _body(changed))
            case "PATCH":
                changed = await self._patch(served, namespace, name, subresource, request, client)
                return FakeAnswer(200, _body(changed))
            case "DELETE":
                return FakeAnswer(
                    200, _body(self._do_delete(served, namespace, name, body, client))
                )
            case _:
                raise _Refusal(405, "MethodNotAllowed", request.method)

    def _discovery(self, group: str, parts: list[str]) -> FakeAnswer:
        found = [one for one in self._kinds.values() if one.group == group]
        if not found:
            raise _Refusal(404, "NotFound", f"no group {group}")
        if parts[0] == "apis" and len(parts) == 2:
            return FakeAnswer(200, _body({"preferredVersion": {"version": found[0].version}}))
        resources = [
            {"name": one.plural, "kind": one.kind, "namespaced": one.namespaced} for one in found
        ]
        return FakeAnswer(200, _body({"resources": resources}))

    def _existing(self, served: ServedKind, namespace: str, name: str) -> Json:
        found = self._objects.get((served, namespace, name))
        if found is None:
            raise _Refusal(404, "NotFound", f'{served.plural} "{name}" not found')
        return found

    def _shown(self, served: ServedKind, namespace: str, name: str, request: ApiRequest) -> Json:
        found = self._existing(served, namespace, name)
        if "PartialObjectMetadata" in request.headers.get("Accept", ""):
            return {"kind": "PartialObjectMetadata", "metadata": found["metadata"]}
        return found

    def _has(self, served: ServedKind, namespace: str, name: str) -> bool:
        return (served, namespace, name) in self._objects

    def _list(self, served: ServedKind, namespace: str, request: ApiRequest) -> FakeAnswer:
        wanted = self._wanted(request)
        version, objects = self._version, self._objects
        lag_s = self.cache_lag_s(served.plural)
        if request.query.get("resourceVersion") == "0" and lag_s > 0:
            version, objects = self._as_of(_now() - lag_s)
        items = [
            obj
            for (kind, where, _), obj in sorted(objects.items(), key=lambda one: one[0][1:])
            if kind is served and namespace in ("", where) and wanted(obj)
        ]
        kind = f"{served.kind}List"
        if "PartialObjectMetadata" in request.headers.get("Accept", ""):
            kind = "PartialObjectMetadataList"
            items = [{"metadata": obj["metadata"]} for obj in items]
        metadata: Json = {"resourceVersion": str(version)}
        shard = request.query.get("shardSelector", "")
        if shard and self.filters_shards and served in SERVED:
            metadata["shardInfo"] = {"selector": shard}
        listed = {"kind": kind, "metadata": metadata, "items": items}
        return FakeAnswer(200, _body(listed))

    def _as_of(self, at: float) -> tuple[int, dict[tuple[ServedKind, str, str], Json]]:
        """The objects as they were at a time, as far as changes since then are known."""
        version, objects = self._version, dict(self._objects)
        for change in reversed(self._changes):
            if change.at <= at:
                break
            metadata = change.after["metadata"]
            key = (change.served, metadata.get("namespace", ""), metadata["name"])
            version = change.version - 1
            if change.before is None:
                del objects[key]
            else:
                objects[key] = change.before
        return version, objects

    def _watch(self, served: ServedKind, namespace: str, request: ApiRequest) -> FakeAnswer:
        since = int(request.query.get("resourceVersion") or 0)
        if since < self._compacted:
            raise _Refusal(410, "Expired", f"too old resource version: {since}")
        wanted = self._wanted(request)
        lasting_s = float(request.query.get("timeoutSeconds", "300"))
        return FakeAnswer(200, self._events(served, namespace, since, wanted, lasting_s))

    def _wanted(self, request: ApiRequest) -> Callable[[Json], bool]:
        by_labels = _selector(request.query.get("labelSelector", ""))
        shard = request.query.get("shardSelector", "")
        if not shard or not self.filters_shards:
            return by_labels
        within = _shard_selector(shard)
        return lambda obj: by_labels(obj) and within(obj)

    async def _events(
        self,
        served: ServedKind,
        namespace: str,
        since: int,
        wanted: Callable[[Json], bool],
        lasting_s: float,
    ) -> AsyncGenerator[bytes, None]:
        self.open_watches += 1
        try:
            events = self._all_events(served, namespace, since, wanted, lasting_s)
            async with aclosing(events):
                async for event in events:
                    yield event
        finally:
            self.open_watches -= 1

    async def _all_events(
        self,
        served: ServedKind,
        namespace: str,
        since: int,
        wanted: Callable[[Json], bool],
        lasting_s: float,
    ) -> AsyncGenerator[bytes, None]:
        broken = self._watches_broken
        loop = asyncio.get_running_loop()
        ends = loop.time() + lasting_s
        while True:
            if broken != self._watches_broken:
                raise BrokenExchange("the watch broke", sent=True)
            if since < self._compacted:
                gone = {"kind": "Status", "code": 410, "message": "too old resource version"}
                yield _body({"type": "ERROR", "object": gone}) + b"\n"
                return
            for change in [one for one in self._changes if one.version > since]:
                since = change.version
                where = change.after["metadata"].get("namespace", "")
                if change.served is not served or namespace not in ("", where):
                    continue
                type = _seen_as(change, wanted)
                if type:
                    yield _body({"type": type, "object": change.after}) + b"\n"
            if self._changes and self._changes[-1].version > since:
                continue
            if loop.time() >= ends:
                return
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiting.append(waiter)
            try:
                async with asyncio.timeout(min(self.bookmark_s, ends - loop.time())):
                    await waiter
            except TimeoutError:
                version = {"metadata": {"resourceVersion": str(since)}}
                yield _body({"type": "BOOKMARK", "object": version}) + b"\n"
            await asyncio.sleep(self.random.uniform(*self.delay_s))

    # Writes.

    async def _do_create(self, served: ServedKind, namespace: str, obj: Json, client: str) -> Json:
        metadata: Json = obj.setdefault("metadata", {})
        if served.namespaced:
            namespace = namespace or metadata.get("namespace", "default")
            metadata["namespace"] = namespace
        obj = await self._admitted(served, "CREATE", None, obj)
        metadata = obj["metadata"]
        if not metadata.get("name"):
            prefix = metadata.get("generateName", "")
            metadata["name"] = f"{prefix}{self.random.randrange(16**6):06x}"
        name = metadata["name"]
        if (served, namespace, name) in self._objects:
            raise _Refusal(409, "AlreadyExists", f'{served.plural} "{name}" already exists')
        metadata["uid"] = _uid(self._version + 1)
        metadata["generation"] = 1
        return self._store(served, "ADDED", None, obj, client, "create")

    async def _do_change(
        self,
        served: ServedKind,
        namespace: str,
        name: str,
        change: Callable[[Json], Json],
        client: str,
        verb: str,
    ) -> Json:
        while True:
            before = self._existing(served, namespace, name)
            after = change(copy.deepcopy(before))
            metadata: Json = after.setdefault("metadata", {})
            named = metadata.get("resourceVersion", before["metadata"]["resourceVersion"])
            if named != before["metadata"]["resourceVersion"]:
                said = (
                    "the object has been modified; please apply your changes to the latest version"
                )
                raise _Refusal(409, "Conflict", said)
            for key in ("name", "namespace", "uid", "resourceVersion", "generation"):
                if key in before["metadata"]:
                    metadata[key] = before["metadata"][key]
            after = await self._admitted(served, "UPDATE", before, after)
            if self._objects.get((served, namespace, name)) is before:
                break  # else it has changed while the webhook was asked: begin anew
        if after == before:
            return before
        if after.get("spec") != before.get("spec"):
            after["metadata"]["generation"] = before["metadata"].get("generation", 0) + 1
        return self._store(served, "MODIFIED", before, after, client, verb)

    def _do_delete(
        self, served: ServedKind, namespace: str, name: str, options: Json, client: str
    ) -> Json:
        before = self._existing(served, namespace, name)
        preconditions: Json = options.get("preconditions") or {}
        wanted = preconditions.get("resourceVersion")
        if wanted and wanted != before["metadata"]["resourceVersion"]:
            raise _Refusal(409, "Conflict", "the resourceVersion of the precondition is another")
        return self._store(served, "DELETED", before, copy.deepcopy(before), client, "delete")

    def _store(
        self,
        served: ServedKind,
        type: str,
        before: Json | None,
        after: Json,
        client: str,
        verb: str,
    ) -> Json:
        self._version += 1
        after["metadata"]["resourceVersion"] = str(self._version)
        namespace, name = after["metadata"].get("namespace", ""), after["metadata"]["name"]
        if type == "DELETED":
            del self._objects[served, namespace, name]
        else:
            self._objects[served, namespace, name] = after
        at = _now()
        self._changes.append(_Change(self._version, served, type, before, after, at))
        left = None if type == "DELETED" else after
        self.log.append(ApiWrite(at, client, verb, served.plural, namespace, name, before, left))
        self._wake()
        return after

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            # Each process of a simulation has a loop of its own.
            waiter.get_loop().call_soon_threadsafe(_resolve, waiter)

    async def _patch(
        self,
        served: ServedKind,
        namespace: str,
        name: str,
        subresource: str,
        request: ApiRequest,
        client: str,
    ) -> Json:
        form = request.headers.get("Content-Type", "")
        body = json.loads(request.body)
        if "apply-patch" in form:
            return await self._apply(served, namespace, name, body, request, client)
        if "json-patch" in form:
            steps: list[Json] = body
            return await self._do_change(
                served, namespace, name, lambda obj: _json_patched(obj, steps), client, "patch"
            )

        def merged(obj: Json) -> Json:
            after: Json = _merged(obj, body)
            if subresource:  # only that part of the object
                return {**obj, subresource: after.get(subresource)}
            return after

        return await self._do_change(served, namespace, name, merged, client, "patch")

    async def _apply(
        self,
        served: ServedKind,
        namespace: str,
        name: str,
        body: Json,
        request: ApiRequest,
        client: str,
    ) -> Json:
        manager = request.query["fieldManager"]
        leaves = {
            path: value
            for path, value in _leaves(body)
            if not path.startswith(("metadata.name", "apiVersion", "kind"))
        }
        before = self._objects.get((served, namespace, name))
        owners = self._owners.setdefault(f"{served.plural}/{namespace}/{name}", {})
        if before is not None and request.query.get("force") != "true":
            have = dict(_leaves(before))
            for path, value in leaves.items():
                if owners.get(path, manager) != manager and have.get(path) != value:
                    raise _Refusal(409, "Conflict", f"{path} is owned by {owners[path]}")
        if before is None:
            stored = await self._do_create(served, namespace, body, client)
        else:
            stored = await self._do_change(
                served, namespace, name, lambda obj: _merged(obj, body), client, "patch"
            )
        owners.update(dict.fromkeys(leaves, manager))
        return stored

    async def _admitted(
        self, served: ServedKind, operation: str, before: Json | None, obj: Json
    ) -> Json:
        configurations = self._kinds[
            "admissionregistration.k8s.io", "mutatingwebhookconfigurations"
        ]
        if self.webhook is None or served is configurations:
            return obj
        for (kind, _, _), configuration in list(self._objects.items()):
            if kind is not configurations:
                continue
            for hook in configuration.get("webhooks", ()):
                if self._concerns(hook, served, operation, before, obj):
                    obj = await self._called(hook, served, operation, obj)
        return obj

    def _concerns(
        self, hook: Json, served: ServedKind, operation: str, before: Json | None, obj: Json
    ) -> bool:
        rules = any(
            operation in rule["operations"]
            and served.group in rule["apiGroups"]
            and served.plural in rule["resources"]
            for rule in hook["rules"]
        )
        objects: Json = hook.get("objectSelector") or {}
        one_fits = _matches(objects, obj) or (before is not None and _matches(objects, before))
        namespaces = self._kinds["", "namespaces"]
        namespace = self._objects.get((namespaces, "", obj["metadata"].get("namespace", "")))
        selector: Json = hook.get("namespaceSelector") or {}
        home = not served.namespaced or _matches(selector, _named(namespace))
        return rules and one_fits and home

    async def _called(self, hook: Json, served: ServedKind, operation: str, obj: Json) -> Json:
        self.webhook_calls += 1
        metadata = obj["metadata"]
        request = {
            "uid": "request",
            "kind": {"group": served.group, "version": served.version, "kind": served.kind},
            "resource": {
                "group": served.group,
                "version": served.version,
                "resource": served.plural,
            },
            "name": metadata.get("name", ""),
            "namespace": metadata.get("namespace", ""),
            "operation": operation,
            "object": obj,
        }
        config: Json = hook["clientConfig"]
        service: Json = config.get("service") or {}
        path = str(service.get("path") or _path_of(config.get("url", "")))
        assert self.webhook is not None
        try:
            said = self.webhook(path, _body({"request": request}))
            answer = json.loads(said if isinstance(said, bytes) else await said)["response"]
        except Exception as error:
            if hook.get("failurePolicy") == "Ignore":
                return obj
            raise _Refusal(500, "InternalError", f"failed calling webhook: {error}") from error
        if not answer["allowed"]:
            raise _Refusal(403, "Forbidden", "admission webhook denied the request")
        if not answer.get("patch"):
            return obj
        return _json_patched(copy.deepcopy(obj), json.loads(base64.b64decode(answer["patch"])))


class FakeExchange:
    """Implements `domicile.kubeapi.exchange.ApiExchange` for one client."""

    def __init__(self, server: FakeApiServer, client: str) -> None:
        self._server = server
        self.client = client
        self.server = "the server in memory"
        self.cut = False
        """Whether nothing gets through any more."""
        self.connect_s = 0.0
        """How long each request waits for a connection."""

    @asynccontextmanager
    async def open(self, request: ApiRequest) -> AsyncGenerator[ApiAnswer, None]:
        """As `ApiExchange.open`."""
        if self.cut:
            await asyncio.sleep(0.05)
            raise BrokenExchange("cut off", sent=False)
        if self.connect_s:
            await asyncio.sleep(self.connect_s)
        if request.before_sending is not None:
            request.before_sending()
        answer = await self._server.handle(self.client, request)
        answer.cut = lambda: self.cut
        try:
            yield answer
        finally:
            await answer.end()

    async def close(self) -> None:
        """Nothing to do."""


class FakeAnswer:
    """Implements `domicile.kubeapi.exchange.ApiAnswer`."""

    def __init__(self, status: int, body: bytes | AsyncGenerator[bytes, None]) -> None:
        self.status = status
        self.headers: Mapping[str, str] = {}
        self.cut: Callable[[], bool] = lambda: False
        """Whether its connection is cut off."""
        self._body = body

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """As `ApiAnswer.chunks`."""
        if isinstance(self._body, bytes):
            for start in range(0, len(self._body), PIECE_BYTES):
                yield self._body[start : start + PIECE_BYTES]
            return
        async for piece in self._body:
            if self.cut():
                raise BrokenExchange("cut off", sent=True)
            yield piece

    async def end(self) -> None:
        """The reader goes away."""
        if not isinstance(self._body, bytes):
            await self._body.aclose()


def _body(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _now() -> float:
    running = asyncio._get_running_loop()
    return 0.0 if running is None else running.time()


def _at_once(work: Coroutine[Any, Any, _T]) -> _T:
    """The result of work that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as ended:
        return cast(_T, ended.value)
    work.close()
    raise RuntimeError("the webhook is asynchronous: make the object by a KubeClient, not by put()")


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _seen_as(change: _Change, wanted: Callable[[Json], bool]) -> str:
    """The type of the event that a watch with a selector sees; empty for none."""
    was = change.before is not None and wanted(change.before)
    is_now = change.type != "DELETED" and wanted(change.after)
    if is_now:
        return "MODIFIED" if was else "ADDED"
    return "DELETED" if was else ""


def _shard_selector(text: str) -> Callable[[Json], bool]:
    found = re.findall(r"shardRange\(object\.metadata\.uid, '0x(\w+)', '0x(\w+)'\)", text)
    if not found:
        raise _Refusal(400, "BadRequest", f"invalid shard selector: {text}")
    parts = [(int(begin, 16), int(end, 16)) for begin, end in found]

    def within(obj: Json) -> bool:
        value = fnv1a(str(obj["metadata"].get("uid", "")))
        return any(begin <= value < end for begin, end in parts)

    return within


def _labels(obj: Json) -> dict[str, str]:
    return obj.get("metadata", {}).get("labels") or {}


def _selector(text: str) -> Callable[[Json], bool]:
    parts = [part for part in text.split(",") if part]

    def wanted(obj: Json) -> bool:
        labels = _labels(obj)
        for part in parts:
            if "!=" in part:
                key, _, value = part.partition("!=")
                fits = labels.get(key) != value
            elif "=" in part:
                key, _, value = part.replace("==", "=").partition("=")
                fits = labels.get(key) == value
            elif part.startswith("!"):
                fits = part[1:] not in labels
            else:
                fits = part in labels
            if not fits:
                return False
        return True

    return wanted


def _named(namespace: Json | None) -> Json:
    """A namespace with the label that the API server gives to each."""
    if namespace is None:
        return {}
    name = namespace["metadata"]["name"]
    labels = {"kubernetes.io/metadata.name": name, **_labels(namespace)}
    return {"metadata": {**namespace["metadata"], "labels": labels}}


def _matches(selector: Json, obj: Json) -> bool:
    labels = _labels(obj)
    wanted: dict[str, str] = selector.get("matchLabels") or {}
    for key, value in wanted.items():
        if labels.get(key) != value:
            return False
    for one in selector.get("matchExpressions") or ():
        have = labels.get(one["key"])
        fits = {
            "In": have in (one.get("values") or ()),
            "NotIn": have not in (one.get("values") or ()),
            "Exists": have is not None,
            "DoesNotExist": have is None,
        }[one["operator"]]
        if not fits:
            return False
    return True


def _merged(target: Any, patch: Any) -> Any:
    change = _as_object(patch)
    if change is None:
        return patch
    after: Json = dict(_as_object(target) or {})
    for key, value in change.items():
        if value is None:
            after.pop(key, None)
        else:
            after[key] = _merged(after.get(key), value)
    return after


def _as_object(value: Any) -> Json | None:
    return cast(Json, value) if isinstance(value, dict) else None


def _json_patched(obj: Json, steps: list[Json]) -> Json:
    for step in steps:
        *parents, last = [
            part.replace("~1", "/").replace("~0", "~") for part in step["path"][1:].split("/")
        ]
        place: Any = obj
        for part in parents:
            is_object = _as_object(place) is not None
            place = place[part] if is_object else place[int(part)]
        if step["op"] == "remove":
            if last not in place:
                raise _Refusal(422, "Invalid", f"nothing at {step['path']}")
            del place[last]
        elif step["op"] == "test":
            if place.get(last) != step["value"]:
                raise _Refusal(422, "Invalid", f"test failed at {step['path']}")
        else:
            place[last] = step["value"]
    return obj


def _leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    inside = _as_object(value)
    if inside is None:
        return [(path, value)]
    return [
        leaf
        for key, inner in inside.items()
        for leaf in _leaves(inner, f"{path}.{key}" if path else key)
    ]


def _path_of(url: str) -> str:
    return "/" + url.partition("://")[2].partition("/")[2]


def _uid(version: int) -> str:
    """As random as a server's, so that objects lie all over the space of hashes."""
    return str(UUID(bytes=blake2b(str(version).encode(), digest_size=16).digest()))
