"""Operators of kopf as instances of a ring, run by `kopf run`, on a real API server (KR-12)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from kube_lab import GROUP, SITES, ApiServer, SharderProcess, install_websites, started, until
from ring_judge import judge_audit

from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.kinds import RINGS
from domicile.ops.ring import look_at_ring

OPERATOR = Path(__file__).parent.parent / "labs" / "kopf_operator.py"
LABEL = "shard.alpha.sharding.timebertt.dev/websites"
OBJECTS = 18


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    for one in started(tmp_path_factory.mktemp("kube")):
        asyncio.run(install_websites(one))
        yield one


class Operator:
    """`kopf run` of one instance."""

    def __init__(self, server: ApiServer, home: Path, name: str, **more: str) -> None:
        self.acts, self.log = home / f"{name}.acts", home / f"{name}.log"
        self.acts.touch()
        environment = {
            **os.environ, "KUBECONFIG": str(server.kubeconfig_of(name)), "POD_NAME": name,
            "ACTS": str(self.acts), **more,
        }  # fmt: skip
        command = [sys.executable, "-m", "kopf", "run", "-A", str(more.get("PROGRAM", OPERATOR))]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def noted(self) -> list[dict[str, Any]]:
        lines = self.acts.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()


async def at_rest(client: KubeClient, *names: str) -> bool:
    seen = await look_at_ring(client, "websites")
    with_objects = sorted(name for name, one in seen["instances"].items() if one["objects"])
    resting = not seen["unassigned_count"] and not seen["draining_count"]
    return resting and with_objects == sorted(names)


async def owners(client: KubeClient) -> dict[str, str]:
    found = (await client.list(SITES)).items
    return {one.metadata.name: one.metadata.label(LABEL) for one in found}


def doings(operators: list[Operator], *what: str) -> dict[str, list[tuple[float, str]]]:
    found: dict[str, list[tuple[float, str]]] = {}
    for one in operators:
        for line in one.noted():
            if line["what"] in what:
                found.setdefault(line["object"], []).append((line["at"], line["instance"]))
    return {name: sorted(times) for name, times in found.items()}


@pytest.mark.scenario("KR-12", partial=True)
def test_operators_of_kopf_share_the_objects(server: ApiServer, tmp_path: Path) -> None:
    asyncio.run(share(server, tmp_path))


async def share(server: ApiServer, home: Path) -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(server.client())
        spec = {"resources": [{"group": GROUP, "resource": "websites"}]}
        await client.create(RINGS, {"metadata": {"name": "websites"}, "spec": spec})
        sharder = SharderProcess(server, home, "sharder-1", user="sharder-1")
        stack.callback(sharder.process.kill)
        operators: list[Operator] = []

        def start(name: str, **more: str) -> Operator:
            operators.append(Operator(server, home, name, **more))
            stack.callback(operators[-1].end)
            return operators[-1]

        a, b = start("a", SLOW_S="0.3"), start("b", SLOW_S="0.3")

        async def available(count: int) -> bool:
            return (await client.get(RINGS, "websites")).status.available_shards == count

        await until(lambda: available(2), "two operators are there")
        for number in range(OBJECTS):
            await client.create(SITES, {"metadata": {"name": f"site-{number}"}}, "default")

        async def created() -> bool:
            return len(doings(operators, "created")) == OBJECTS

        await until(created, "each object was handled")
        owned = await owners(client)
        for name, times in doings(operators, "create").items():
            assert {instance for _, instance in times} == {owned[name]}

        # A third one joins: its objects are let go of by the others, daemons and timers first.
        c = start("c", DURATION_S="4")
        await until(lambda: at_rest(client, "a", "b", "c"), "the third has its part")

        async def taken_up() -> bool:
            now = await owners(client)
            latest = doings(operators, "timer")
            return all(times[-1][1] == now[name] for name, times in latest.items())

        await until(taken_up, "the timers of all objects are with their instances")
        owned = await owners(client)
        assert set(owned.values()) == {"a", "b", "c"}
        alive = doings(operators, "daemon", "daemon lives", "timer")
        for name, times in alive.items():
            if owned[name] == "c":
                began = min(at for at, instance in times if instance == "c")
                assert began > max(at for at, instance in times if instance != "c"), name
        # A move is no change of the object.
        assert not doings(operators, "update")

        # One leaves in good order: its daemons end before its Lease is given back.
        b.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(b.process.wait, 60) == 0, b.said()[-3000:]
        await until(lambda: at_rest(client, "a", "c"), "the objects of one that left", 60)

        # One is frozen, and loses its Lease: when it goes on it ends, and writes nothing.
        c.process.send_signal(signal.SIGSTOP)
        await until(lambda: at_rest(client, "a"), "the objects of one that was frozen", 120)
        c.process.send_signal(signal.SIGCONT)
        assert await asyncio.to_thread(c.process.wait, 60) == 1, c.said()[-3000:]
        assert "its Lease" in c.said()
        a.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(a.process.wait, 60) == 0, a.said()[-3000:]
        assert sharder.stop() == 0
    verdict = judge_audit(server.audited(), ("a", "b", "c"))
    assert not verdict.wrong, verdict.wrong[:10]
    assert verdict.let_go
    assert verdict.acts > OBJECTS


@pytest.mark.scenario("KR-12", partial=True)
def test_an_operator_that_blocks_its_loop_ends_with_its_lease(
    server: ApiServer, tmp_path: Path
) -> None:
    program = tmp_path / "blocking.py"
    program.write_text(
        "import asyncio, kopf, time\n"
        "from domicile.kube.kopf import ring\n"
        "ring('websites', duration_s=3)\n"
        "@kopf.on.startup()\n"
        "async def start(**_):\n"
        "    asyncio.get_running_loop().call_later(1.0, time.sleep, 600.0)\n"
    )
    one = Operator(server, tmp_path, "d", PROGRAM=str(program))
    try:
        assert one.process.wait(120) == 1
        assert "past the end of its Lease" in one.said()
    finally:
        one.end()


def test_a_plain_daemon_of_kopf_is_refused(server: ApiServer, tmp_path: Path) -> None:
    program = tmp_path / "plain.py"
    program.write_text(
        "import kopf\n"
        "from domicile.kube.kopf import ring\n"
        "ring('websites')\n"
        "@kopf.timer('example.com', 'v1', 'websites', interval=1)\n"
        "async def tick(**_): pass\n"
    )
    one = Operator(server, tmp_path, "e", PROGRAM=str(program))
    try:
        assert one.process.wait(60) == 1
        assert "ring('websites').daemon or .timer" in one.said()
    finally:
        one.end()
