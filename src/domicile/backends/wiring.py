"""What one process or tool opens behind its URLs: store, journal, transport and health port.

Called by `node`, `manager`, `client`, by operators' tools and by test processes. It makes objects
and must do no I/O; files and sockets are opened at their first use. The registry knows which
backend a URL means.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import msgspec

from domicile.backends.registry import (
    Backend,
    OpenOptions,
    journal_backend,
    open_health,
    shown_url,
    store_backend,
)
from domicile.core.ids import Incarnation
from domicile.core.state.keys import NODES
from domicile.core.state.records import NodeRecord, decode_record
from domicile.entity.running.blocking import blocking_threads
from domicile.errors import ConfigError, StoreError
from domicile.incarnation.context import Backends
from domicile.membership.clock import SystemClock
from domicile.ports.health import Health
from domicile.ports.journal import Journal, JournalUnknown, tells_trouble
from domicile.ports.meter import Meter, NoMeter
from domicile.ports.store import Store
from domicile.ports.transport import Transport
from domicile.ports.watchdog import Watchdog
from domicile.settings import Settings
from domicile.stores.namespace import Namespace
from domicile.transports.framing import FIRST_BYTES, packet_limit_bytes
from domicile.transports.tcp import TcpTransport
from domicile.transports.tls import Certificates

log = logging.getLogger("domicile")

LOOPBACK = "127.0.0.1:0"
"""The default address of a node: any free port, this machine only."""


def check_urls(store: str, journal: str | None = None, durable: Sequence[str] = ()) -> None:
    """Raise `ConfigError` unless the URLs can be opened.

    `durable` names the entity classes that store events: they need a journal (I4).
    """
    backend = store_backend(store)
    if journal is not None:
        journal_backend(journal)
    elif durable and backend.default_journal(store) is None:
        raise ConfigError(
            f"{durable[0]} keeps events, but {shown_url(store)} comes without a journal. Name one "
            'that all nodes share, as in journal="sqlite:///events.journal" for one machine, or '
            'say journal="memory://" if it is fine that events are lost whenever a shard moves or '
            "this process ends"
        )


async def check_journal(backends: Backends) -> None:
    """Open the journal before a process joins: a wrong file must be told at once.

    A journal that does not answer now may do so later, so that is only logged: by the journal
    itself, if it can.
    """
    if backends.journal is None:
        return
    try:
        await backends.journal.claim([])
    except JournalUnknown as error:
        if not tells_trouble(backends.journal):
            log.warning("durable entities wait until their journal answers: %s", error)
    except BaseException:
        await backends.close()
        raise


def open_backends(
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

    Of `token` only its presence counts: without it, and without certificates, a process listens
    only at addresses of this machine.
    """
    backend = store_backend(store)
    meter = NoMeter() if meter is None else meter
    options = OpenOptions(by, cluster, store, settings.op_timeout_s, meter)
    opened = Namespace(backend.open_store(store, options), cluster)
    options = replace(options, lives=partial(_lives, opened), ttl_s=settings.ttl_s, serves=True)
    return Backends(
        store=opened,
        transport=backend.transport(store, options)
        or _sockets(listen, advertise, settings, meter, bool(token)),
        journal=_journal(backend, store, journal, options),
        clock=SystemClock(),
        meter=meter,
        random=Random(os.urandom(16)),
        health=open_health(settings.health, options)
        if settings.health
        else backend.health(store, options),
        watchdog=watchdog,
        blocking=blocking_threads(settings),
    )


@dataclass(frozen=True, slots=True)
class WholeStore:
    """A store with all its clusters, for a tool that takes part in none of them."""

    url: str
    backend: Backend
    store: Store
    health: Health | None


def open_whole_store(
    url: str,
    *,
    by: str,
    op_timeout_s: float = 5.0,
    reads_only: bool = False,
    creates: bool = True,
) -> WholeStore:
    """A store for a tool, which `by` names in the store's history. Close its `store` afterwards."""
    backend = store_backend(url)
    options = OpenOptions(
        by, store=url, op_timeout_s=op_timeout_s, reads_only=reads_only, creates=creates
    )
    return WholeStore(url, backend, backend.open_store(url, options), backend.health(url, options))


def dialler(url: str, *, cluster: str, settings: Settings) -> Callable[[], Transport]:
    """What makes the transport of a tool that asks the nodes of a cluster and takes no part."""
    options = OpenOptions("tool", cluster, url, settings.op_timeout_s)
    sockets = _sockets(LOOPBACK, None, settings, options.meter, proved=True)
    return store_backend(url).transport(url, options) or sockets


def _journal(
    backend: Backend, store: str, journal: str | None, options: OpenOptions
) -> Journal | None:
    url = backend.default_journal(store) if journal is None else journal
    return None if url is None else journal_backend(url).open_journal(url, options)


async def _lives(store: Store, incarnations: Sequence[Incarnation], process: str) -> bool:
    """Whether the store has a record of one of these nodes, or of another one of this process; a
    store that does not answer may have it."""
    try:
        found = [decode_record(item.value, NodeRecord) for item in (await store.list(NODES)).items]
    except (StoreError, msgspec.MsgspecError):
        return True
    return any(one.incarnation in incarnations or one.process == process for one in found)


def _sockets(
    listen: str, advertise: str | None, settings: Settings, meter: Meter, proved: bool
) -> Callable[[], TcpTransport]:
    most = packet_limit_bytes(settings.message_bytes)
    certificates = Certificates.of(settings.tls_cert, settings.tls_key, settings.tls_ca)
    only_here = certificates is None and not proved and not settings.insecure

    def make() -> TcpTransport:
        # One set of certificates for all incarnations: a good one stays in use, whatever happens to
        # the files.
        if certificates is not None:
            certificates.load()
        return TcpTransport(
            listen, advertise=advertise, max_frame_bytes=most, first_bytes=FIRST_BYTES,
            stall_s=settings.link_timeout_s, meter=meter,
            certificates=certificates, only_here=only_here,
        )  # fmt: skip

    return make
