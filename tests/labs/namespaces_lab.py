"""Machines of a replica group in network namespaces of their own, which can be parted. Needs root.

Each machine has two cables: one to a switch, where the others and the store are, and one to the
test, which is never cut: a client may reach a server that the others do not. A partition plugs the
first cables of some machines into a second switch.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from replica_lab import Machine

from proving.etcd_server import READY_S, NoEtcd, programs


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class SwitchedNetwork:
    """Some machines and an etcd server, on switches. `stop` removes all of it."""

    def __init__(self, count: int) -> None:
        if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
            pytest.skip("network namespaces need Linux, root and the program ip")
        try:
            self._etcd = programs() / "etcd"
        except NoEtcd as error:
            pytest.skip(str(error))
        self._count = count
        self._name = f"dom{secrets.token_hex(3)}"
        number = secrets.randbelow(250)
        self._inner, self._outer = f"198.18.{number}", f"198.19.{number}"
        self._spaces: list[str] = []
        self._home = Path(tempfile.mkdtemp(prefix="domicile-switch-"))
        self._process: subprocess.Popen[bytes] | None = None
        self.store = f"etcd://{self._outer}.{count + 1}:2379/replica"

    def start(self) -> None:
        try:
            self._lay()
            self._start_store()
        except BaseException:
            self.stop()
            raise

    def place(self, machines: list[Machine]) -> None:
        for machine in machines:
            machine.host = f"{self._outer}.{machine.number}"
            machine.inner = f"{self._inner}.{machine.number}"
            machine.within = self._within(machine.number)
            machine.own_store = f"etcd://{self._inner}.{self._count + 1}:2379/replica"

    def part(self, machines: Iterable[Machine]) -> None:
        """These reach each other alone; the others and the store, too."""
        for machine in machines:
            self._plug(machine.number, "away")

    def heal(self) -> None:
        for number in range(1, self._count + 1):
            self._plug(number, "main")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for space in reversed(self._spaces):
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", space)
        shutil.rmtree(self._home, ignore_errors=True)

    def _space(self, what: str) -> str:
        space = f"{self._name}-{what}"
        ip("netns", "add", space)
        self._spaces.append(space)
        ip("-n", space, "link", "set", "lo", "up")
        return space

    def _within(self, number: int) -> tuple[str, ...]:
        return ("ip", "netns", "exec", f"{self._name}-{number}")

    def _lay(self) -> None:
        hub = self._space("hub")
        for switch in ("main", "away", "test"):
            ip("-n", hub, "link", "add", switch, "type", "bridge")
            ip("-n", hub, "link", "set", switch, "up")
        for number in range(1, self._count + 2):
            space = self._space(str(number))
            for cable, switch, net in (
                ("in", "main", self._inner),
                ("out", "test", self._outer),
            ):
                ip(
                    "link", "add", f"{cable}{number}", "netns", hub, "type", "veth",
                    "peer", "name", cable, "netns", space,
                )  # fmt: skip
                ip("-n", hub, "link", "set", f"{cable}{number}", "master", switch, "up")
                ip("-n", space, "addr", "add", f"{net}.{number}/24", "dev", cable)
                ip("-n", space, "link", "set", cable, "up")
        ip("link", "add", self._name, "type", "veth", "peer", "name", "test0", "netns", hub)
        ip("-n", hub, "link", "set", "test0", "master", "test", "up")
        ip("addr", "add", f"{self._outer}.250/24", "dev", self._name)
        ip("link", "set", self._name, "up")

    def _plug(self, number: int, switch: str) -> None:
        ip("-n", f"{self._name}-hub", "link", "set", f"in{number}", "master", switch)

    def _start_store(self) -> None:
        number = self._count + 1
        with (self._home / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*self._within(number), self._etcd, "--data-dir", self._home / "data",
                 "--listen-client-urls", "http://0.0.0.0:2379",
                 "--advertise-client-urls", f"http://{self._inner}.{number}:2379",
                 "--heartbeat-interval", "10", "--election-timeout", "100", "--unsafe-no-fsync"],
                stdout=log, stderr=log,
            )  # fmt: skip
        until = time.monotonic() + READY_S
        while True:
            with suppress(OSError):
                urllib.request.urlopen(f"http://{self._outer}.{number}:2379/health", timeout=5)
                return
            assert self._process.poll() is None, (self._home / "log").read_text()
            assert time.monotonic() < until, "etcd did not get ready"
            time.sleep(0.05)
