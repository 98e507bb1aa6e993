"""A client of one API server: typed objects in and out, retries with a deadline, errors that say
whether the request ran (I9).

A read is repeated until its deadline. A write is repeated only while the server is known not to
have taken it: not reached, or refused as too busy (429, 503). Otherwise `KubeUnanswered` is raised,
and the caller reads before it decides. Every write that depends on what was read names the
resourceVersion that it read; the server answers with a conflict if it is older than the object.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Generic, TypeVar

import msgspec

from domicile.kubeapi.errors import KubeError, KubeGone, KubeUnanswered, KubeUnavailable, refusal_of
from domicile.kubeapi.exchange import ApiAnswer, ApiExchange, ApiRequest, BrokenExchange
from domicile.kubeapi.kinds import ApiKind
from domicile.kubeapi.listing import ListDecoder, MalformedList
from domicile.kubeapi.objects import PartialObject, Status

log = logging.getLogger("domicile.kube")

K = TypeVar("K", bound=PartialObject)

JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"

MAX_BODY_BYTES = 64 << 20
"""I6: an answer that is read as a whole."""

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 3.0

VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass(frozen=True, slots=True)
class ListPage(Generic[K]):
    """A list of objects, as of one resource version."""

    items: tuple[K, ...]
    resource_version: str
    filtered: bool = False
    """Whether the server says that it filtered by a shard selector. Version 1.36 does not say so of
    custom resources."""


@dataclass(frozen=True, slots=True)
class WatchNotice(Generic[K]):
    """One change: ADDED, MODIFIED, DELETED, or BOOKMARK, which only has a resource version."""

    type: str
    object: K


class _ListOf(msgspec.Struct, Generic[K], rename="camel"):
    items: list[K] | None = None
    metadata: dict[str, Any] = {}


class _Version(msgspec.Struct):
    major: str = ""
    minor: str = ""  # some providers write "36+"


class _Notice(msgspec.Struct):
    type: str
    object: msgspec.Raw


class KubeClient:
    """Calls one API server through an exchange. `close` it, or use it as a context manager."""

    def __init__(
        self,
        exchange: ApiExchange,
        *,
        timeout_s: float = 10.0,
        account: str = "",
        random: Random | None = None,
    ) -> None:
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._random = Random() if random is None else random
        self.account = account
        """Who we are, for the hint of a missing RBAC rule."""

    async def __aenter__(self) -> KubeClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._exchange.close()

    def through(self, wrap: Callable[[ApiExchange], ApiExchange]) -> KubeClient:
        """The same client, whose requests go through another exchange."""
        return KubeClient(
            wrap(self._exchange),
            timeout_s=self._timeout_s,
            account=self.account,
            random=self._random,
        )

    @property
    def server(self) -> str:
        """The server's address, for messages."""
        return self._exchange.server

    # Reading.

    async def get(self, kind: ApiKind[K], name: str, namespace: str = "") -> K:
        """One object, as it is now."""
        path = kind.path(namespace, name)
        body = await self._call(ApiRequest("GET", path), "get", kind.shown, f"{namespace}/{name}")
        return self._decoded(kind, body)

    async def get_metadata(
        self, kind: ApiKind[Any], name: str, namespace: str = ""
    ) -> PartialObject:
        """The metadata of one object, as it is now."""
        request = ApiRequest("GET", kind.path(namespace, name), {}, {"Accept": METADATA})
        body = await self._call(request, "get", kind.shown, f"{namespace}/{name}")
        return _decode(self.server, kind.kind, body, PartialObject)

    async def list(
        self, kind: ApiKind[K], namespace: str = "", *, labels: str = "", shard: str = ""
    ) -> ListPage[K]:
        """All objects of a kind, as they are now. For short lists; see `stream_metadata`.

        A server that does not know `shardSelector` ignores `shard` without a word.
        """
        query = {"labelSelector": labels} if labels else {}
        if shard:
            query["shardSelector"] = shard
        request = ApiRequest("GET", kind.path(namespace), query)
        body = await self._call(request, "list", kind.shown, namespace)
        found = msgspec.json.decode(body, type=_ListOf[kind.type])  # type: ignore[name-defined]
        version = str(found.metadata.get("resourceVersion", ""))
        filtered = bool(found.metadata.get("shardInfo"))
        return ListPage(tuple(found.items or ()), version, filtered)

    async def stream_metadata(
        self, kind: ApiKind[Any], namespace: str = "", *, labels: str = "", timeout_s: float = 300.0
    ) -> AsyncGenerator[PartialObject, None]:
        """The metadata of all objects, from the server's cache, one after the other (K5).

        Not repeated: objects have been given out already. A list that breaks off raises.
        """
        query = {"resourceVersion": "0", **({"labelSelector": labels} if labels else {})}
        request = ApiRequest("GET", kind.path(namespace), query, {"Accept": METADATA_LIST})
        decoder = ListDecoder()
        try:
            body = self._pieces(request, "list", kind.shown, namespace, timeout_s)
            async with aclosing(body) as pieces:
                async for piece in pieces:
                    for item in decoder.feed(piece):
                        yield msgspec.convert(item, PartialObject)
            decoder.close()
        except (BrokenExchange, TimeoutError, MalformedList) as error:
            raise KubeUnavailable(
                f"list {kind.shown} at {self.server} broke off: {error or 'out of time'}"
            ) from error

    async def watch(
        self,
        kind: ApiKind[K],
        namespace: str = "",
        *,
        resource_version: str,
        labels: str = "",
        shard: str = "",
        seconds: int = 240,
        metadata_only: bool = False,
    ) -> AsyncGenerator[WatchNotice[K], None]:
        """Changes since a resource version, until the server ends the watch after `seconds`.

        Raises `KubeGone` if the server no longer knows that version, and `KubeUnavailable` if the
        connection breaks. `follow.follow` goes on in both cases.
        """
        query = {
            "watch": "1", "resourceVersion": resource_version, "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds), **({"labelSelector": labels} if labels else {}),
            **({"shardSelector": shard} if shard else {}),
        }  # fmt: skip
        headers = {"Accept": METADATA if metadata_only else JSON}
        request = ApiRequest("GET", kind.path(namespace), query, headers)
        rest = b""
        try:
            # A peer that died silently never ends the watch: we do.
            body = self._pieces(request, "watch", kind.shown, namespace, seconds + 15.0)
            async with aclosing(body) as pieces:
                async for piece in pieces:
                    *lines, rest = (rest + piece).split(b"\n")
                    if len(rest) > MAX_BODY_BYTES:
                        raise BrokenExchange("an event of a watch is too long", sent=True)
                    for line in lines:
                        if line.strip():
                            yield self._notice(kind, line)
        except (BrokenExchange, TimeoutError) as error:
            raise KubeUnavailable(
                f"watch {kind.shown} at {self.server} broke off: {error or 'out of time'}"
            ) from error

    async def version(self) -> tuple[int, int]:
        """The version of the server, as (1, 36)."""
        body = await self._call(ApiRequest("GET", "/version"), "get", "/version", "")
        try:
            told = msgspec.json.decode(body, type=_Version)
        except msgspec.DecodeError as error:
            raise KubeError(f"{self.server} answered no version: {error}") from error
        major, minor = ("".join(filter(str.isdigit, part)) for part in (told.major, told.minor))
        return int(major or 0), int(minor or 0)

    async def discover(self, group: str, plural: str) -> ApiKind[PartialObject]:
        """How the server serves a resource: its preferred version, its kind, its scope."""
        shown = f"{plural}.{group}" if group else plural
        version = "v1"
        if group:
            body = await self._call(ApiRequest("GET", f"/apis/{group}"), "get", shown, "")
            version = str(_mapping(body).get("preferredVersion", {}).get("version", "v1"))
        root = f"/apis/{group}/{version}" if group else f"/api/{version}"
        body = await self._call(ApiRequest("GET", root), "get", shown, "")
        for one in _mapping(body).get("resources", ()):
            if one.get("name") == plural:
                return ApiKind(
                    group, version, plural, one["kind"], bool(one["namespaced"]), PartialObject
                )
        raise refusal_of(404, "NotFound", "the server has no such resource", "get", shown, "")

    # Writing.

    async def create(self, kind: ApiKind[K], obj: Mapping[str, Any] | K, namespace: str = "") -> K:
        """Make an object. Raises `KubeConflict` if there is one of that name."""
        body = _encoded(kind, obj)
        request = ApiRequest("POST", kind.path(namespace), {}, {"Content-Type": JSON}, body)
        return self._decoded(kind, await self._call(request, "create", kind.shown, namespace))

    async def replace(
        self, kind: ApiKind[K], name: str, obj: Mapping[str, Any] | K, namespace: str = ""
    ) -> K:
        """Put an object in the place of another. It has to name the resourceVersion that was read,
        and fields that it does not name are lost: use it for objects that nobody else writes."""
        request = ApiRequest(
            "PUT", kind.path(namespace, name), {}, {"Content-Type": JSON}, _encoded(kind, obj)
        )
        where = f"{namespace}/{name}"
        return self._decoded(kind, await self._call(request, "update", kind.shown, where))

    async def patch(
        self,
        kind: ApiKind[K],
        name: str,
        namespace: str = "",
        *,
        merge: Mapping[str, Any] | None = None,
        operations: Sequence[Mapping[str, Any]] | None = None,
        resource_version: str = "",
        subresource: str = "",
    ) -> K:
        """Change an object by a merge patch, or by the operations of a JSON patch.

        With `resource_version` it happens only if the object has not changed since.
        """
        headers = {"Content-Type": MERGE_PATCH if operations is None else JSON_PATCH}
        if operations is not None:
            steps = list(operations)
            if resource_version:
                at = "/metadata/resourceVersion"
                steps.append({"op": "replace", "path": at, "value": resource_version})
            body = msgspec.json.encode(steps)
        else:
            change = dict(merge or {})
            if resource_version:
                named = {**change.get("metadata", {}), "resourceVersion": resource_version}
                change["metadata"] = named
            body = msgspec.json.encode(change)
        path = kind.path(namespace, name, subresource)
        request = ApiRequest("PATCH", path, {}, headers, body)
        where = f"{namespace}/{name}"
        return self._decoded(kind, await self._call(request, "patch", kind.shown, where))

    async def apply(
        self,
        kind: ApiKind[K],
        obj: Mapping[str, Any],
        *,
        manager: str,
        force: bool = False,
        subresource: str = "",
    ) -> K:
        """Server-side apply: make the named fields so, as the owner of them. It may be repeated.

        Raises `KubeConflict` if another manager owns one of them, unless `force`.
        """
        metadata = obj["metadata"]
        name, namespace = metadata["name"], metadata.get("namespace", "")
        query = {"fieldManager": manager, **({"force": "true"} if force else {})}
        body = msgspec.json.encode({"apiVersion": kind.api_version, "kind": kind.kind, **obj})
        path = kind.path(namespace, name, subresource)
        request = ApiRequest("PATCH", path, query, {"Content-Type": APPLY_PATCH}, body)
        where = f"{namespace}/{name}"
        return self._decoded(kind, await self._call(request, "patch", kind.shown, where))

    async def delete(
        self, kind: ApiKind[Any], name: str, namespace: str = "", *, resource_version: str = ""
    ) -> None:
        """Delete an object, with `resource_version` only if it has not changed since."""
        wanted = {"preconditions": {"resourceVersion": resource_version}}
        body = msgspec.json.encode(wanted) if resource_version else b"{}"
        path = kind.path(namespace, name)
        request = ApiRequest("DELETE", path, {}, {"Content-Type": JSON}, body)
        await self._call(request, "delete", kind.shown, f"{namespace}/{name}")

    # One call.

    async def _call(self, request: ApiRequest, verb: str, shown: str, where: str) -> bytes:
        wait_s = FIRST_WAIT_S
        why = "no answer in time"
        sending = False

        def begins() -> None:
            nonlocal sending
            if request.before_sending is not None:
                request.before_sending()
            sending = request.writes

        told = replace(request, before_sending=begins)
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    hint_s = 0.0
                    try:
                        async with self._exchange.open(told) as answer:
                            body = await _whole(answer)
                        if answer.status < 300:
                            return body
                        why = f"status {answer.status}"
                        hint_s = _retry_after(answer.headers)
                        busy = answer.status == 429 or (answer.status == 503 and hint_s > 0)
                        if not busy and answer.status < 500:
                            raise _refusal(answer, body, verb, shown, where, self.account)
                        sent = not busy
                    except BrokenExchange as error:
                        why, sent = str(error), error.sent
                    if sent and request.writes:
                        raise KubeUnanswered(self._said(verb, shown, where, why, True))
                    sending = False
                    await asyncio.sleep(max(hint_s, wait_s * self._random.uniform(0.5, 1.0)))
                    wait_s = min(wait_s * 2, LONGEST_WAIT_S)
        except TimeoutError as error:
            kind = KubeUnanswered if sending else KubeUnavailable
            raise kind(self._said(verb, shown, where, why, sending)) from error

    def _said(self, verb: str, shown: str, where: str, why: str, sent: bool) -> str:
        outcome = "it may have happened; read before trying again" if sent else "nothing changed"
        return f"{verb} {shown} {where} at {self.server}: {why}; {outcome}"

    async def _pieces(
        self, request: ApiRequest, verb: str, shown: str, where: str, lasting_s: float
    ) -> AsyncGenerator[bytes, None]:
        """The body of an answer as it arrives, until `lasting_s` from now.

        The time limit covers single steps, never a `yield`: it must not cancel the reader.
        """
        until = asyncio.get_running_loop().time() + lasting_s
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(min(self._timeout_s, lasting_s)):
                answer = await stack.enter_async_context(self._exchange.open(request))
                if answer.status == 429 or answer.status >= 500:
                    said = self._said(verb, shown, where, f"status {answer.status}", False)
                    raise KubeUnavailable(said)
                if answer.status >= 300:
                    body = await _whole(answer)
                    raise _refusal(answer, body, verb, shown, where, self.account)
            pieces = answer.chunks()
            while True:
                try:
                    async with asyncio.timeout_at(until):
                        piece = await anext(pieces)
                except StopAsyncIteration:
                    return
                yield piece

    def _notice(self, kind: ApiKind[K], line: bytes) -> WatchNotice[K]:
        try:
            notice = msgspec.json.decode(line, type=_Notice)
            if notice.type == "ERROR":
                status = msgspec.json.decode(notice.object, type=Status)
                said = f"watch {kind.shown}: {status.message}"
                raise KubeGone(said, 410) if status.code == 410 else KubeUnavailable(said)
            return WatchNotice(notice.type, msgspec.json.decode(notice.object, type=kind.type))
        except msgspec.DecodeError as error:
            raise BrokenExchange(f"an event that is no JSON: {error}", sent=True) from error

    def _decoded(self, kind: ApiKind[K], body: bytes) -> K:
        return _decode(self.server, kind.kind, body, kind.type)


