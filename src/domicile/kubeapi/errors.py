"""What can go wrong between this process and an API server. Each error says whether it ran (I9).

::

    KubeError
    ├── KubeRefused          the server refused: nothing was changed
    │   ├── KubeConflict     409: the object has changed since it was read, or exists already
    │   ├── KubeNotFound     404
    │   ├── KubeForbidden    403: the message has the RBAC rule that is missing
    │   └── KubeGone         410: the resource version is too old; list again
    ├── KubeUnavailable      not reached in time, or too busy: nothing was changed
    └── KubeUnanswered       sent, and no answer came: it may have been changed
"""

from __future__ import annotations

from domicile.errors import DomicileError


class KubeError(DomicileError):
    """The API server did not do what was asked."""


class KubeRefused(KubeError):
    """The API server refused. Nothing was changed."""

    def __init__(self, message: str, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class KubeConflict(KubeRefused):
    """The object has changed since it was read, or exists already. Read it again, then decide."""


class KubeNotFound(KubeRefused):
    """There is no such object, or no such kind."""


class KubeForbidden(KubeRefused):
    """This account may not do that. The message has the RBAC rule that allows it."""


class KubeGone(KubeRefused):
    """The server no longer knows that resource version: list again and watch from there."""


class KubeUnavailable(KubeError):
    """The API server was not reached before the deadline, or is too busy. Nothing was changed."""


class KubeUnanswered(KubeError):
    """The request was sent and no answer came in time. What it asked for may have happened."""


def refusal_of(
    status: int, reason: str, message: str, verb: str, shown: str, where: str, account: str = ""
) -> KubeRefused:
    """The error for a status of the server."""
    said = f"{verb} {shown} {where}".strip() + f" was refused ({status} {reason}): {message}"
    if status == 403:
        plural, _, group = shown.partition(".")
        said += (
            f"; grant {account or 'the account'} the RBAC rule "
            f'{{apiGroups: ["{group}"], resources: ["{plural}"], verbs: ["{verb}"]}}'
        )
        return KubeForbidden(said, status, reason)
    kind: type[KubeRefused] = {404: KubeNotFound, 409: KubeConflict, 410: KubeGone}.get(
        status, KubeRefused
    )
    return kind(said, status, reason)
