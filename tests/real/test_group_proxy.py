"""The proxy of a replica group on real sockets: it leads to one primary, never to two (FO-17)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random

import pytest
from proxy_lab import ProxiedGroup, proxied_group

from domicile.errors import ConfigError
from domicile.failover.proxy import BUFFER_BYTES, GroupProxy, ProxyLimits

PATIENCE_S = 60.0


def play(
    scenario: Callable[[ProxiedGroup], Awaitable[None]], limits: ProxyLimits | None = None
) -> ProxiedGroup:
    found: list[ProxiedGroup] = []

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), proxied_group(limits) as group:
            found.append(group)
            await scenario(group)

    asyncio.run(main())
    return found[0]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def ask(session: tuple[asyncio.StreamReader, asyncio.StreamWriter], line: str) -> str:
    """Write a line; who acknowledged it. Empty: the connection ended."""
    reader, writer = session
    try:
        writer.write(f"{line}\n".encode())
        await writer.drain()
        return (await reader.readline()).decode().strip()
    except ConnectionError:
        return ""


@pytest.mark.scenario("FO-17")
def test_a_write_that_is_acknowledged_through_the_proxy_goes_to_one_primary() -> None:
    """Clients write without a pause while the primary changes, with and without an election."""
    acknowledged: dict[str, str] = {}

    async def scenario(group: ProxiedGroup) -> None:
        over = asyncio.Event()
        random = Random(1)

        async def write(name: str) -> None:
            number = 0
            while not over.is_set():
                session = await group.client()
                while not over.is_set():
                    number += 1
                    line = f"{name}-{number}"
                    answer = await ask(session, line)
                    if not answer:
                        break
                    by, _, back = answer.partition(" ")
                    assert back == line
                    acknowledged[line] = by
                session[1].transport.abort()

        writers = [asyncio.ensure_future(write(f"w{n}")) for n in range(8)]
        servers = list(group.servers.values())
        for epoch in range(2, 22):
            before = len(acknowledged)
            await until(lambda before=before: len(acknowledged) > before + 20)  # type: ignore[misc]
            if random.random() < 0.5:
                await group.elect(epoch)
            old, new = servers[epoch % 2], servers[(epoch + 1) % 2]
            await group.serve(new.name, epoch)
            await until(lambda new=new: bool(new.sessions))  # type: ignore[misc]
            await until(lambda old=old: not old.sessions)  # type: ignore[misc]
        over.set()
        for writer in writers:
            writer.cancel()
        await asyncio.wait(writers)

    group = play(scenario)
    held = {name: dict.fromkeys(one.lines) for name, one in group.servers.items()}
    assert len(acknowledged) > 400
    assert [line for line, by in acknowledged.items() if line not in held[by]] == []
    both = [line for line in held["s1"] if line in held["s2"]]
    assert both == []
    assert group.meter.counts["proxy.cut"] > 0


@pytest.mark.scenario("FO-17")
def test_no_byte_reaches_the_old_primary_once_a_new_one_has_a_connection() -> None:
    async def scenario(group: ProxiedGroup) -> None:
        first = await group.client()
        assert await ask(first, "one") == "s1 one"
        await group.serve("s2", 2)
        second = await group.client()
        assert await ask(second, "two") == "s2 two"
        assert await ask(first, "three") == ""
        assert group.servers["s1"].lines == ["one"]
        assert group.servers["s2"].lines == ["two"]

    play(scenario)


def test_while_a_group_elects_connections_are_cut_and_new_ones_wait() -> None:
    async def scenario(group: ProxiedGroup) -> None:
        first = await group.client()
        assert await ask(first, "one") == "s1 one"
        await group.elect(2)
        assert await first[0].read() == b""
        second = await group.client()
        waiting = asyncio.ensure_future(ask(second, "two"))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        assert [one.lines for one in group.servers.values()] == [["one"], []]
        await group.serve("s2", 2)
        assert await waiting == "s2 two"

    play(scenario)


def test_a_switchover_that_reverts_cuts_nothing() -> None:
    async def scenario(group: ProxiedGroup) -> None:
        first = await group.client()
        assert await ask(first, "one") == "s1 one"
        await group.switch("s2", 1)
        second = await group.client()
        waiting = asyncio.ensure_future(ask(second, "two"))
        # The server itself holds writes back; the proxy keeps the connection.
        assert await ask(first, "three") == "s1 three"
        assert not waiting.done()
        await group.serve("s1", 1)
        assert await waiting == "s1 two"
        assert await ask(first, "four") == "s1 four"

    play(scenario)


def test_new_connections_wait_until_the_next_primary_is_open() -> None:
    """Between its announcement and its opening a server refuses clients, as PostgreSQL does."""

    async def scenario(group: ProxiedGroup) -> None:
        await group.switch("s2", 1)
        await until(lambda: group.follower.announced() is None)
        waiting = asyncio.ensure_future(ask(await group.client(), "one"))
        await group.serve("s2", 2, opened=False)
        await until(lambda: group.follower.announced() is not None)
        later = asyncio.ensure_future(ask(await group.client(), "two"))
        await until(lambda: group.proxy.connections == 2)
        version = group.follower.version
        await group.tell("s2", "fenced")
        await until(lambda: group.follower.version > version)
        assert group.servers["s2"].most_sessions == 0
        await group.tell("s2", "primary")
        assert (await waiting, await later) == ("s2 one", "s2 two")
        # Once it was open, a look at it that fails keeps nobody out.
        version = group.follower.version
        await group.tell("s2", "down")
        await until(lambda: group.follower.version > version)
        assert await ask(await group.client(), "three") == "s2 three"

    play(scenario)


def test_a_primary_that_goes_on_is_open_again_before_new_connections_reach_it() -> None:
    async def scenario(group: ProxiedGroup) -> None:
        first = await group.client()
        assert await ask(first, "one") == "s1 one"
        await group.switch("s2", 1)
        await until(lambda: group.follower.announced() is None)
        most = group.servers["s1"].most_sessions
        await group.serve("s1", 1, opened=False)
        await until(lambda: group.follower.announced() is not None)
        waiting = asyncio.ensure_future(ask(await group.client(), "two"))
        await until(lambda: group.proxy.connections == 2)
        version = group.follower.version
        await group.tell("s1", "fenced")
        await until(lambda: group.follower.version > version)
        assert group.servers["s1"].most_sessions == most
        await group.tell("s1", "primary")
        assert await waiting == "s1 two"
        assert await ask(first, "three") == "s1 three"

    play(scenario)


def test_a_client_that_waits_too_long_is_closed() -> None:
    async def scenario(group: ProxiedGroup) -> None:
        await group.elect(2)
        await until(lambda: group.follower.announced() is None)
        assert await ask(await group.client(), "one") == ""
        assert group.meter.counts["proxy.unconnected"] == 1
        await until(lambda: group.proxy.connections == 0)

    play(scenario, ProxyLimits(wait_s=0.2))


def test_more_clients_than_there_is_room_for_are_closed_at_once() -> None:
    async def scenario(group: ProxiedGroup) -> None:
        sessions = [await group.client() for _ in range(2)]
        assert [await ask(one, "x") for one in sessions] == ["s1 x", "s1 x"]
        assert await ask(await group.client(), "y") == ""
        assert group.meter.counts["proxy.refused"] == 1
        sessions[0][1].close()
        await until(lambda: group.proxy.connections == 1)
        assert await ask(await group.client(), "z") == "s1 z"

    play(scenario, ProxyLimits(connections=2))


def test_a_primary_that_does_not_accept_yet_is_tried_again() -> None:
    async def scenario(group: ProxiedGroup) -> None:
        old = group.servers["s1"]
        port = int(old.address.rpartition(":")[2])
        await old.close()
        session = await group.client()
        waiting = asyncio.ensure_future(ask(session, "one"))
        await asyncio.sleep(0.2)
        assert not waiting.done()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"back " + await reader.readline())

        async with await asyncio.start_server(serve, "127.0.0.1", port):
            assert await waiting == "back one"
            session[1].transport.abort()

    play(scenario)


def test_the_end_of_either_side_is_passed_on_with_all_that_was_sent() -> None:
    async def scenario(group: ProxiedGroup) -> None:
        reader, writer = await group.client()
        writer.write(b"one\ntwo")
        writer.write_eof()
        # Half of the connection is closed; the answers still come, and then the end.
        assert await reader.read() == b"s1 one\ns1 two"
        writer.close()
        await until(lambda: group.proxy.connections == 0)
        assert not group.servers["s1"].sessions

    play(scenario)


def test_a_slow_reader_holds_back_its_sender_and_memory_is_bounded() -> None:
    async def scenario(group: ProxiedGroup) -> None:
        block, blocks = bytes(64 * 1024), 4_000
        sent = 0

        async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            with suppress(ConnectionError):
                for _ in range(blocks):
                    writer.write(block)
                    await writer.drain()
                    sent += len(block)

        async with await asyncio.start_server(flood, "127.0.0.1", 0) as server:
            group.servers["s1"].address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            await group.relocate("s1")
            _, writer = await group.client()
            # Its reader takes nothing, so the kernel's buffers fill, and then the proxy's.
            await until(lambda: group.proxy.waiting_bytes > BUFFER_BYTES)
            await asyncio.sleep(0.2)
            assert group.proxy.waiting_bytes < 3 * BUFFER_BYTES
            assert sent < len(block) * blocks // 2
            writer.transport.abort()

    play(scenario)


def test_an_old_answer_leads_nowhere_and_open_connections_stay() -> None:
    """The store is away for longer than the primary's ttl: nobody knows who the primary is."""

    async def scenario(group: ProxiedGroup) -> None:
        first = await group.client()
        assert await ask(first, "one") == "s1 one"
        group.cut = True
        await until(lambda: not group.follower.fresh)
        second = await group.client()
        waiting = asyncio.ensure_future(ask(second, "two"))
        # A guard closes its server by itself; the proxy need not.
        assert await ask(first, "three") == "s1 three"
        assert not waiting.done()
        group.cut = False
        assert await waiting == "s1 two"

    play(scenario)


def test_an_address_that_is_taken_or_wrong_is_told() -> None:
    async def scenario(group: ProxiedGroup) -> None:
        other = GroupProxy(group.follower, group.proxy.address)
        with pytest.raises(ConfigError, match="can't listen at 127"):
            await other.start()
        with pytest.raises(ConfigError, match="host:port"):
            GroupProxy(group.follower, "nonsense")

    play(scenario)
