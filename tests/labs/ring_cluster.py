"""Instances and sharders of the ring `websites` as processes, on a real API server.

A frozen process is stopped by SIGSTOP, and goes on later. `ring_judge` judges what they did.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import ring_instance
from kube_lab import ApiServer, SharderProcess
from ring_instance import SITES
from ring_judge import SHARD

from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.kinds import CONFIG_MAPS, ApiKind
from domicile.kubeapi.objects import PartialObject
from domicile.ops.ring import look_at_ring

DURATION_S = 4


class Cluster:
    """Instances as processes, and which of them should be there."""

    def __init__(
        self,
        server: ApiServer,
        home: Path,
        stack: ExitStack,
        *,
        again_s: float = 3.0,
        controlled: bool = True,
    ) -> None:
        self._server, self._home, self._stack = server, home, stack
        self._environment = {**os.environ, "DOMICILE_RING_AGAIN_S": str(again_s)}
        self._more = ("controlled",) if controlled else ()
        self.acts = home / "acts.jsonl"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.frozen: dict[str, None] = {}
        self.sharders: dict[str, SharderProcess] = {}

    def join(self, name: str) -> None:
        command = [
            sys.executable, str(Path(ring_instance.__file__)),
            str(self._server.kubeconfig_of(name)), name, str(self.acts), str(DURATION_S),
            *self._more,
        ]  # fmt: skip
        log = self._stack.enter_context((self._home / f"{name}.log").open("ab"))
        process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment)
        self._stack.callback(end, process)
        self.processes[name] = process

    def leave(self, name: str) -> None:
        process = self.processes.pop(name)
        process.send_signal(signal.SIGTERM)
        # One that has just begun has nothing to leave yet.
        assert process.wait(60) in (0, -signal.SIGTERM), (self._home / f"{name}.log").read_text()[
            -3000:
        ]

    def kill(self, name: str) -> None:
        end(self.processes.pop(name))

    def freeze(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGSTOP)
        self.frozen[name] = None

    def thaw(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGCONT)
        del self.frozen[name]

    def sharder(self, name: str) -> None:
        self.sharders[name] = SharderProcess(self._server, self._home, name, user=name)
        self._stack.callback(end, self.sharders[name].process)

    def freeze_sharder(self, name: str) -> None:
        self.sharders[name].process.send_signal(signal.SIGSTOP)

    def thaw_sharder(self, name: str) -> None:
        self.sharders[name].process.send_signal(signal.SIGCONT)

    def kill_sharder(self, name: str) -> None:
        end(self.sharders.pop(name).process)


def end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    process.wait()


async def rests(client: KubeClient, cluster: Cluster, objects: int) -> bool:
    """Whether the ring is what it should be: each instance ready, each object with one of them."""
    for name, process in cluster.processes.items():
        assert process.poll() is None, f"{name} has ended"
    seen = await look_at_ring(client, "websites")
    states = {name: one["state"] for name, one in seen["instances"].items()}
    ready = sorted(name for name, state in states.items() if state == "ready")
    if ready != sorted(cluster.processes):
        return False
    if seen["unassigned_count"] or seen["draining_count"]:
        return False
    sites = {one.metadata.name: one.metadata.label(SHARD) for one in await all_of(client, SITES)}
    children = await all_of(client, CONFIG_MAPS)
    beside = all(
        one.metadata.label(SHARD) == sites[one.metadata.controller.name]
        for one in children
        if one.metadata.controller is not None
    )
    return len(sites) == objects and beside and all(at in ready for at in sites.values())


async def all_of(client: KubeClient, kind: ApiKind[Any]) -> tuple[PartialObject, ...]:
    return (await client.list(kind, "default")).items
