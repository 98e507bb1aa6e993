"""How busy nodes are: what they answer to a tool, and how `status` shows it at every width."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cluster_lab import A, healthy
from rich.console import Console
from typer.testing import CliRunner

from domicile import Entity, Node, Settings, handler
from domicile.backends.memory import MEMORY
from domicile.backends.wiring import dialler
from domicile.core.state.records import NodeRecord
from domicile.ops import figures
from domicile.ops.cli import app
from domicile.ops.figures import FiguresReader
from domicile.ops.show import status_view
from domicile.ops.status import ClusterStatus, NodeSeen, RoleSeen

STORE = "memory://figures"
TOKEN = "a token that is long enough to be one"


class Desk(Entity, name="figures-desk"):
    @handler
    async def call(self) -> None:
        return None


@pytest.fixture(autouse=True)
def short_and_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DOMICILE_STORE", "DOMICILE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(figures, "RATE_S", 0.05)
    MEMORY.forget(STORE, "domicile")


def seen(node: Node) -> NodeSeen:
    """A node as the store shows it."""
    assert node.life is not None
    record = node.life.member.record
    assert isinstance(record, NodeRecord)
    return NodeSeen(
        record.node, record.incarnation, record.address, "up", True, True, False, "",
        record.roles, record.types, 8, 0, None,
    )  # fmt: skip


def reader(token: str = "", cluster: str = "domicile") -> FiguresReader:
    settings = Settings()
    return FiguresReader(dialler(STORE, cluster="domicile", settings=settings), cluster, token)


def ran(work: Callable[[Node], Awaitable[None]], token: str | None = None) -> None:
    async def main() -> None:
        settings = Settings(shards=8, ttl_s=30)
        async with Node(STORE, entities=[Desk], settings=settings, token=token) as node:
            await work(node)

    asyncio.run(main())


def test_a_node_says_how_busy_it_is() -> None:
    async def work(node: Node) -> None:
        for number in range(5):
            await node.ref(Desk, f"d{number}").ask(Desk.call)
        asked, over = 0, asyncio.Event()

        async def load() -> None:
            nonlocal asked
            while not over.is_set():
                await node.ref(Desk, "d1").ask(Desk.call)
                asked += 1
                await asyncio.sleep(0)

        loading = asyncio.create_task(load())
        (now,) = await reader().add_to([seen(node)])
        over.set()
        await loading
        assert now.unanswered == ""
        assert now.residents == 5
        assert now.turns_per_s is not None
        assert now.turns_per_s > 0
        assert now.loop_lag_s is not None
        assert now.lease_left_s is not None
        assert 0 < now.lease_left_s <= 30
        assert now.queued is not None
        assert now.open_asks is not None

    ran(work)


def test_a_look_leaves_nothing_at_the_node() -> None:
    """A link would hold up a node that leaves (H14): it waits for each peer to say goodbye."""

    async def work(node: Node) -> None:
        await reader().add_to([seen(node)])
        assert node.life is not None
        assert node.life.links is not None
        assert node.life.links.incoming == ()

    ran(work)


@pytest.mark.parametrize(
    ("tool", "cluster", "words"),
    [
        ("", "domicile", "has a token"),
        ("another token that is long enough", "domicile", "has a token"),
        (TOKEN, "other", "this is cluster 'domicile'"),
    ],
)
def test_who_does_not_belong_to_the_cluster_learns_nothing(
    tool: str, cluster: str, words: str
) -> None:
    async def work(node: Node) -> None:
        (now,) = await reader(tool, cluster).add_to([seen(node)])
        assert words in now.unanswered
        assert now.residents is None

    ran(work, TOKEN)


def test_the_token_is_enough() -> None:
    async def work(node: Node) -> None:
        (now,) = await reader(TOKEN).add_to([seen(node)])
        assert (now.unanswered, now.residents) == ("", 0)

    ran(work, TOKEN)


def test_another_incarnation_at_the_address_is_not_taken_for_the_node() -> None:
    async def work(node: Node) -> None:
        (now,) = await reader().add_to([replace(seen(node), incarnation=A)])
        assert "this is incarnation" in now.unanswered

    ran(work)


def test_a_process_that_hangs_costs_one_bounded_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "ANSWER_S", 0.05)

    async def main() -> None:
        kept: list[object] = []
        server = await asyncio.start_server(lambda *pair: kept.append(pair), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        make = dialler("sqlite:///x.db", cluster="domicile", settings=Settings())
        node = NodeSeen(
            "n", A, f"127.0.0.1:{port}", "up", True, True, False, "", (), (), 0, 0, None
        )
        asked = FiguresReader(make, "domicile", "")
        (now,) = await asked.add_to([node])
        assert now.unanswered == "no answer"
        (dead,) = await asked.add_to([replace(node, status="dead")])
        assert dead.unanswered == "", "nobody asks the dead"
        server.close()

    asyncio.run(main())


def test_status_asks_and_with_store_only_does_not(tmp_path: Path) -> None:
    url = healthy().write(tmp_path / "s.db")
    asked = CliRunner().invoke(app, ["status", url, "--json"])
    assert [one["unanswered"] for one in json.loads(asked.stdout)["nodes"]] == ["no answer"] * 2
    shown = CliRunner().invoke(app, ["status", url])
    assert "no figures of node-a, node-b: no answer" in shown.stdout
    assert shown.exit_code == 0
    quiet = CliRunner().invoke(app, ["status", url, "--store-only"])
    assert "figures" not in quiet.stdout
    assert quiet.exit_code == 0


# how it looks


def cluster(names: list[str]) -> ClusterStatus:
    node = NodeSeen(
        names[0], A, "127.0.0.1:40123", "up", True, True, False, "1.0", ("default",), ("t",),
        86, 0, 3600.0, 12_345, 2310.4, 3, 1, 0.0004, 7.31,
    )  # fmt: skip
    other = replace(node, node=names[1], coordinator=False, status="draining", moving=3)
    return ClusterStatus(
        "sqlite:///dev.db", "domicile", 9, True, names[0], [node, other],
        roles=[RoleSeen("default", 256, 256)],
    )  # fmt: skip


def drawn(status: ClusterStatus, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, highlight=False).print(status_view(status))
    return file.getvalue().splitlines()


SHORT, USUAL = ["node-1", "node-2"], ["myhost-12345-ab12", "myhost-12346-cd34"]
ALWAYS = ["shards", "residents", "turns/s", "lag", "lease"]


@pytest.mark.parametrize("names", [SHORT, USUAL])
@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_no_line_is_broken_and_the_useful_columns_are_there(names: list[str], width: int) -> None:
    lines = drawn(cluster(names), width)
    assert max(map(len, lines)) <= width
    head = next(line for line in lines if line.startswith(" node")).split()
    assert [name for name in head if name in ALWAYS] == ALWAYS
    rows = [line.split() for line in lines if line.split()[:1] in ([names[0]], [names[1]])]
    assert len(rows) == 2, "one line for a node"
    for row in rows:
        assert ("127.0.0.1:40123" in row) == ("address" in head)
        assert "12,345" in row
        assert "2,310" in row
    assert any("coordinator" in line for line in lines), "as a column or as a line of its own"


def test_a_wide_terminal_shows_more() -> None:
    heads = {
        width: next(line for line in drawn(cluster(SHORT), width) if line.startswith(" node"))
        for width in (80, 120, 160)
    }
    assert "address" in heads[80]
    assert "version" in heads[120]
    assert "queued" in heads[160]
    assert "age" in heads[160]


def test_a_name_that_fits_nowhere_is_folded_and_the_status_stays() -> None:
    lines = drawn(cluster(["n" * 70, "m" * 70]), 60)
    assert max(map(len, lines)) <= 60
    assert any("draining" in line for line in lines)