def _decode(server: str, kind: str, body: bytes, type: type[K]) -> K:
    try:
        return msgspec.json.decode(body, type=type)
    except msgspec.DecodeError as error:
        raise KubeError(f"{server} answered no {kind}: {error}") from error


def _encoded(kind: ApiKind[Any], obj: Mapping[str, Any] | PartialObject) -> bytes:
    fields = dict(msgspec.to_builtins(obj))
    return msgspec.json.encode({**fields, "apiVersion": kind.api_version, "kind": kind.kind})


def _mapping(body: bytes) -> dict[str, Any]:
    return msgspec.json.decode(body, type=dict[str, Any])


async def _whole(answer: ApiAnswer) -> bytes:
    pieces: list[bytes] = []
    size = 0
    async for piece in answer.chunks():
        pieces.append(piece)
        size += len(piece)
        if size > MAX_BODY_BYTES:
            raise BrokenExchange(f"an answer of over {MAX_BODY_BYTES} bytes", sent=True)
    return b"".join(pieces)


def _retry_after(headers: Mapping[str, str]) -> float:
    text = headers.get("retry-after", "")
    return float(text) if text.isdecimal() else 0.0


def _refusal(
    answer: ApiAnswer, body: bytes, verb: str, shown: str, where: str, account: str
) -> KubeError:
    try:
        status = msgspec.json.decode(body, type=Status)
    except msgspec.DecodeError:
        status = Status(message=body[:200].decode("utf-8", "replace"))
    return refusal_of(answer.status, status.reason, status.message, verb, shown, where, account)
