"""From URLs to backends: which store, transport, journal and health port a process gets.

Called by `node` and `client` only. Makes objects and does no I/O; files and sockets are opened
by their first use.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from random import Random
from typing import ClassVar

from domicile.core.state.keys import CLIENTS
from domicile.entity.running.blocking import WorkerThreads
from domicile.errors import ConfigError
from domicile.incarnation.context import Backends
from domicile.journals.memory import MemoryJournal
from domicile.links.token import SHORT, secrets_of
from domicile.membership.clock import SystemClock
from domicile.ports.meter import Meter, NoMeter
from domicile.ports.watchdog import Watchdog
from domicile.settings import Settings
from domicile.stores.file_locks import FileLocks
from domicile.stores.memory.store import MemoryStore
from domicile.stores.namespace import Namespace
from domicile.stores.sqlite.store import SqliteStore
from domicile.transports.framing import FIRST_BYTES, packet_limit_bytes
from domicile.transports.memory import MemoryNetwork, MemoryTransport
from domicile.transports.tcp import TcpTransport
from domicile.transports.tls import Certificates

log = logging.getLogger("domicile")

LOOPBACK = "127.0.0.1:0"
"""Where a node listens unless told otherwise: any free port, this machine only."""


class _Here:
    """A `memory://name` shared by the nodes of one process."""

    known: ClassVar[dict[str, _Here]] = {}

    def __init__(self) -> None:
        self.store = MemoryStore(SystemClock())
        self.journal = MemoryJournal()
        self.network = MemoryNetwork()


def check_cluster(name: str) -> None:
    """Raise `ConfigError` unless a cluster's name is one: keys of a store begin with it and `/`."""
    if not name or "/" in name or not name.isprintable():
        raise ConfigError(
            f"cluster={name!r} is no name for a cluster: write at least one character and no /, "
            "as in cluster='blue'"
        )


def check_store(url: str) -> None:
    """Raise `ConfigError` unless a store URL is one that this version knows."""
    scheme, found, rest = url.partition("://")
    if found and scheme == "memory":
        return
    if found and scheme == "sqlite":
        sqlite_path(url)
        return
    bare = url
    if found:
        bare = rest.removeprefix("/") if get_close_matches(scheme, ["sqlite"]) else ""
    elif url.startswith("sqlite:"):
        bare = url.removeprefix("sqlite:").removeprefix("/")
    hint = f"; did you mean sqlite:///{bare}?" if bare else ""
    raise ConfigError(
        f"store {url!r} is not one of the known kinds: memory://name (one process), "
        f"sqlite:///path/to/file.db (many processes of one machine){hint}"
    )


def token_of(token: str | None, environ: Mapping[str, str] | None = None) -> str:
    """The token that a process has: its own, else `DOMICILE_TOKEN`; raises `ConfigError`."""
    if token is None:
        token = (os.environ if environ is None else environ).get("DOMICILE_TOKEN", "")
    secrets = secrets_of(token)
    if any(len(secret) < SHORT for secret in secrets):
        log.warning(
            "the token is short enough to be guessed: use one of at least %d characters, as "
            "`python -c 'import secrets; print(secrets.token_hex())'` makes it",
            SHORT,
        )
    return ",".join(secrets)


def check_journal(url: str | None) -> None:
    """Raise `ConfigError` unless a journal URL is one that this version knows."""
    if url is not None and not url.startswith("memory://"):
        raise ConfigError(
            f"journal {url!r} is not one of the known kinds: memory:// (kept by this process "
            "alone and gone with it)"
        )


def sqlite_path(url: str) -> Path:
    """The file that a `sqlite:///` URL names; four slashes begin an absolute path."""
    path = url.removeprefix("sqlite://")
    if not path.startswith("/") or len(path) < 2 or path.endswith("/"):
        raise ConfigError(
            f"store {url!r} names no file: write sqlite:///relative/file.db or "
            "sqlite:////absolute/file.db, or memory://name for one process"
        )
    return Path(path[1:])


def locks_of(path: Path) -> FileLocks:
    """The locks that prove who lives, beside an embedded store (L6)."""

    return FileLocks(path.with_name(path.name + ".d"))


def backends(
    store: str,
    *,
    cluster: str,
    settings: Settings,
    by: str = "client",
    listen: str = LOOPBACK,
    advertise: str | None = None,
    journal: str | None = None,
    meter: Meter | None = None,
    watchdog: Watchdog | None = None,
    token: str = "",
) -> Backends:
    """Everything that one process needs to take part; `by` names it in the store's history.

    `token` is only asked whether there is one: without it, and without certificates, a process
    listens at addresses of this machine alone.
    """
    check_store(store)
    check_journal(journal)
    meter = NoMeter() if meter is None else meter
    random = Random(os.urandom(16))
    if store.startswith("memory://"):
        here = _Here.known.setdefault(f"{store}#{cluster}", _Here())
        return Backends(
            store=here.store.client(by),
            transport=lambda: MemoryTransport(here.network),
            journal=here.journal,
            clock=SystemClock(),
            meter=meter,
            random=random,
            watchdog=watchdog,
            blocking=WorkerThreads(settings.blocking_threads),
        )
    path = sqlite_path(store)
    return Backends(
        store=Namespace(
            SqliteStore(
                path,
                by=by,
                op_timeout_s=settings.op_timeout_s,
                meter=meter,
                unhurried=f"{cluster}/".encode() + CLIENTS,
            ),
            cluster,
        ),
        transport=_sockets(listen, advertise, settings, meter, bool(token)),
        journal=MemoryJournal() if journal is not None else None,
        clock=SystemClock(),
        meter=meter,
        random=random,
        health=locks_of(path),
        watchdog=watchdog,
        blocking=WorkerThreads(settings.blocking_threads),
    )


def _sockets(
    listen: str, advertise: str | None, settings: Settings, meter: Meter, proved: bool
) -> Callable[[], TcpTransport]:
    most = packet_limit_bytes(settings.message_bytes)
    certificates = Certificates.of(settings.tls_cert, settings.tls_key, settings.tls_ca)
    only_here = certificates is None and not proved and not settings.insecure

    def make() -> TcpTransport:
        # One set of certificates for all lives: what is good stays, whatever the files become.
        if certificates is not None:
            certificates.load()
        return TcpTransport(
            listen, advertise=advertise, max_frame_bytes=most, first_bytes=FIRST_BYTES,
            stall_s=settings.link_timeout_s, meter=meter,
            certificates=certificates, only_here=only_here,
        )  # fmt: skip

    return make
