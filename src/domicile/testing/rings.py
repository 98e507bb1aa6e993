"""A ring of controllers in virtual time, for tests of the function that a controller calls.

    def test_it() -> None:
        async def scenario(sim: RingSim) -> None:
            sim.sharder()
            a = sim.instance("a", reconcile)
            sim.server.put("websites", {"metadata": {"name": "home"}}, "example.com")
            await sim.until(lambda: sim.belongs_to("home") == "a")

        RingSim("websites", "example.com", "websites", "Website").run(scenario)

Each instance and each sharder is a process of its own that can freeze, be killed or be cut off. All
of them talk to one API server in memory. Time passes only while everything waits, so a Lease runs
out at once, and a seed repeats its run. After the test, each write of an instance is judged: an
object that belongs to another instance is not written. Tests call this; it must never read a real
clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from random import Random
from typing import Any

from domicile.errors import Fenced
from domicile.kube.calls import Reconcile
from domicile.kube.conventions import GROUP, SHARDER, WEBHOOK_PATH
from domicile.kube.member import Ring, RingMember
from domicile.kube.range_member import RangeMember
from domicile.kube.sharding import Sharder
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.kinds import LEASES
from domicile.testing.kube import FakeApiServer, FakeExchange, Json
from domicile.testing.sim.clock import SimClock
from domicile.testing.sim.loop import SimLoop, World

LOOK_S = 0.05
"""How often a condition is looked at, in virtual time."""


class RingProcess:
    """One simulated process: an instance or a sharder. `RingSim` makes it."""

    def __init__(self, name: str, loop: SimLoop, exchange: FakeExchange) -> None:
        self.name = name
        self.member: RingMember | RangeMember | None = None
        """The instance's member. A later one after each lost Lease, as a pod starts anew."""
        self.members = 0
        """How many there have been."""
        self.ended = False
        self.loop, self.exchange = loop, exchange
        """Its event loop and its connection, for what has no verb here."""
        self._stop = asyncio.Event()

    @property
    def alive(self) -> bool:
        """Whether it runs: neither ended, killed nor frozen."""
        return not (self.ended or self.loop.dead or self.loop.frozen)

    def leave(self) -> None:
        """Stop it in good order, as SIGTERM does. `ended` says when it is over."""
        self.loop.call_soon_threadsafe(self._stop.set)

    def kill(self) -> None:
        """End it at once, as SIGKILL does."""
        self.loop.kill()
        self.ended = True

    def freeze(self) -> None:
        """Stop it where it is, as SIGSTOP or a stalled machine does."""
        self.loop.freeze()

    def thaw(self) -> None:
        """Let it go on."""
        self.loop.thaw()

    def cut_off(self) -> None:
        """Let nothing get through between it and the API server."""
        self.exchange.cut = True

    def reconnect(self) -> None:
        """Let requests through again."""
        self.exchange.cut = False

    def start(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin. `RingSim` calls it."""
        self.loop.post(lambda: self.loop.create_task(self._run(main), name=self.name))

    async def _run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `main` again and again, until this process is to leave."""
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            while not self._stop.is_set():
                work = asyncio.ensure_future(main())
                await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
                work.cancel()
                await asyncio.wait((work,))
                if not work.cancelled() and not isinstance(work.exception(), Fenced):
                    work.result()
        finally:
            stopped.cancel()
            self.ended = True


class RingSim:
    """One ring, its API server and its processes, for one test. `run` it."""

    def __init__(
        self,
        ring: str,
        group: str,
        plural: str,
        kind: str,
        *,
        controlled: Iterable[tuple[str, str]] = (),
        seed: int = 0,
    ) -> None:
        self.ring = Ring(ring)
        self.server = FakeApiServer()
        self._world = World(seed)
        self.server.random = self._world.stream("server")
        self._group, self._plural = group, plural
        self._sharders: dict[str, tuple[RingProcess, Sharder]] = {}
        self._instances: dict[str, RingProcess] = {}
        self.server.serve(group, plural, kind)
        self.server.webhook = self._webhook
        of: list[Json] = [{"group": where, "resource": what} for where, what in controlled]
        resource = {"group": group, "resource": plural, "controlledResources": of}
        made = {"metadata": {"name": ring}, "spec": {"resources": [resource]}}
        self.server.put("controllerrings", made, GROUP)

    @property
    def now(self) -> float:
        """The virtual time, in seconds."""
        return self._world.now

    def run(self, scenario: Callable[[RingSim], Coroutine[Any, Any, None]]) -> None:
        """Run a test to its end. Raises what it raises, what a process failed with, and
        `AssertionError` for a write to an object of another instance."""
        loop = self._world.process("test")
        try:
            self._world.run(scenario(self), loop)
            for name, context in self._world.errors:
                raise AssertionError(f"{name}: {context}") from context.get("exception")
            self._judge()
        finally:
            self._world.close()

    async def until(self, condition: Callable[[], object], seconds: float = 300.0) -> None:
        """Wait for a condition, in virtual time."""
        ends = self.now + seconds
        while not condition():
            if self.now >= ends:
                raise AssertionError(f"not within {seconds} s; the Leases: {self.leases()}")
            await asyncio.sleep(LOOK_S)

    # Processes.

    def sharder(self, name: str = "sharder-1", *, drain_deadline_s: float = 60.0) -> RingProcess:
        """Start a replica of the sharder. The first one acts after 15 s."""
        process, random = self._process(name)
        sharder = Sharder(
            KubeClient(process.exchange, random=random),
            namespace="sharding-system",
            identity=name,
            client_config=lambda path: {"url": f"https://sharder{path}"},
            clock=SimClock(self._world, process.loop),
            random=random,
            drain_deadline_s=drain_deadline_s,
        )
        self._sharders[name] = process, sharder
        process.start(sharder.run)
        return process

    def instance(
        self,
        name: str,
        reconcile: Reconcile,
        *,
        by_range: bool = False,
        duration_s: int = 15,
        workers: int = 4,
    ) -> RingProcess:
        """Start an instance that runs `reconcile` for its objects. One that loses its Lease begins
        anew. `by_range` makes it one of a range ring, which needs no sharder."""
        process, random = self._process(name)
        self._instances[name] = process
        make = self.ring.ranges if by_range else self.ring.member

        async def main() -> None:
            process.member = made = make(
                KubeClient(process.exchange, random=random),
                instance=name,
                namespace="default",
                duration_s=duration_s,
                unique_name=True,
                clock=SimClock(self._world, process.loop),
                random=random,
            )
            process.members += 1
            async with made:
                await made.run(reconcile, self._group, self._plural, workers=workers)

        process.start(main)
        return process

    def _process(self, name: str) -> tuple[RingProcess, Random]:
        loop = self._world.process(name)
        return RingProcess(name, loop, self.server.exchange(name)), self._world.stream(
            f"{name} {self.now}"
        )

    async def _webhook(self, path: str, body: bytes) -> bytes:
        """Suspends only for an object that another one controls: the sharder reads its owner."""
        assert path == WEBHOOK_PATH + self.ring.name
        for process, sharder in self._sharders.values():
            if process.alive:
                return await sharder.answer(path, body)
        raise ConnectionError("no sharder answers")

    # What tests look at, and what they do to Leases and objects.

    def client(self, name: str = "test") -> KubeClient:
        """A client of the API server, for the test."""
        return KubeClient(self.server.exchange(name), random=self._world.stream(f"client {name}"))

    def objects(self) -> dict[str, Json]:
        """The objects of the ring, by name, as they are now."""
        found = self.server.objects(self._plural, self._group)
        return {one["metadata"]["name"]: one for one in found}

    def belongs_to(self, name: str) -> str:
        """The instance of an object, by its label; "" if it has none."""
        return _label(self.objects()[name], self.ring.shard_label)

    def leases(self) -> dict[str, str]:
        """The holders of all Leases."""
        return {
            one["metadata"]["name"]: _holder(one)
            for one in self.server.objects("leases", "coordination.k8s.io")
        }

    async def take_lease(self, name: str) -> None:
        """Take the Lease of an instance, as the sharder does with one that fell silent. The
        instance learns that when it renews."""
        merge = {"spec": {"holderIdentity": SHARDER}}
        await self.client("thief").patch(LEASES, name, "default", merge=merge)

    def delete_lease(self, name: str) -> None:
        """Delete the Lease of an instance, as somebody might with kubectl."""
        self.server.remove("leases", name, "coordination.k8s.io")

    def _judge(self) -> None:
        for write in self.server.log:
            if write.plural != self._plural or write.client not in self._instances:
                continue
            other = _label(write.before, self.ring.shard_label)
            if other in self._instances and other != write.client:
                raise AssertionError(
                    f"at {write.at:.3f} s {write.client} wrote {write.name}, which belonged to "
                    f"{other}"
                )


def _label(one: Json | None, label: str) -> str:
    labels: dict[str, str] | None = None if one is None else one["metadata"].get("labels")
    return (labels or {}).get(label, "")


def _holder(lease: Json) -> str:
    spec: Json | None = lease.get("spec")
    return (spec or {}).get("holderIdentity") or ""
