"""Proofs that both ends of a connection know the cluster's token, which itself never travels.

Pure functions, called by links with each hello and welcome, and by the code that wires a process. A
token is one secret, or several with commas between them; all of them count, so that a cluster can
change its token process by process. Nothing here may log a token or compare proofs by `==`.
"""

from __future__ import annotations

import hmac

import msgspec

from domicile.core.wire import Figures, Hello, Look, Welcome
from domicile.errors import ConfigError

MOST_SECRETS = 4
"""I6: how many secrets a token may consist of, and a hello prove."""

SHORT = 16
"""An attacker who overhears a hello can guess a secret with fewer characters than this."""

PROOF_BYTES = 32
_HELLO = "domicile hello 1"
_WELCOME = "domicile welcome 1"
_LOOK = "domicile look 1"
_FIGURES = "domicile figures 1"
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
    return _prove(token, _said(_HELLO, hello))


def check_hello(token: str, hello: Hello) -> str:
    """The secret that a hello proves; empty if it is none of this token's."""
    return _check(token, _said(_HELLO, hello), hello.proof)


def prove_welcome(token: str, hello: Hello, welcome: Welcome) -> bytes:
    """The proof for the answer to a hello: of the secret that the hello has proved."""
    secret = check_hello(token, hello)
    return _mac(secret, _said(_WELCOME, hello, welcome)) if secret else b""


def check_welcome(token: str, hello: Hello, welcome: Welcome) -> bool:
    """Whether the answer to this very hello can be trusted; without a token every answer is."""
    return not token or bool(_check(token, _said(_WELCOME, hello, welcome), welcome.proof))


def prove_look(token: str, look: Look) -> bytes:
    """The proof for a look: one part for each secret; empty without a token.

    A process that overhears a look can repeat it, and learns how busy that incarnation is.
    """
    return _prove(token, _looked(_LOOK, look))


def check_look(token: str, look: Look) -> str:
    """The secret that a look proves; empty if it is none of this token's."""
    return _check(token, _looked(_LOOK, look), look.proof)


def prove_figures(token: str, look: Look, figures: Figures) -> bytes:
    """The proof for the answer to a look: of the secret that the look has proved."""
    secret = check_look(token, look)
    return _mac(secret, _looked(_FIGURES, look, figures)) if secret else b""


def check_figures(token: str, look: Look, figures: Figures) -> bool:
    """Whether the answer to this very look can be trusted; without a token every answer is."""
    return not token or bool(_check(token, _looked(_FIGURES, look, figures), figures.proof))


def fingerprints(token: str, cluster: str) -> tuple[str, ...]:
    """What the store may hold of a token: enough to see whether two processes have the same."""
    return tuple(
        _mac(secret, msgspec.msgpack.encode((_FINGERPRINT, cluster))).hex()[:_FINGERPRINT_CHARS]
        for secret in secrets_of(token)
    )


def _prove(token: str, said: bytes) -> bytes:
    return b"".join(_mac(secret, said) for secret in secrets_of(token))


def _check(token: str, said: bytes, proof: bytes) -> str:
    proof = proof[: MOST_SECRETS * PROOF_BYTES]
    claims = [proof[at : at + PROOF_BYTES] for at in range(0, len(proof), PROOF_BYTES)]
    known = ""
    for secret in reversed(secrets_of(token)):
        own = _mac(secret, said)
        for claim in claims:
            if hmac.compare_digest(own, claim):
                known = secret
    return known


def _looked(label: str, look: Look, figures: Figures | None = None) -> bytes:
    """As `_said`, for a look and its answer."""
    fields: list[object] = [label, look.cluster, look.receiver, look.nonce]
    if figures is not None:
        fields += [
            figures.at_s, figures.turns, figures.residents, figures.queued, figures.open_asks,
            figures.loop_lag_s, figures.lease_left_s,
        ]  # fmt: skip
    return msgspec.msgpack.encode(fields)


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
