"""Certificates of a process, read from files and read again when the files change.

Made by the code that wires a process, used by `domicile.transports.tcp` for each new connection:
then the files are checked, at most once a second. Both ends show a certificate that the same
authority has signed. Hostnames are not compared: nodes may be at any address, and the incarnation
in a peer's hello says who it is. Nothing here may ask at a terminal for a password.

Files are used only if this process itself would accept them from a peer: its two contexts make a
handshake with each other in memory. So an expired certificate is found at the start, not by peers.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from domicile.errors import ConfigError

log = logging.getLogger("domicile")

LOOK_S = 1.0
"""Seconds for which files are assumed unchanged after a check."""

SOON_S = 7 * 86_400.0
"""Seconds before the end of a certificate from which on the log warns of it, once a day."""

AGAIN_S = 86_400.0

MOST_ROUNDS = 8
"""Times that each end of a handshake speaks at most; TLS 1.2 needs three."""

_Stamp = tuple[tuple[int, int, int] | None, ...]


class Contexts(NamedTuple):
    """The TLS contexts for accepted connections and for dialled ones."""

    accepting: ssl.SSLContext
    dialling: ssl.SSLContext
    expires_at: float
    """The end of the own certificate, as `time.time` counts."""


class Certificates:
    """The certificate of this process, its key, and the authority that signs all of them."""

    def __init__(
        self,
        cert: str,
        key: str,
        ca: str,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        files = {"tls_cert": cert, "tls_key": key, "tls_ca": ca}
        # Absolute, because the files are checked as long as the process runs, and it may change its
        # directory.
        self._files = {name: os.path.abspath(path) for name, path in files.items()}
        self._now, self._wall = now, wall
        self._look_at = 0.0
        self._warn_at = 0.0
        self._contexts: Contexts | None = None
        self._stamp: _Stamp = ()
        self._bad: _Stamp = ()

    @classmethod
    def of(cls, cert: str, key: str, ca: str) -> Certificates | None:
        """From settings: None if none of the three is given; `ConfigError` if only some are."""
        files = {"tls_cert": cert, "tls_key": key, "tls_ca": ca}
        missing = [name for name, path in files.items() if not path]
        if len(missing) == len(files):
            return None
        if missing:
            raise ConfigError(
                f"TLS needs tls_cert, tls_key and tls_ca together: {' and '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing"
            )
        return cls(cert, key, ca)

    def load(self) -> None:
        """Read the files for the first time; `ConfigError` if they cannot be used."""
        if self._contexts is None:
            stamp = self._stamped()
            self._contexts, self._stamp = self._read(), stamp
            self._look_at = self._now() + LOOK_S
            self._warn_of_end(self._contexts.expires_at)

    @property
    def contexts(self) -> Contexts:
        """The contexts for a new connection. Files that became unusable leave the last good ones in
        use."""
        self.load()
        assert self._contexts is not None
        now = self._now()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            # The stamp is taken first: a file that changes while it is read is then read again.
            stamp = self._stamped()
            if stamp != self._stamp:
                self._read_anew(stamp)
            self._warn_of_end(self._contexts.expires_at)
        return self._contexts

    def _read(self) -> Contexts:
        """Read the files, and check that peers can accept what is in them; raises `ConfigError`."""
        accepting, dialling = _read(self._files)
        return Contexts(accepting, dialling, _check_own(accepting, dialling, self._files))

    def _warn_of_end(self, expires_at: float) -> None:
        wall = self._wall()
        left_s = expires_at - wall
        if left_s > SOON_S or wall < self._warn_at:
            return
        self._warn_at = wall + AGAIN_S
        end = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(expires_at))
        if left_s > 0:
            log.warning(
                "the certificate %s ends soon, at %s: replace the file before that, or no new "
                "connection can be made",
                self._files["tls_cert"], end,
            )  # fmt: skip
        else:
            log.error(
                "the certificate %s has ended, at %s: peers refuse new connections until the file "
                "is replaced",
                self._files["tls_cert"], end,
            )  # fmt: skip

    def _read_anew(self, stamp: _Stamp) -> None:
        try:
            self._contexts = self._read()
        except ConfigError as error:
            if stamp != self._bad:
                self._bad = stamp
                log.error("the changed certificates are not used, the old ones stay: %s", error)
        else:
            self._stamp, self._bad, self._warn_at = stamp, (), 0.0
            log.info("certificates have changed: new connections use %s", self._files["tls_cert"])

    def _stamped(self) -> _Stamp:
        return tuple(_stamp(path) for path in self._files.values())


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(files: dict[str, str]) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    for name, path in files.items():
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ConfigError(
                f"{name}={path!r} can't be read: {error.strerror}. Name a file in PEM form that "
                "this user may read"
            ) from error
    return _context(ssl.PROTOCOL_TLS_SERVER, files), _context(ssl.PROTOCOL_TLS_CLIENT, files)


def _check_own(accepting: ssl.SSLContext, dialling: ssl.SSLContext, files: dict[str, str]) -> float:
    """Have both contexts shake hands in memory; when the certificate ends. Raises `ConfigError`."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    near, far = dialling.wrap_bio(back, there), accepting.wrap_bio(there, back, server_side=True)
    shaking = [near, far]
    try:
        for _ in range(MOST_ROUNDS):
            shaking = [side for side in shaking if not _shaken(side)]
    except ssl.SSLError as error:
        raise ConfigError(
            f"tls_cert={files['tls_cert']!r} is a certificate that no peer would accept: "
            f"{getattr(error, 'verify_message', '') or _why(error)}. Give this process a valid one "
            f"that an authority of tls_ca={files['tls_ca']!r} has signed"
        ) from error
    shown: Any = near.getpeercert()
    return float(ssl.cert_time_to_seconds(shown["notAfter"]))


