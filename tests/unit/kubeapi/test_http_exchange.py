"""The exchange over HTTP: what is asked directly before a request is sent."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from http_lab import served

from domicile.errors import Fenced
from domicile.kubeapi.credentials import Credentials
from domicile.kubeapi.exchange import ApiRequest, BrokenExchange
from domicile.kubeapi.http_exchange import HttpExchange


def test_a_request_is_checked_after_its_connection_is_there() -> None:
    async def scenario() -> None:
        async with served() as server:
            exchange = HttpExchange(Credentials(server.url))
            asked: list[str] = []
            check = partial(asked.append, "before")
            async with exchange.open(ApiRequest("GET", "/first", before_sending=check)) as answer:
                assert answer.status == 200
            assert asked == ["before"]

            def refuse() -> None:
                raise Fenced("the Lease is over")

            # On the connection that is there, and on one that has to be made.
            for _ in range(2):
                with pytest.raises(Fenced, match="the Lease is over"):
                    async with exchange.open(ApiRequest("POST", "/late", before_sending=refuse)):
                        raise AssertionError("it was sent")
            async with exchange.open(ApiRequest("POST", "/last")) as answer:
                assert answer.status == 200
            await exchange.close()
            assert b"/late" not in server.received
            assert server.received.count(b"HTTP/1.1\r\n") == 2

    asyncio.run(scenario())


def test_without_a_connection_nothing_is_asked() -> None:
    async def scenario() -> None:
        async with served() as server:
            gone = server.url
        exchange = HttpExchange(Credentials(gone))

        def check() -> None:
            raise AssertionError("there is no connection yet")

        with pytest.raises(BrokenExchange, match="no connection"):
            async with exchange.open(ApiRequest("POST", "/", before_sending=check)):
                pass
        await exchange.close()

    asyncio.run(scenario())
