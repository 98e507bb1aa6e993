"""The webhook over TLS and real sockets: reviews, limits, renewed certificates."""

from __future__ import annotations

import asyncio
import json
import ssl
from datetime import UTC, datetime, timedelta

import pytest

from domicile.kube.certificates import (
    WebhookCertificates,
    made_certificates,
    shared_certificates,
)
from domicile.kube.sharding import Sharder
from domicile.kube.webhook import WebhookServer
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.credentials import Credentials
from domicile.kubeapi.exchange import ApiRequest, BrokenExchange
from domicile.kubeapi.http_exchange import HttpExchange
from domicile.testing.kube import FakeApiServer

NOW = datetime.now(UTC)
PATH = "/webhooks/sharder/controllerring/websites"


async def posted(exchange: HttpExchange, body: bytes) -> tuple[int, bytes]:
    async with exchange.open(ApiRequest("POST", PATH, {}, {}, body)) as answer:
        return answer.status, b"".join([piece async for piece in answer.chunks()])


def test_reviews_over_tls_and_a_renewed_certificate() -> None:
    async def body() -> None:
        made = made_certificates(["127.0.0.1"], NOW)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.load_into(tls)
        sharder = Sharder(
            KubeClient(FakeApiServer().exchange("x")), namespace="default", identity="s"
        )
        server = WebhookServer("127.0.0.1", 0, tls, sharder.answer)
        await server.start()

        def dial(ca: bytes) -> HttpExchange:
            return HttpExchange(Credentials(f"https://127.0.0.1:{server.port}", ca=ca))

        exchange = dial(made.authorities)
        try:
            for review in (b'{"request": {"uid": "1"}}', b"nonsense", b""):
                status, answered = await posted(exchange, review)
                assert status == 200
                assert json.loads(answered)["response"]["allowed"] is True
            async with exchange.open(ApiRequest("GET", PATH)) as answer:
                assert answer.status == 405
            status, _ = await posted(exchange, b"x" * (17 << 20))
            assert status == 413
            # Other certificates are shown to whoever connects next.
            other = made_certificates(["127.0.0.1"], NOW)
            other.load_into(tls)
            fresh = dial(other.authorities)
            assert (await posted(fresh, b"{}"))[0] == 200
            await fresh.close()
            stranger = dial(made.authorities)
            with pytest.raises(BrokenExchange) as refused:
                await posted(stranger, b"{}")
            assert not refused.value.sent
            await stranger.close()
        finally:
            await exchange.close()
            await server.close()

    asyncio.run(body())


def test_certificates_are_renewed_in_time_and_old_authorities_stay() -> None:
    first = made_certificates(["localhost"], NOW)
    assert made_certificates(["localhost"], NOW + timedelta(days=50), first) is first
    second = made_certificates(["localhost"], NOW + timedelta(days=70), first)
    assert second.certificate != first.certificate
    assert second.authorities == first.authorities
    years = NOW + timedelta(days=4 * 365)
    third = made_certificates(["localhost"], years, second)
    assert third.authorities != first.authorities
    assert third.authorities.endswith(first.authorities)
    fourth = made_certificates(["localhost"], years + timedelta(days=1), third)
    assert fourth.certificate != third.certificate


def test_replicas_share_their_certificates() -> None:
    async def body() -> None:
        server = FakeApiServer(delay_s=(0.0, 0.001))

        async def one(name: str) -> WebhookCertificates:
            client = KubeClient(server.exchange(name))
            return await shared_certificates(client, "default", ["localhost"], NOW)

        found = await asyncio.gather(*(one(f"s{number}") for number in range(5)))
        assert len({made.certificate for made in found}) == 1
        later = NOW + timedelta(days=80)
        client = KubeClient(server.exchange("later"))
        renewed = await shared_certificates(client, "default", ["localhost"], later)
        assert renewed.certificate != found[0].certificate
        assert await shared_certificates(client, "default", ["localhost"], later) == renewed

    asyncio.run(body())
