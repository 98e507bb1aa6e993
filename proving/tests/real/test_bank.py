"""The bank on real processes, for a few seconds; what its probes see of them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from proving.bank.probe import Figures, figures_file, figures_of, figures_of_all
from proving.bank.round import RoundPlan, play
from proving.bank.strikes import write_lock_holder
from proving.postgres_server import NoPostgres, PostgresServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")

LENGTH_S = 20.0


def started_server() -> PostgresServer:
    try:
        server = PostgresServer()
    except NoPostgres as error:
        pytest.skip(str(error))
    server.start()
    return server


def played(directory: Path, server: PostgresServer | None) -> Counter[str]:
    plan = RoundPlan(1, 1, LENGTH_S, 3, directory, server)
    result = asyncio.run(play(plan, Counter(), asyncio.Event()))
    assert result.complaints == [], "\n".join(map(str, result.complaints))
    counts = result.counts
    for name in ("transfers", "refused", "reads", "repeats", "kills", "freezes", "batches"):
        assert counts[name] > 0, name
    return counts


@pytest.mark.scenario("DX-28", partial=True)
def test_a_bank_on_sqlite_loses_nothing(tmp_path: Path) -> None:
    played(tmp_path / "bank", None)


@pytest.mark.scenario("DX-28", partial=True)
def test_a_bank_on_postgresql_loses_nothing(tmp_path: Path) -> None:
    server = started_server()
    try:
        counts = played(tmp_path / "bank", server)
        assert counts["journal kills"] + counts["journal freezes"] > 0
    finally:
        server.stop()


def test_the_process_that_writes_to_a_sqlite_file_is_known(tmp_path: Path) -> None:
    file = tmp_path / "x.db"
    code = (
        "import apsw, sys; one = apsw.Connection(sys.argv[1]); one.pragma('journal_mode', 'wal'); "
        "one.execute('CREATE TABLE t (n)'); one.execute('BEGIN IMMEDIATE'); "
        "print('writes', flush=True); sys.stdin.readline(); one.execute('COMMIT'); "
        "print('rests', flush=True); sys.stdin.readline()"
    )
    assert write_lock_holder(file) is None
    with subprocess.Popen(
        [sys.executable, "-c", code, str(file)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "writes\n"
        assert write_lock_holder(file) == process.pid
        process.stdin.write("\n")
        assert process.stdout.readline() == "rests\n"
        assert write_lock_holder(file) is None
        process.stdin.write("\n")


def test_figures_stay_when_their_process_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from proving.bank.probe import *; "
        "mine = Figures(figures_file(Path(sys.argv[1]), os.getpid())); "
        "mine.add('in flight'); mine.add('batches', 3); os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).resolve().parents[3]
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=root) as process:
        assert process.wait() == -signal.SIGKILL
    assert figures_of(tmp_path, process.pid) == Counter({"in flight": 1, "batches": 3})
    again = Figures(figures_file(tmp_path, process.pid))
    again.begin()
    again.add("batches")
    assert figures_of_all(tmp_path)["batches"] == 4
    assert figures_of(tmp_path, process.pid)["in flight"] == 0
    assert figures_of(tmp_path, 0) == Counter()


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}/root").exists() for pid in pids)


def test_a_server_is_frozen_and_killed_as_a_whole() -> None:
    server = started_server()

    def states() -> str:
        texts = [Path(f"/proc/{pid}/stat").read_text(encoding="ascii") for pid in server.pids()]
        return "".join(text.rpartition(")")[2].split()[0] for text in texts)

    try:
        url = server.new_database()

        async def scenario() -> None:
            asyncpg = pytest.importorskip("asyncpg")
            connection = await asyncpg.connect(url)
            await connection.execute("CREATE TABLE t (n int); INSERT INTO t VALUES (7)")
            [session] = await asyncio.to_thread(server.sessions_of, os.getpid())
            assert session == await connection.fetchval("SELECT pg_backend_pid()")
            server.freeze()
            assert set(states()) <= {"T", "t"}
            server.thaw()
            assert await connection.fetchval("SELECT n FROM t") == 7
            before = server.pids()
            server.kill()
            assert not server.up
            assert gone(before)
            server.start()
            other = await asyncpg.connect(url)
            assert await other.fetchval("SELECT n FROM t") == 7
            await other.close()
            connection.terminate()

        asyncio.run(scenario())
    finally:
        server.stop()
    assert not server.home.exists()
