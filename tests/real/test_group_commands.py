"""The commands that serve clients of a replica group, as processes (FO-17)."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from groups_lab import CHAIN, server, serving, values, write
from proxy_lab import LineServer

STARTED_S = 60.0


def start(url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "domicile", "replica", "proxy", "orders", url,
         "--http", "127.0.0.1:0", "--wait", "60"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def logged(process: subprocess.Popen[str], pattern: str) -> str:
    """What the group of a pattern matches in the process's log."""
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if match := re.search(pattern, line):
            return match[1]
    raise AssertionError(seen)


@pytest.mark.scenario("FO-17")
def test_a_proxy_in_a_process_of_its_own_leads_to_the_primary(tmp_path: Path) -> None:
    path = tmp_path / "s.db"

    async def main() -> None:
        s1, s2 = LineServer("s1"), LineServer("s2")
        for one in (s1, s2):
            await one.start()
        records = [
            server(one.name, role="primary", follows="", address=one.address, chain=CHAIN[:2])
            for one in (s1, s2)
        ]
        url = await asyncio.to_thread(write, path, values(serving("s1", 1), *records))
        process = await asyncio.to_thread(start, url)
        try:
            address = await asyncio.to_thread(logged, process, r"listens at (\S+)")
            pages = await asyncio.to_thread(logged, process, r"at (http://\S+)/primary")
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"one\n")
            assert await reader.readline() == b"s1 one\n"
            with await asyncio.to_thread(urllib.request.urlopen, f"{pages}/primary") as answer:
                assert answer.read().decode() == f"{s1.address}\n"
            await asyncio.to_thread(write, path, values(serving("s2", 2)))
            assert await reader.read() == b""
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"two\n")
            assert await reader.readline() == b"s2 two\n"
            writer.close()
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, STARTED_S) == 0
        finally:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()
            for one in (s1, s2):
                await one.close()
        assert (s1.lines, s2.lines) == (["one"], ["two"])

    async def bounded() -> None:
        async with asyncio.timeout(STARTED_S * 2):
            await main()

    asyncio.run(bounded())


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("proxy", "orders", "sqlite:///none.db"), 3, "none.db"),
        (("proxy", "orders", "sqlite:///s.db", "--listen", "nonsense"), 2, "host:port"),
        (("answer", "orders", "sqlite:///s.db", "--http", "nonsense"), 2, "host:port"),
        (("answer", "orders"), 2, "say which store"),
    ],
)
def test_what_cannot_be_served_is_told(
    tmp_path: Path, words: tuple[str, ...], code: int, says: str
) -> None:
    write(tmp_path / "s.db", values(serving()))
    ran = subprocess.run(
        [sys.executable, "-m", "domicile", "replica", *words],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == code
    assert says in ran.stderr
    # One line, and nothing of the interpreter's about what was never awaited.
    assert len(ran.stderr.splitlines()) == 1


def test_a_group_that_is_not_there_is_told_and_waited_for(tmp_path: Path) -> None:
    """A wrong name would look like a group that never has a primary."""
    write(tmp_path / "s.db", {**values(serving()), **values(serving(), group="bills")})
    with subprocess.Popen(
        [sys.executable, "-m", "domicile", "replica", "proxy", "order", "sqlite:///s.db"],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        assert running.stderr is not None
        late = threading.Timer(STARTED_S, running.kill)
        late.start()
        lines = [running.stderr.readline() for _ in range(2)]
        running.terminate()
        assert running.wait(STARTED_S) == 0
        late.cancel()
    told = "there is no group 'order' in this store and cluster; groups there: bills, orders"
    assert any(told in line for line in lines), lines
