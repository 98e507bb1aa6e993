"""Proofs that both ends of a connection know the cluster's token, which itself never travels.

Pure functions, called by links with each hello and welcome, and by the code that wires a process. A
token is one secret, or several with commas between them; all of them count, so that a cluster can
change its token process by process. Nothing here may log a token or compare proofs by `==`.
"""

from __future__ import annotations

import hmac

import msgspec

from domicile.core.wire import Hello, Welcome
from domicile.errors import ConfigError

MOST_SECRETS = 4
"""I6: how many secrets a token may consist of, and a hello prove."""

SHORT = 16
"""An attacker who overhears a hello can guess a secret with fewer characters than this."""

PROOF_BYTES = 32
_HELLO = "domicile hello 1"
_WELCOME = "domicile welcome 1"
_FINGERPRINT = "domicile fingerprint 1"
_FINGERPRINT_CHARS = 16


def secrets_of(token: str) -> tuple[str, ...]:
    """The secrets of a token, the newest first; none if it is empty. Raises `ConfigError`."""
    if not token:
        return ()
    secrets = tuple(part.strip() for part in token.split(","))
    if not all(secrets) or len(secrets) > MOST_SECRETS:
        raise ConfigError(
            f"a token is one secret, or up to {MOST_SECRETS} with commas between them as in "
            "'new,old'; none of them may be empty"
        )
    return secrets


def prove_hello(token: str, hello: Hello) -> bytes:
    """The proof for a hello: one part for each secret; empty without a token.

    A proof holds for these fields only. The receiver is an incarnation, which never comes again
    (A5). It takes each session of a sender once, and none older than one it took. So an overheard
    hello is late wherever it is repeated.
    """
    said = _said(_HELLO, hello)
    return b"".join(_mac(secret, said) for secret in secrets_of(token))


def check_hello(token: str, hello: Hello) -> str:
    """The secret that a hello proves; empty if it is none of this token's."""
    said = _said(_HELLO, hello)
    proof = hello.proof[: MOST_SECRETS * PROOF_BYTES]
    claims = [proof[at : at + PROOF_BYTES] for at in range(0, len(proof), PROOF_BYTES)]
    known = ""
    for secret in reversed(secrets_of(token)):
        own = _mac(secret, said)
        for claim in claims:
            if hmac.compare_digest(own, claim):
                known = secret
    return known


def prove_welcome(token: str, hello: Hello, welcome: Welcome) -> bytes:
    """The proof for the answer to a hello: of the secret that the hello has proved."""
    secret = check_hello(token, hello)
    return _mac(secret, _said(_WELCOME, hello, welcome)) if secret else b""


def check_welcome(token: str, hello: Hello, welcome: Welcome) -> bool:
    """Whether the answer to this very hello can be trusted; without a token every answer is."""
    secrets = secrets_of(token)
    said = _said(_WELCOME, hello, welcome)
    good = not secrets
    for secret in secrets:
        good |= hmac.compare_digest(_mac(secret, said), welcome.proof)
    return good


def fingerprints(token: str, cluster: str) -> tuple[str, ...]:
    """What the store may hold of a token: enough to see whether two processes have the same."""
    return tuple(
        _mac(secret, msgspec.msgpack.encode((_FINGERPRINT, cluster))).hex()[:_FINGERPRINT_CHARS]
        for secret in secrets_of(token)
    )


def _said(label: str, hello: Hello, welcome: Welcome | None = None) -> bytes:
    """Exactly these fields, whatever later protocols add: both ends must compute the same bytes."""
    fields: list[object] = [
        label, hello.cluster, hello.sender, hello.receiver, hello.address, hello.link,
        hello.session, hello.resume, hello.received, hello.protocol, hello.newest,
    ]  # fmt: skip
    if welcome is not None:
        fields += [welcome.received, welcome.protocol]
    return msgspec.msgpack.encode(fields)


def _mac(secret: str, said: bytes) -> bytes:
    return hmac.digest(secret.encode(errors="surrogateescape"), said, "sha256")
