"""What an error of gRPC or etcd means: did the request run (I9), and what should be done now?

Pure: texts and codes in, a decision or a text out.
"""

from __future__ import annotations

from enum import Enum

import grpc

_CODE = grpc.StatusCode


class Fate(Enum):
    """What became of a request that etcd did not answer as wished."""

    REFUSED = "it did not run, and would be refused again"
    ELSEWHERE = "it did not run here; another server may take it"
    TOKEN = "it did not run: the login is missing or too old"
    UNSURE = "it may have run"


_REFUSALS = (
    _CODE.INVALID_ARGUMENT,
    _CODE.FAILED_PRECONDITION,
    _CODE.PERMISSION_DENIED,
    _CODE.NOT_FOUND,
    _CODE.ALREADY_EXISTS,
    _CODE.RESOURCE_EXHAUSTED,
    _CODE.OUT_OF_RANGE,
    _CODE.UNIMPLEMENTED,
)
"""etcd checks these before a request enters its log, or as it applies it, before the first write;
only that its database is full may also be the answer to a write that was done (`is_full`). The
answers of Domicile's requests have no limit in size, so the client itself raises none."""

_NOT_HERE = (
    "etcdserver: no leader",
    "etcdserver: not capable",
    "etcdserver: rpc not supported for learner",
    "failed to connect to all addresses",
)

_TOKEN = (
    "etcdserver: invalid auth token",
    "etcdserver: revision of auth store is old",
    "etcdserver: user name is empty",
)


_STRANGERS = ("http2 header with status", "Failed parsing HTTP/2", "http1.x server")
"""What gRPC says of an answer by a program that is no gRPC server."""


def fate(code: grpc.StatusCode, details: str) -> Fate:
    """What became of a request, by the code and text of its error."""
    if code is _CODE.UNAUTHENTICATED or any(text in details for text in _TOKEN):
        return Fate.TOKEN
    if any(text in details for text in _NOT_HERE):
        return Fate.ELSEWHERE
    return Fate.REFUSED if code in _REFUSALS else Fate.UNSURE


def is_full(details: str) -> bool:
    """Whether etcd has no more space. The request may have been done: it may be what filled it."""
    return "database space exceeded" in details


def is_settings_error(code: grpc.StatusCode, details: str) -> bool:
    """Whether trying again is of no use before somebody changes a setting."""
    return (
        code in (_CODE.PERMISSION_DENIED, _CODE.UNAUTHENTICATED)
        or "authentication failed" in details
        or "user name is empty" in details
        or "CERTIFICATE_VERIFY_FAILED" in details
        or "Hostname Verification Check failed" in details
        or "WRONG_VERSION_NUMBER" in details
    )


def explanation(code: grpc.StatusCode, details: str, *, tls: bool, user: str) -> str:
    """What happened and the next step, in one clause."""
    said = details or code.name
    if "authentication failed" in details:
        return f"refuses user {user!r} or its password; look at both, as `etcdctl user get {user}`"
    if "user name is empty" in details:
        return "asks for a user: write user:password@ in its URL, or user@ and password_file="
    if code is _CODE.PERMISSION_DENIED:
        return (
            f"does not let user {user!r} work on these keys; grant readwrite on the root's prefix, "
            "as in `etcdctl role grant-permission ROLE --prefix=true readwrite domicile/`"
        )
    if code is _CODE.UNAUTHENTICATED or "invalid auth token" in details:
        return f"does not accept the login of user {user!r} ({said}); it is asked for a new one"
    if is_full(details):
        return (
            "is full (alarm NOSPACE) and takes no writes: compact and defragment it, or raise "
            "--quota-backend-bytes, then run `etcdctl alarm disarm`"
        )
    if "too many requests" in details:
        return "has too many requests to do; look at its load and its disk"
    if "no leader" in details or "leader changed" in details:
        return (
            f"has no leader ({said}): most of its members must run and reach each other; see "
            "`etcdctl endpoint status --cluster`"
        )
    if "certificate required" in details.lower() or "bad certificate" in details.lower():
        return f"wants a certificate of this process ({said}): name cert= and key= in its URL"
    if "CERTIFICATE_VERIFY_FAILED" in details or "Hostname Verification" in details:
        return (
            f"has a certificate that is not accepted ({said}); look at ca= and server_name= in "
            "its URL"
        )
    if "WRONG_VERSION_NUMBER" in details or "Handshake read failed" in details:
        return f"does not speak TLS as its URL says ({said}); look at ca=, cert=, key= and tls="
    if code is _CODE.DEADLINE_EXCEEDED:
        return "did not answer in time; look at its load, its disk and the network"
    if any(text in details for text in _STRANGERS):
        return (
            f"is no etcd server, as its answer shows ({said}); look at host and port in the URL: "
            "etcd takes clients at port 2379 unless it was told otherwise"
        )
    if code is _CODE.UNAVAILABLE:
        other = "" if tls else "; if it speaks TLS, name its authority as ?ca= in the URL"
        return (
            f"can't be reached ({said}); see that etcd runs there and that this machine may "
            f"connect to it{other}"
        )
    return f"failed ({said}); look at etcd's log"
