"""The peers of the failover benchmark: Valkey Sentinel, and Patroni on etcd.

Each machine has a proxy before its server; Patroni's have one before etcd, too. A Sentinel of a
machine that is cut stands still: it could reach nobody. Patroni raises a ttl below 20 s, and a
`loop_wait` below 1 s, by itself, so "tuned" is as fast as it lets itself be set.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import asyncpg

from domicile.testing.suites.byte_proxy import ByteProxy
from proving.benchmarks import environments
from proving.benchmarks.failover_clients import FAILURES, Connect, postgres, valkey
from proving.benchmarks.failover_groups import (
    SERVERS,
    WHOLE_S,
    Unable,
    as_nobody,
    own,
    postgres_keys,
    postgres_programs,
    valkey_keys,
    valkey_program,
)
from proving.benchmarks.kept import CACHE
from proving.etcd_server import EtcdServer, free_ports
from proving.freezing import freeze
from proving.postgres_server import family, may_enter

DEFAULT_DOWN_MS = 30_000
"""What Sentinel has without a setting: it is left out then."""


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


# Sentinel


class SentinelGroup:
    """Implements `Contender`: three servers, and a Sentinel beside each."""

    def __init__(self, down_ms: int) -> None:
        self._down_ms = down_ms
        self.connect: Connect = valkey
        self._home = Path(tempfile.mkdtemp(prefix="domicile-sentinel-"))
        self._data = free_ports(SERVERS)
        self._watch = free_ports(SERVERS)
        self._fronts: list[ByteProxy] = []
        self.ports: Sequence[int] = ()
        self._servers: dict[int, subprocess.Popen[bytes]] = {}
        self._sentinels: dict[int, subprocess.Popen[bytes]] = {}
        self._frozen: list[int] = []

    async def start(self) -> None:
        """As `Contender.start`."""
        self._fronts = [ByteProxy("127.0.0.1", port).start() for port in self._data]
        self.ports = [front.port for front in self._fronts]
        for number in range(SERVERS):
            self._serve(number)
        for number in range(SERVERS):
            folder = own(self._home / f"sentinel-{number}")
            text = (
                f"port {self._watch[number]}\nbind 127.0.0.1\ndir {folder}\nlogfile {folder}/log\n"
                f"sentinel monitor m 127.0.0.1 {self.ports[0]} 2\n"
            )
            if self._down_ms != DEFAULT_DOWN_MS:
                text += f"sentinel down-after-milliseconds m {self._down_ms}\n"
            (folder / "sentinel.conf").write_text(text, encoding="ascii")
            self._watch_over(number)

    def _serve(self, number: int) -> None:
        folder = own(self._home / f"server-{number}")
        command = [
            str(valkey_program()), "--port", str(self._data[number]), "--bind", "127.0.0.1",
            "--dir", str(folder), "--save", "", "--repl-diskless-sync-delay", "0",
            "--logfile", str(folder / "log"), "--replica-announce-ip", "127.0.0.1",
            "--replica-announce-port", str(self.ports[number]),
        ]  # fmt: skip
        if number:
            command += ["--replicaof", "127.0.0.1", str(self.ports[0])]
        self._servers[number] = subprocess.Popen(command)

    def _watch_over(self, number: int) -> None:
        file = self._home / f"sentinel-{number}" / "sentinel.conf"
        self._sentinels[number] = subprocess.Popen([str(valkey_program()), str(file), "--sentinel"])

    async def whole(self) -> int:
        """As `Contender.whole`."""
        until = monotonic() + WHOLE_S
        while monotonic() < until:
            with suppress(*FAILURES, ValueError, KeyError):
                found = await self._level()
                if found is not None:
                    return found
            await asyncio.sleep(0.1)
        raise Unable(f"the servers of Sentinel were not whole within {WHOLE_S:g} s")

    async def _level(self) -> int | None:
        ports: list[int] = []
        for watch in self._watch:
            told = await _ask(watch, "SENTINEL", "MASTER", "m")
            facts = dict(zip(told[::2], told[1::2], strict=True))
            if (facts["num-other-sentinels"], facts["num-slaves"], facts["flags"]) != (
                str(SERVERS - 1), str(SERVERS - 1), "master",
            ):  # fmt: skip
                return None
            ports.append(int(facts["port"]))
        if len(dict.fromkeys(ports)) != 1:
            return None
        said = await _ask(ports[0], "ROLE")
        if said[0] != "master" or len(said[2]) != SERVERS - 1:
            return None
        for port in self.ports:
            if port != ports[0]:
                role = await _ask(port, "ROLE")
                if role[0] != "slave" or int(role[2]) != ports[0] or role[3] != "connected":
                    return None
        return list(self.ports).index(ports[0])

    async def strike(self, loss: str, server: int) -> None:
        """As `Contender.strike`."""
        process, sentinel = self._servers[server], self._sentinels[server]
        match loss:
            case "server" | "machine":
                process.kill()
                if loss == "machine":
                    sentinel.kill()
                await asyncio.to_thread(process.wait)
            case "frozen":
                self._frozen = [process.pid, sentinel.pid]
                await asyncio.to_thread(freeze, *self._frozen)
            case "cut":
                self._fronts[server].hold_at_once()
                self._frozen = [sentinel.pid]
                await asyncio.to_thread(freeze, *self._frozen)
            case _:
                said = await _ask(self._watch[0], "SENTINEL", "FAILOVER", "m", "COORDINATED")
                if said != "OK":
                    raise Unable(f"Sentinel refuses a coordinated failover: {said}")

    async def heal(self, server: int) -> None:
        """As `Contender.heal`."""
        _signal(self._frozen, signal.SIGCONT)
        self._frozen = []
        await self._fronts[server].release()
        if self._servers[server].poll() is not None:
            self._serve(server)
        if self._sentinels[server].poll() is not None:
            self._watch_over(server)

    async def keys(self, server: int) -> set[str]:
        """As `Contender.keys`."""
        return await valkey_keys(self.ports[server])

    async def stop(self) -> None:
        """As `Contender.stop`."""
        for process in (*self._servers.values(), *self._sentinels.values()):
            process.kill()
            await asyncio.to_thread(process.wait)
        for front in self._fronts:
            await front.close()
        shutil.rmtree(self._home, ignore_errors=True)


async def _ask(port: int, *words: str) -> Any:
    session = await valkey(port)
    try:
        async with asyncio.timeout(5.0):
            return await session.ask(*words)
    finally:
        session.close()


# Patroni

PATRONI = environments.Peer("patroni", "", {}, "patroni", wheels=False)
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"ttl": 30, "loop_wait": 10, "retry_timeout": 10},
    "tuned": {"ttl": 20, "loop_wait": 1, "retry_timeout": 3},
    "sync": {"ttl": 20, "loop_wait": 1, "retry_timeout": 3, "synchronous_mode": True},
}


def _python() -> tuple[str, str]:
    """An interpreter that the servers' user may run."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    places = [sys.executable, f"/usr/bin/python{version}", "/usr/bin/python3"]
    for place in places:
        real = Path(place).resolve()
        if real.exists() and (os.getuid() or may_enter(real)):
            found = environments.version_of(place)
            if found >= PATRONI.oldest:
                return place, f"{found[0]}.{found[1]}"
    raise Unable("Patroni needs a Python that an ordinary user may run")


