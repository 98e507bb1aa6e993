"""One process as operators see it: its meter, its probes, its metrics, over HTTP if it is told to.

Made by `node` and `manager` around their `Supervisor`, from before the first incarnation until
after the last, so that a probe gets an answer while the process joins, leaves or joins anew
(RG-23). It only looks: no answer depends on a call to the store, the coordinator or a peer.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any, Self

from domicile.incarnation.gauges import gauges_of
from domicile.incarnation.supervisor import Supervisor
from domicile.observe.exposition import CONTENT_TYPE, gauge
from domicile.observe.http import HttpServer, Page, split_address
from domicile.observe.metrics import Metrics
from domicile.observe.readiness import ProbeAnswer, ProbeInput, health, readiness
from domicile.ports.meter import Meter, takes_events

log = logging.getLogger("domicile")


class TwoMeters:
    """Counts in two places: a program's own meter, and the one that a scraper reads."""

    def __init__(self, metrics: Metrics, other: Meter) -> None:
        self._metrics, self._other = metrics, other
        self.takes_events = takes_events(other)
        self.event = other.event
        self.took = metrics.took

    def count(self, name: str, value: int = 1) -> None:
        """Count in both."""
        self._metrics.count(name, value)
        self._other.count(name, value)


class Observation:
    """The view of one process. Enter it before its first life begins, leave it after the last.

    `http` is where it answers, empty for nowhere. `meter` is what the process was given, the
    attribute `meter` what it shall count with.
    """

    def __init__(self, lives: Supervisor, http: str, meter: Meter | None = None) -> None:
        self._lives = lives
        self._metrics = meter if isinstance(meter, Metrics) else Metrics()
        self.meter: Meter = self._metrics
        if meter is not None and meter is not self._metrics:
            self.meter = TwoMeters(self._metrics, meter) if http else meter
        self._server: HttpServer | None = None
        if http:
            split_address(http)
            self._server = HttpServer(
                http,
                {
                    "/metrics": lambda: Page(HTTPStatus.OK, self.text(), CONTENT_TYPE),
                    "/healthz": lambda: _page(self.health()),
                    "/readyz": lambda: _page(self.readiness()),
                },
            )

    @property
    def address(self) -> str:
        """Where it answers now; empty if nowhere."""
        return "" if self._server is None else self._server.address

    def health(self) -> ProbeAnswer:
        """Whether this process is worth keeping: what `/healthz` says."""
        return health(self._standing())

    def readiness(self) -> ProbeAnswer:
        """Whether this process takes part: what `/readyz` says."""
        return readiness(self._standing())

    def text(self) -> str:
        """What `/metrics` says."""
        life = self._lives.current
        ready = gauge("domicile_ready", "1 while /readyz says so.", self.readiness().ok)
        return self._metrics.text([ready, *([] if life is None else gauges_of(life))])

    async def __aenter__(self) -> Self:
        """Answer from here on."""
        if self._server is not None:
            await self._server.start()
            log.info("metrics and probes at http://%s", self._server.address)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        """Stop answering."""
        if self._server is not None:
            await self._server.close()

    def _standing(self) -> ProbeInput:
        lives = self._lives
        life = lives.current
        if life is None:
            return ProbeInput(
                started=lives.started, failed=lives.failed, was_joined=lives.joined,
                leaving=lives.stopping,
            )  # fmt: skip
        members = life.member.members
        config = members.config
        return ProbeInput(
            started=True,
            failed=lives.failed,
            joined=True,
            was_joined=True,
            valid=life.lease_left_s > 0,
            viewed=life.me in members.nodes,
            configured=all(config and role in config.shards for role in life.runtime.shards),
            leaving=lives.stopping or life.runtime.leaving,
        )


def _page(answer: ProbeAnswer) -> Page:
    status = HTTPStatus.OK if answer.ok else HTTPStatus.SERVICE_UNAVAILABLE
    return Page(status, f"{answer.reason}\n")
