"""What a program sees that calls `logging.basicConfig()` and nothing else: the messages alone."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Iterator

import pytest

from domicile import Entity, HandlerFailed, Node, Settings, handler
from domicile.backends.memory import MEMORY
from domicile.taglog import TaggedLog, place_in

STORE = "memory://taglog"


class Shaky(Entity, name="taglog-shaky"):
    @handler
    async def fail(self) -> None:
        raise RuntimeError("no")


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What the default format of `basicConfig` writes, from `DEBUG` on."""
    stream, log = io.StringIO(), logging.getLogger("domicile")
    plain, level = logging.StreamHandler(stream), log.level
    plain.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    log.addHandler(plain)
    log.setLevel(logging.DEBUG)
    MEMORY.forget(STORE, "domicile")
    yield stream
    log.removeHandler(plain)
    log.setLevel(level)


def run_a_node() -> None:
    async def main() -> None:
        async with Node(
            STORE, entities=[Shaky], node_id="node-1", settings=Settings(shards=8)
        ) as node:
            with pytest.raises(HandlerFailed):
                await node.ref(Shaky, "s1").ask(Shaky.fail)

    asyncio.run(main())


def test_every_line_says_which_node_and_shard_it_is_about(lines: io.StringIO) -> None:
    run_a_node()
    told = lines.getvalue().splitlines()
    assert "INFO:domicile:node-1: joined the cluster domicile" in told
    failed = next(line for line in told if "fail failed on" in line)
    assert failed.startswith("WARNING:domicile:node-1 default/")
    assert "@1: fail failed on taglog-shaky 's1'" in failed
    phases = [line for line in told if line.startswith("DEBUG") and line.endswith("open now")]
    assert len(phases) == 8
    assert all(line.startswith("DEBUG:domicile:node-1 default/") for line in phases)


def test_shards_are_summed_up_in_one_line(lines: io.StringIO) -> None:
    run_a_node()
    about = [line for line in lines.getvalue().splitlines() if line.startswith("INFO")]
    opened = sum(
        int(word)
        for line in about
        for before, word in zip(line.split(), line.split()[1:], strict=False)
        if before == "opened"
    )
    assert opened == 8
    assert sum("opened" in line for line in about) < 8, "one line for all, or one for each second"


def test_a_place_with_a_percent_sign_spoils_no_message(lines: io.StringIO) -> None:
    TaggedLog().warning("%d of %d", 1, 2, extra={"node": "50%s"})
    assert lines.getvalue() == "WARNING:domicile:50%s: 1 of 2\n"


@pytest.mark.parametrize(
    ("tags", "place"),
    [
        ({}, ""),
        ({"node": "n"}, "n"),
        ({"node": "n", "shard": "r/0", "epoch": 0}, "n r/0@0"),
        ({"shard": "r/0"}, "r/0"),
        ({"epoch": 3}, ""),
    ],
)
def test_a_place_is_what_is_known_of_it(tags: dict[str, object], place: str) -> None:
    assert place_in(tags) == place
