"""The network and the disk of a cluster of real processes, as its harness sees them.

`Surroundings` starts the process that holds them and sends it orders. Used by
`domicile.testing.processes.cluster`. Orders block until they are done: a few milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from domicile.testing.processes.environment_process import Done, Layout, Order, Ready
from domicile.testing.processes.fault_proxy import CLIENT, STORE, Rule, Way
from domicile.testing.processes.member_process import Place
from domicile.testing.processes.node_process import HarnessError

Network = Literal["auto", "namespaces", "loopback"]

START_S = 30.0
ORDER_S = 10.0
CLOSE_S = 5.0
SUBNETS = 512
"""Number of networks of 256 addresses for tests: 198.18.0.0/15 is reserved for them."""

_RUN = "from domicile.testing.processes.environment_process import main; main()"
_DONE = msgspec.json.Decoder(Done)
_READY = msgspec.json.Decoder(Ready)


def claim(names: Iterable[str]) -> tuple[str, socket.socket]:
    """The first of these names that is free on this machine, and the socket that holds it from now
    on.

    An abstract socket is closed with its process, however that ends. Linux only.
    """
    for name in names:
        held = socket.socket(socket.AF_UNIX)
        try:
            held.bind(f"\0domicile-{name}")
        except OSError as error:
            held.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return name, held
    raise HarnessError("no network for the cluster: other clusters on this machine have them all")


def _subnets() -> list[str]:
    numbers = secrets.SystemRandom().sample(range(SUBNETS), SUBNETS)
    return [f"198.{18 + number // 256}.{number % 256}" for number in numbers]


@dataclass(frozen=True, slots=True)
class StoreHost:
    """A host of its own for the server of a store, in the network of a cluster."""

    enter: tuple[str, ...]
    """What to write before a command so that it runs there."""
    port: int
    """The port of 127.0.0.1 at which the server has to listen, in there."""
    address: str
    """`host:port` by which everyone reaches it."""


class Surroundings:
    """A running network, and the current rules of its paths."""

    def __init__(
        self,
        directory: Path,
        nodes: int,
        *,
        network: Network = "auto",
        disk_bytes: int = 0,
        seed: int = 0,
        store: bool = False,
    ) -> None:
        self._directory, self._nodes, self._seed = directory, nodes, seed
        self._disk_bytes = disk_bytes
        # Loopback addresses do not tell a server of a store which node asks it.
        self._wanted: Network = "namespaces" if store and network == "auto" else network
        self._has_store = store
        self._process: subprocess.Popen[bytes] | None = None
        self._held: socket.socket | None = None
        self.kind = ""
        """`namespaces` or `loopback`."""
        self.places: list[Place] = []
        self.store: StoreHost | None = None
        """Where the server of the store is to run; None if it has no host here."""
        self.disk: Path | None = None
        """The path of the small disk; None if there is none."""
        self.rules: dict[Way, Rule] = {}
        self.losses = 0
        """How many pieces of a stream met a loss, as of the last order."""

    def start(self) -> None:
        """Start it. Blocks until it is ready; `HarnessError` if it cannot start."""
        root = sys.platform == "linux" and os.geteuid() == 0
        if self._wanted == "loopback" or (self._wanted == "auto" and not root):
            error = self._try(namespaces=False)
        else:
            error = self._try(namespaces=True)
            if error and self._wanted == "auto":
                error = self._try(namespaces=False)
        if error:
            raise HarnessError(f"no network for the cluster: {error}")

    def _try(self, *, namespaces: bool) -> str:
        if namespaces:
            subnet, self._held = claim(_subnets())
        else:
            subnet = f"127.{1 + secrets.randbelow(250)}.{secrets.randbelow(250)}"
        small = namespaces and self._disk_bytes
        layout = Layout(
            self._nodes, namespaces, subnet, self._seed,
            str(self._directory / "disk") if small else "", self._disk_bytes, self._has_store,
        )  # fmt: skip
        path = [entry or str(Path.cwd()) for entry in sys.path]
        with (self._directory / "surroundings.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _RUN, msgspec.json.encode(layout).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            )
        ready = _READY.decode(self._line(START_S))
        if ready.error:
            self.close()
            return ready.error
        self.kind = "namespaces" if namespaces else "loopback"
        self.places = ready.places
        if (place := ready.store) is not None:
            enter = ("nsenter", f"--net={place.namespace}", "--")
            port = int(place.listen.rpartition(":")[2])
            self.store = StoreHost(enter, port, place.advertise)
        self.disk = Path(ready.disk) if ready.disk else None
        return ""

    def set(self, changed: dict[Way, Rule]) -> None:
        """Change the rules of some paths; returns once they hold."""
        self.rules.update(changed)
        listed = [(*way, rule) for way, rule in self.rules.items() if rule != Rule()]
        self._order(Order(rules=listed))

    def heal(self) -> None:
        """Open all paths."""
        self.rules.clear()
        self._order(Order(rules=[]))

    def break_off(self, one: int, other: int) -> int:
        """Cut the connections between two nodes; returns how many there were."""
        return self._order(Order(broken=(one, other))).connections

    def everyone(self) -> range:
        """All ends of paths: the nodes, the client, and the store if it has a host."""
        return range(CLIENT if self.store is None else STORE, self._nodes)

    def close(self) -> None:
        """End it, and remove everything that it holds."""
        process, self._process = self._process, None
        if process is None:
            return
        # The end of its input tells it to remove everything.
        with contextlib.suppress(BrokenPipeError):
            if process.stdin is not None:
                process.stdin.close()
        try:
            process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        if self._held is not None:
            self._held.close()
            self._held = None

    def _order(self, order: Order) -> Done:
        process = self._process
        if process is None or process.stdin is None:
            raise HarnessError("the network of this cluster is gone")
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        process.stdin.flush()
        done = _DONE.decode(self._line(ORDER_S))
        if done.error:
            raise HarnessError(f"the network could not be changed: {done.error}")
        self.losses = done.losses
        return done

    def _line(self, limit_s: float) -> bytes:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        # Each order has one answer, so nothing is ever left in the pipe's own buffer.
        ready, _, _ = select.select([process.stdout], [], [], limit_s)
        line = process.stdout.readline() if ready else b""
        if not line:
            self.close()
            raise HarnessError(f"the network process did not answer within {limit_s:g} s")
        return line
