"""What the store knows of a token: who may register, and how a cluster changes its token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest

from domicile import ConfigError, Entity, Manager, Node, Settings, connect, handler
from domicile.backends.memory import MEMORY
from domicile.config import token_of
from domicile.core.state.agreement import agreed_tokens, foreign_token
from domicile.core.state.keys import CONFIG_KEY
from domicile.core.state.records import ConfigRecord, decode_record
from domicile.links.token import fingerprints

OLD, NEW, OTHER = "an old secret of some length", "a new secret of some length", "another secret"
SETTINGS = Settings(shards=4, settle_s=0.05)


class Parrot(Entity, name="token.parrot"):
    """Says what it hears."""

    @handler
    async def say(self, text: str) -> str:
        return text


@pytest.fixture
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv("DOMICILE_TOKEN", raising=False)
    url = f"memory://{request.node.name}"
    yield url
    MEMORY.forget(url, "domicile")


def node(store: str, token: str | None) -> Node:
    return Node(store, entities=[Parrot], token=token, settings=SETTINGS)


async def say(store: str, token: str | None) -> str:
    async with connect(store, token=token, settings=SETTINGS) as client:
        return await client.ref(Parrot, "p").ask(Parrot.say, "hello")


async def kept(store: str) -> tuple[str, ...]:
    item = MEMORY.shared(store, "domicile").store.peek(b"domicile/" + CONFIG_KEY)
    assert item is not None
    assert OLD.encode() not in item.value
    assert NEW.encode() not in item.value
    return decode_record(item.value, ConfigRecord).tokens


def prints(token: str) -> tuple[str, ...]:
    return fingerprints(token, "domicile")


@pytest.mark.parametrize(
    ("known", "own", "then"),
    [
        ("", "a", "a"),
        ("a", "a", "a"),
        ("a", "b,a", "b,a"),
        ("b,a", "a", "b,a"),
        ("b,a", "b", "b"),
        ("a", "a,b", "a,b"),
        ("a,b", "b,a", "b,a"),
        ("a,b", "b", "a,b"),
    ],
)
def test_what_is_kept_when_a_node_joins(known: str, own: str, then: str) -> None:
    assert agreed_tokens(prints(known), prints(own)) == prints(then)


@pytest.mark.parametrize(
    ("known", "own", "inhabited", "why"),
    [
        ("", "", True, ""),
        ("", "a", False, ""),
        ("", "a", True, "run without"),
        ("a", "", False, "this process has none"),
        ("a", "b", False, "not the cluster's"),
        ("a", "b,a", True, ""),
        ("b,a", "a", True, ""),
    ],
)
def test_who_may_take_part(known: str, own: str, inhabited: bool, why: str) -> None:
    found = foreign_token(prints(known), prints(own), inhabited=inhabited)
    assert why in found
    assert bool(found) == bool(why)


@pytest.mark.parametrize("token", [None, OTHER])
def test_nobody_registers_or_reads_without_the_token(store: str, token: str | None) -> None:
    async def scenario() -> None:
        async with node(store, OLD):
            assert await say(store, OLD) == "hello"
            with pytest.raises(ConfigError, match="DOMICILE_TOKEN"):
                await say(store, token)
            for stranger in (node(store, token), Manager(store, token=token, settings=SETTINGS)):
                with pytest.raises(ConfigError, match="DOMICILE_TOKEN"):
                    async with stranger:
                        pass
            assert await kept(store) == prints(OLD)
        with pytest.raises(ConfigError, match="DOMICILE_TOKEN"):
            await say(store, token)

    asyncio.run(scenario())


def test_a_cluster_that_runs_without_a_token_takes_none_on(store: str) -> None:
    async def scenario() -> None:
        async with node(store, None):
            with pytest.raises(ConfigError, match="stop all of them"):
                async with node(store, NEW):
                    pass
            with pytest.raises(ConfigError, match="stop all of them"):
                await say(store, NEW)
            assert await say(store, None) == "hello"
        async with node(store, NEW):
            assert await say(store, NEW) == "hello"
        assert await kept(store) == prints(NEW)

    asyncio.run(scenario())


def test_the_token_comes_from_the_environment(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOMICILE_TOKEN", OLD)

    async def scenario() -> None:
        async with node(store, None), Manager(store, settings=SETTINGS):
            assert await say(store, None) == await say(store, OLD) == "hello"
            assert await kept(store) == prints(OLD)
            monkeypatch.delenv("DOMICILE_TOKEN")
            with pytest.raises(ConfigError, match="this process has none"):
                await say(store, None)

    asyncio.run(scenario())


def test_a_token_changes_node_by_node(store: str) -> None:
    """Both the process that was restarted and the one that was not work on, and all may restart."""

    async def scenario() -> None:
        async with AsyncExitStack() as running:
            nodes: list[AsyncExitStack] = []
            for _ in range(2):
                nodes.append(await running.enter_async_context(AsyncExitStack()))
                await nodes[-1].enter_async_context(node(store, OLD))
            for round_, good in ((f"{NEW},{OLD}", (OLD, f"{NEW},{OLD}")), (NEW, (NEW,))):
                for one in nodes:
                    await one.aclose()
                    await one.enter_async_context(node(store, round_))
                    for token in good:
                        assert await say(store, token) == "hello"
            assert await kept(store) == prints(NEW)
            with pytest.raises(ConfigError, match="not the cluster's"):
                await say(store, OLD)

    asyncio.run(scenario())


def test_a_short_token_is_warned_of_and_never_shown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("domicile.config._short", {})
    assert token_of("hunter2") == "hunter2"
    assert "guessed" in caplog.text
    assert "hunter2" not in caplog.text
    caplog.clear()
    assert token_of("hunter2") == "hunter2"
    assert caplog.text == "", "once in a process is enough"
    assert token_of("hunter3") == "hunter3"
    assert "guessed" in caplog.text
    caplog.clear()
    assert token_of(f" {NEW} , {OLD}") == f"{NEW},{OLD}"
    assert token_of(None, {"DOMICILE_TOKEN": OLD}) == OLD
    assert token_of(None, {}) == ""
    for empty in ("", "  "):
        with pytest.raises(ConfigError, match=r"token='' is an empty token.*leave token= out"):
            token_of(empty, {"DOMICILE_TOKEN": OLD})
        with pytest.raises(ConfigError, match="DOMICILE_TOKEN='' is an empty token"):
            token_of(None, {"DOMICILE_TOKEN": empty})
    assert caplog.text == ""
