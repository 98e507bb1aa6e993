"""What load balancers and scrapers are told about a replica group over HTTP (FO-17)."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable

import pytest
from proxy_lab import ProxiedGroup, proxied_group

from domicile.failover.answers import FollowerPages, follower_metrics
from domicile.observe.http import HttpServer
from domicile.observe.metrics import Metrics

Ask = Callable[[str], Awaitable[tuple[int, str]]]


def play(scenario: Callable[[ProxiedGroup, Ask], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), proxied_group() as group:
            metrics = follower_metrics(group.follower, Metrics(), group.follower.now)
            pages = FollowerPages(group.follower, {"/metrics": metrics})
            server = HttpServer("127.0.0.1:0", pages)
            await server.start()

            async def ask(path: str) -> tuple[int, str]:
                return await asyncio.to_thread(_fetch, f"http://{server.address}{path}")

            try:
                await until(lambda: group.follower.announced() is not None)
                await scenario(group, ask)
            finally:
                await server.close()

    asyncio.run(main())


def _fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


@pytest.mark.scenario("FO-17")
def test_a_load_balancer_is_told_200_for_one_primary_and_503_for_the_others() -> None:
    async def scenario(group: ProxiedGroup, ask: Ask) -> None:
        s1, s2 = (one.address for one in group.servers.values())
        assert await ask("/primary") == (200, f"{s1}\n")
        assert await ask("/replica") == (200, f"{s2}\n")
        for name, address, primary, replica in (("s1", s1, 200, 503), ("s2", s2, 503, 200)):
            for path in (name, address):
                assert (await ask(f"/primary/{path}"))[0] == primary
                assert (await ask(f"/replica/{path}"))[0] == replica
        assert await ask("/primary/s9") == (503, "not s9\n")
        assert (await ask("/nothing"))[0] == 404

    play(scenario)


def test_nobody_is_the_primary_while_a_group_elects() -> None:
    async def scenario(group: ProxiedGroup, ask: Ask) -> None:
        await group.elect(2)
        await until(lambda: group.follower.announced() is None)
        for path in ("/primary", "/primary/s1", "/primary/s2", "/replica", "/replica/s2"):
            code, text = await ask(path)
            assert code == 503
            assert text.startswith("electing 2: ")

    play(scenario)


def test_nobody_is_the_primary_while_the_store_is_away_for_too_long() -> None:
    async def scenario(group: ProxiedGroup, ask: Ask) -> None:
        group.cut = True
        await until(lambda: not group.follower.fresh)
        code, text = await ask("/primary")
        assert (code, text) == (503, "not known: the test has cut the line\n")
        assert "domicile_group_known 0" in (await ask("/metrics"))[1].splitlines()

    play(scenario)


def test_metrics_say_what_a_failover_would_lose() -> None:
    async def scenario(group: ProxiedGroup, ask: Ask) -> None:
        code, text = await ask("/metrics")
        assert code == 200
        lines = text.splitlines()
        for line in (
            "domicile_group_known 1",
            "domicile_group_epoch 1",
            "domicile_group_served 1",
            "domicile_group_waits 0",
            "domicile_group_would_lose_bytes 0",
            "domicile_group_would_lose_seconds 0",
            'domicile_group_lag_bytes{server="s2"} 0',
            'domicile_group_healthy{server="s2"} 1',
            "domicile_proxy_cut_total 0",
        ):
            assert line in lines

    play(scenario)
