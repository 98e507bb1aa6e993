"""The sharder in a process of its own: client, certificates, webhook, metrics, put together.

`domicile ring sharder` runs it. It ends by cancellation, and gives its Lease back.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from domicile.errors import DomicileError
from domicile.kube.certificates import WebhookCertificates
from domicile.kube.sharding import Sharder
from domicile.kube.webhook import WebhookServer
from domicile.kubeapi.client import KubeClient
from domicile.membership.clock import SystemClock
from domicile.observe.exposition import CONTENT_TYPE, write
from domicile.observe.http import HttpServer, Page

log = logging.getLogger("domicile.kube")

LOOK_S = 600.0
"""How often certificates are looked at: they may have been renewed."""

WEBHOOK_PORT = 9443
METRICS_PORT = 9464
"""Where a sharder listens in a pod."""

CertificateSource = Callable[[], Awaitable[WebhookCertificates]]


@dataclass(slots=True)
class SharderOptions:
    """How a sharder is run."""

    namespace: str
    identity: str
    certificates: CertificateSource
    host: str = "0.0.0.0"
    port: int = WEBHOOK_PORT
    service: str = ""
    """The name of the Service that leads to the webhook; without one, `url` does."""
    url: str = ""
    http: str = ""
    drain_deadline_s: float = 60.0
    lease_duration_s: int = 15
    look_s: float = LOOK_S


class ServedSharder:
    """A sharder that answers over the network. `run` it once."""

    def __init__(self, client: KubeClient, options: SharderOptions) -> None:
        self._client, self._options = client, options
        self._bundle = ""
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.minimum_version = ssl.TLSVersion.TLSv1_2
        self.sharder = Sharder(
            client,
            namespace=options.namespace,
            identity=options.identity,
            client_config=self._client_config,
            clock=SystemClock(),
            drain_deadline_s=options.drain_deadline_s,
            lease_duration_s=options.lease_duration_s,
        )
        self.webhook = WebhookServer(options.host, options.port, self._tls, self.sharder.answer)
        self.started = asyncio.Event()

    async def run(self) -> None:
        """Serve until cancelled."""
        options = self._options
        shown = await options.certificates()
        shown.load_into(self._tls)
        self._bundle = base64.b64encode(shown.authorities).decode()
        metrics: HttpServer | None = None
        try:
            await self.webhook.start()
            if options.http:
                metrics = HttpServer(options.http, self._pages())
                await metrics.start()
            self.started.set()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.sharder.run())
                tasks.create_task(self._renew(shown))
        finally:
            await self.webhook.close()
            if metrics is not None:
                await metrics.close()

    def _client_config(self, path: str) -> Mapping[str, Any]:
        options = self._options
        if options.service:
            service = {"name": options.service, "namespace": options.namespace, "path": path}
            return {"service": {**service, "port": 443}, "caBundle": self._bundle}
        return {"url": options.url.rstrip("/") + path, "caBundle": self._bundle}

    def _pages(self) -> dict[str, Callable[[], Page]]:
        def ready() -> Page:
            if self.sharder.listed.is_set():
                return Page(HTTPStatus.OK, "ok\n")
            return Page(HTTPStatus.SERVICE_UNAVAILABLE, "the rings have not been read yet\n")

        return {
            "/metrics": lambda: Page(
                HTTPStatus.OK, write(self.sharder.metrics.families()), CONTENT_TYPE
            ),
            "/healthz": lambda: Page(HTTPStatus.OK, "ok\n"),
            "/readyz": ready,
        }

    async def _renew(self, shown: WebhookCertificates) -> None:
        while True:
            await asyncio.sleep(self._options.look_s)
            try:
                found = await self._options.certificates()
                if found == shown:
                    continue
                found.load_into(self._tls)
            except DomicileError as error:
                log.warning("the webhook's certificates could not be looked at: %s", error)
                continue
            shown = found
            log.info("the webhook shows new certificates")
            self._bundle = base64.b64encode(found.authorities).decode()
            for ring in list(self.sharder.rings.values()):
                await ring.configure()