def _shaken(side: ssl.SSLObject) -> bool:
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


_REFUSALS = {
    "CERTIFICATE_EXPIRED": "it has expired. Replace tls_cert here",
    "CERTIFICATE_REQUIRED": "it shows none. Set tls_cert, tls_key and tls_ca here",
    "UNKNOWN_CA": "its authority is unknown there. Use certificates of one authority everywhere",
    "CERTIFICATE": "the log of the peer says why",
}
"""What a peer's alert means and what to do, by a part of its name; the first that fits counts."""


def why_no_tls(error: ssl.SSLError) -> str:
    """Why a connection under TLS failed, and what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the certificate of the peer is not accepted: {error.verify_message}. Look at "
            "tls_cert there and tls_ca here"
        )
    name = error.reason or ""
    if name == "WRONG_VERSION_NUMBER":
        return "the peer does not speak TLS. Set tls_cert, tls_key and tls_ca there, too"
    if "ALERT" in name:
        for part, meaning in _REFUSALS.items():
            if part in name:
                return f"the peer refuses the certificate of this process: {meaning}"
    return _why(error)


def _context(side: int, files: dict[str, str]) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Links resume by themselves; a resumed TLS session would skip the check of certificates.
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    if side == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    try:
        context.load_cert_chain(files["tls_cert"], files["tls_key"], password=_no_password)
    except (ssl.SSLError, OSError, ConfigError) as error:
        raise ConfigError(
            f"tls_cert={files['tls_cert']!r} and tls_key={files['tls_key']!r} are no certificate "
            f"and its key in PEM form, without a password: {_why(error)}"
        ) from error
    try:
        context.load_verify_locations(cafile=files["tls_ca"])
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"tls_ca={files['tls_ca']!r} holds no certificate in PEM form: {_why(error)}"
        ) from error
    return context


def _no_password() -> str:
    raise ConfigError("the key wants a password")


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return str(reason).lower().replace("_", " ") if reason else str(error)