class PatroniCluster:
    """Implements `Contender`: three servers with their Patroni, on one etcd server."""

    def __init__(self, settings: str) -> None:
        self._settings = SETTINGS[settings]
        self._sync = bool(self._settings.get("synchronous_mode"))
        self.connect: Connect = postgres
        self._bin = postgres_programs()
        try:
            made = environments.environment(PATRONI, CACHE / "environments", _python())
        except environments.Missing as error:
            raise Unable(str(error)) from error
        self._program = Path(made.python).with_name("patroni")
        self._home = own(Path(tempfile.mkdtemp(prefix="domicile-patroni-")))
        self._etcd = EtcdServer(hasty=False)
        self._data, self._rest = free_ports(SERVERS), free_ports(SERVERS)
        self._fronts: list[ByteProxy] = []
        self._stores: list[ByteProxy] = []
        self.ports: Sequence[int] = ()
        self._runs: dict[int, subprocess.Popen[bytes]] = {}
        self._frozen: list[int] = []
        self._prepared = False

    async def start(self) -> None:
        """As `Contender.start`."""
        await asyncio.to_thread(self._etcd.start)
        self._fronts = [ByteProxy("127.0.0.1", port).start() for port in self._data]
        self._stores = [ByteProxy("127.0.0.1", self._etcd.port).start() for _ in self._data]
        self.ports = [front.port for front in self._fronts]
        for number in range(SERVERS):
            folder = own(self._home / f"n{number}")
            text = json.dumps(self._configuration(number, folder))
            (folder / "patroni.json").write_text(text, encoding="utf-8")
            self._launch(number)

    def _configuration(self, number: int, folder: Path) -> dict[str, Any]:
        rest = f"127.0.0.1:{self._rest[number]}"
        return {
            "scope": "bench", "name": f"n{number}",
            "restapi": {"listen": rest, "connect_address": rest},
            "etcd3": {"hosts": f"127.0.0.1:{self._stores[number].port}"},
            "bootstrap": {
                "dcs": {
                    **self._settings, "maximum_lag_on_failover": 1_048_576,
                    "postgresql": {"use_pg_rewind": True, "parameters": {
                        "wal_log_hints": "on", "max_connections": 60, "shared_buffers": "32MB",
                        "wal_keep_size": "256MB",
                    }},
                },
                "initdb": [{"encoding": "UTF8"}, {"auth": "trust"}, "no-locale"],
            },
            "postgresql": {
                "listen": f"127.0.0.1:{self._data[number]}",
                "connect_address": f"127.0.0.1:{self.ports[number]}",
                "data_dir": str(folder / "data"), "bin_dir": str(self._bin),
                "pgpass": str(folder / "pgpass"),
                "parameters": {"unix_socket_directories": str(folder)},
                "pg_hba": [
                    "local all all trust", "host all all 127.0.0.1/32 trust",
                    "host replication all 127.0.0.1/32 trust",
                ],
                "authentication": {
                    "superuser": {"username": "postgres", "password": "x"},
                    "replication": {"username": "rep", "password": "x"},
                    "rewind": {"username": "rewind", "password": "x"},
                },
            },
        }  # fmt: skip

    def _launch(self, number: int) -> None:
        folder = self._home / f"n{number}"
        with (folder / "log").open("ab") as out:
            self._runs[number] = subprocess.Popen(
                [*as_nobody(), str(self._program), str(folder / "patroni.json")],
                stdout=out, stderr=out, cwd="/", start_new_session=True,
                env={"PATH": os.environ["PATH"], "HOME": str(self._home), "LC_ALL": "C.UTF-8"},
            )  # fmt: skip

    async def whole(self) -> int:
        """As `Contender.whole`."""
        until = monotonic() + WHOLE_S
        while monotonic() < until:
            with suppress(*FAILURES, ValueError, KeyError, urllib.error.URLError):
                found = await self._level()
                if found is not None:
                    return found
            await asyncio.sleep(0.2)
        log = (self._home / "n0" / "log").read_text(encoding="utf-8")[-1_500:]
        raise Unable(f"the servers of Patroni were not whole within {WHOLE_S:g} s: {log}")

    async def _level(self) -> int | None:
        told = [await asyncio.to_thread(_get, port, "/cluster") for port in self._rest]
        members = told[0]["members"]
        leaders = [one["name"] for one in members if one["role"] == "leader"]
        lines = [one.get("timeline") for one in members]
        if (
            len(members) != SERVERS
            or len(leaders) != 1
            or any(one["state"] not in ("running", "streaming") for one in members)
            or len(dict.fromkeys(lines)) != 1
        ):
            return None
        if self._sync and not any(one["role"] == "sync_standby" for one in members):
            return None
        leader = int(leaders[0][1:])
        if not self._prepared:
            await self._prepare(leader)
        return leader

    async def _prepare(self, leader: int) -> None:
        connection = await asyncpg.connect(
            host="127.0.0.1", port=self.ports[leader], user="postgres", database="postgres",
            ssl=False,
        )  # fmt: skip
        try:
            await connection.execute(
                "CREATE ROLE app LOGIN; CREATE TABLE public.kept (value text); "
                "GRANT ALL ON public.kept TO app"
            )
        finally:
            await connection.close()
        self._prepared = True

    async def strike(self, loss: str, server: int) -> None:
        """As `Contender.strike`."""
        match loss:
            case "server":
                _signal(await asyncio.to_thread(self._postgres, server), signal.SIGKILL)
            case "machine":
                found = await asyncio.to_thread(self._all, server)
                _signal(found, signal.SIGKILL)
                await asyncio.to_thread(self._runs[server].wait)
            case "frozen":
                self._frozen = await asyncio.to_thread(self._all, server)
                await asyncio.to_thread(freeze, *self._frozen)
            case "cut":
                self._stores[server].hold_at_once()
                self._fronts[server].hold_at_once()
            case _:
                to = next(number for number in range(SERVERS) if number != server)
                if self._sync:
                    to = await self._standby()
                body = {"leader": f"n{server}", "candidate": f"n{to}"}
                await asyncio.to_thread(_post, self._rest[server], "/switchover", body)

    async def _standby(self) -> int:
        told = await asyncio.to_thread(_get, self._rest[0], "/cluster")
        names = [one["name"] for one in told["members"] if one["role"] == "sync_standby"]
        return int(names[0][1:])

    def _postgres(self, number: int) -> list[int]:
        """The server's processes: its main one leaves Patroni's family."""
        file = self._home / f"n{number}" / "data" / "postmaster.pid"
        try:
            return family(int(file.read_text(encoding="ascii").split()[0]))
        except (FileNotFoundError, ValueError):
            return []

    def _all(self, number: int) -> list[int]:
        return list(dict.fromkeys([*family(self._runs[number].pid), *self._postgres(number)]))

    async def heal(self, server: int) -> None:
        """As `Contender.heal`."""
        _signal(self._frozen, signal.SIGCONT)
        self._frozen = []
        await self._fronts[server].release()
        await self._stores[server].release()
        if self._runs[server].poll() is not None:
            self._launch(server)

    async def keys(self, server: int) -> set[str]:
        """As `Contender.keys`."""
        return await postgres_keys(self.ports[server])

    async def stop(self) -> None:
        """As `Contender.stop`."""
        for number, process in self._runs.items():
            found = await asyncio.to_thread(self._all, number)
            _signal(found, signal.SIGKILL)
            await asyncio.to_thread(process.wait)
        for proxy in (*self._fronts, *self._stores):
            await proxy.close()
        await asyncio.to_thread(self._etcd.stop)
        shutil.rmtree(self._home, ignore_errors=True)


def _get(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return json.load(answer)


def _post(port: int, path: str, body: dict[str, str]) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()
