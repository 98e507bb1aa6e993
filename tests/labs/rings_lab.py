"""Rings in virtual time: instances and sharders as simulated processes, one API server in memory.

Instances work on websites and on the configmaps that these control, and make some of the latter.
The webhook asks any replica of the sharder, and lists lag. `judge` judges what was done: no object
is worked on by two instances at a time (K7), nothing is moved behind a living instance's back (K3),
and an object that another one controls is made at its owner's instance (KR-04).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from domicile.errors import Fenced
from domicile.kube.conventions import WEBHOOK_PATH
from domicile.kube.holding import KubeLeaseHolder
from domicile.kube.member import Reconcile, Ring, RingMember
from domicile.kube.ranges import HashRange
from domicile.kube.sharding import Sharder
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.exchange import ApiRequest
from domicile.kubeapi.kinds import CONFIG_MAPS, ApiKind
from domicile.kubeapi.objects import PartialObject
from domicile.testing.kube import ApiFault, FakeApiServer, FakeExchange
from domicile.testing.sim.clock import Machine, SimClock
from domicile.testing.sim.loop import SimLoop, World

RING = "websites"
LABEL = f"shard.alpha.sharding.timebertt.dev/{RING}"
DRAIN = f"drain.alpha.sharding.timebertt.dev/{RING}"
GROUP = "example.com"

SITES = ApiKind(GROUP, "v1", "websites", "Website", True, PartialObject)

RESOURCE = {
    "group": GROUP,
    "resource": "websites",
    "controlledResources": [{"group": "", "resource": "configmaps"}],
}


MOST_CHILDREN = 8
"""How many objects a website controls, at most."""

WEBHOOK_S = 5.0

RECENT_S = 15.0
"""How long a change of labels may be on its way after the owner was read."""


@dataclass(slots=True)
class Act:
    """One run of a reconcile function."""

    instance: str
    object: str
    began: float
    ended: float
    """When it last did something, for which it had to be allowed."""


@dataclass
class Process:
    """One simulated process."""

    name: str
    loop: SimLoop
    exchange: FakeExchange
    member: RingMember | None = None
    sharder: Sharder | None = None
    ranges: dict[int, HashRange] = field(default_factory=dict[int, HashRange])
    stop: asyncio.Event | None = None
    ended: bool = False
    asked: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])
    """What the webhook was asked for."""

    def leave(self) -> None:
        """Stop it in good order, as SIGTERM does."""
        stop = self.stop
        assert stop is not None
        self.loop.call_soon_threadsafe(stop.set)


@dataclass
class Rings:
    """The whole cluster."""

    seed: int
    objects: int = 20
    work_s: tuple[float, float] = (0.0, 3.0)
    again_s: float | None = None
    """After which time an object is worked on again, though it has not changed."""
    child_work_s: tuple[float, float] = (0.0, 3.0)
    child_again_s: float | None = None
    """The same for objects that others control."""
    world: World = field(init=False)
    server: FakeApiServer = field(init=False)
    acts: list[Act] = field(default_factory=list[Act])
    processes: dict[str, Process] = field(default_factory=dict[str, Process])
    children: dict[str, int] = field(default_factory=dict[str, int])
    """How many objects each website has got that it controls."""
    wild: bool = False
    """Whether faults strike now."""
    was_wild: bool = False
    """Whether they ever did: then the webhook need not have known where an owner was."""

    def __post_init__(self) -> None:
        self.world = World(self.seed)
        self.server = FakeApiServer(random=self.world.stream("server"))
        self.server.serve(GROUP, "websites", "Website")
        self.server.webhook = self._webhook
        cache = self.world.stream("cache")
        self.server.cache_lag_s = lambda _: cache.uniform(0.0, 1.0)
        self._faults = self.world.stream("faults")
        self._replicas = self.world.stream("webhook")
        self._admin = KubeClient(self.server.exchange(""), random=self.world.stream("admin"))
        self.server.faults = self._fault
        spec = {"resources": [RESOURCE]}
        self.server.put(
            "controllerrings",
            {"metadata": {"name": RING}, "spec": spec},
            "sharding.timebertt.dev",
        )

    def _fault(self, client: str, request: ApiRequest) -> ApiFault | None:
        if not self.wild or not client or self._faults.random() > 0.1:
            return None
        self.was_wild = True
        return self._faults.choice(list(ApiFault))

    async def _webhook(self, path: str, body: bytes) -> bytes:
        """Any replica of the sharder answers, in its own time."""
        assert path == WEBHOOK_PATH + RING
        if self.wild and self._faults.random() < 0.2:
            self.was_wild = True
            raise ConnectionError("the webhook is away")
        alive = [
            process
            for process in self.processes.values()
            if process.sharder is not None
            and not (process.loop.dead or process.loop.frozen or process.ended)
        ]
        if not alive:
            raise ConnectionError("no sharder")
        process = self._replicas.choice(alive)
        sharder, here = process.sharder, asyncio.get_running_loop()
        assert sharder is not None
        answered: asyncio.Future[bytes] = here.create_future()

        def told(said: bytes) -> None:
            if not answered.done():
                answered.set_result(said)

        async def ask() -> None:
            try:
                said = await sharder.answer(path, body)
            except Exception as error:  # it never raises (K4)
                self.world.errors.append((process.name, {"exception": error}))
                raise
            here.call_soon_threadsafe(told, said)

        process.loop.post(lambda: process.asked.append(process.loop.create_task(ask())))
        async with asyncio.timeout(WEBHOOK_S):
            return await answered

    # Processes.

    def _start(
        self, name: str, main: Callable[[Process, Random], Coroutine[Any, Any, None]]
    ) -> Process:
        loop = self.world.process(name)
        process = Process(name, loop, self.server.exchange(name))
        self.processes[name] = process
        random = self.world.stream(f"{name} {self.world.now}")

        def begin() -> None:
            process.stop = asyncio.Event()
            loop.create_task(run(), name=name)

        async def run() -> None:
            try:
                await main(process, random)
            finally:
                process.ended = True

        loop.post(begin)
        return process

    def sharder(self, name: str) -> Process:
        """Start a replica of the sharder."""

        async def main(process: Process, random: Random) -> None:
            client = KubeClient(process.exchange, random=random)
            process.sharder = Sharder(
                client,
                namespace="sharding-system",
                identity=name,
                client_config=lambda path: {"url": f"https://sharder{path}"},
                clock=SimClock(self.world, process.loop),
                random=random,
            )
            work = asyncio.ensure_future(process.sharder.run())
            assert process.stop is not None
            stopped = asyncio.ensure_future(process.stop.wait())
            await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
            work.cancel()
            await asyncio.wait((work,))

        return self._start(name, main)

    def instance(self, name: str, *, by_range: bool = False) -> Process:
        """Start an instance of the ring; one that loses its Lease begins anew, as a pod does."""
        life = self._one_life_by_range if by_range else self._one_life

        async def main(process: Process, random: Random) -> None:
            assert process.stop is not None
            stopped = asyncio.ensure_future(process.stop.wait())
            while not process.stop.is_set():
                work = asyncio.ensure_future(life(process, random))
                await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
                work.cancel()
                await asyncio.wait((work,))
                if not work.cancelled() and not isinstance(work.exception(), Fenced):
                    work.result()

        return self._start(name, main)

    async def _one_life(self, process: Process, random: Random) -> None:
        # Walls differ between machines, and nothing may depend on them (K1).
        wall = Machine(wall_s=-29.0 if process.name == "a" else 0.0)
        clock = SimClock(self.world, process.loop, wall)
        client = KubeClient(process.exchange, random=random)
        member = Ring(RING).member(
            client, instance=process.name, namespace="default", clock=clock, random=random,
            unique_name=True,  # a process is started only after the one of its name has ended
        )  # fmt: skip
        process.member = member
        with suppress(Fenced):
            async with member:
                await self._both(process, member, random)

    async def _both(self, process: Process, member: RingMember, random: Random) -> None:
        """A controller for each of the two kinds."""
        on_sites = self._acting(process, member, random, makes=True)
        on_children = self._acting_on_children(process, member, random)
        try:
            async with asyncio.TaskGroup() as work:
                work.create_task(member.run(on_sites, GROUP, "websites", workers=20))
                work.create_task(member.run(on_children, "", "configmaps", workers=50))
        except* Fenced:
            pass

    async def _one_life_by_range(self, process: Process, random: Random) -> None:
        clock = SimClock(self.world, process.loop)
        client = KubeClient(process.exchange, random=random)
        member = Ring(RING).ranges(
            client, instance=process.name, namespace="default", clock=clock, random=random,
            unique_name=True, count=16,
        )  # fmt: skip
        async with member:
            process.ranges = member.held
            work = self._acting(process, member, random)
            await member.run(work, GROUP, "websites", workers=20)

    def _acting(
        self, process: Process, member: KubeLeaseHolder, random: Random, *, makes: bool = False
    ) -> Reconcile:
        async def reconcile(client: KubeClient, one: Any) -> float | None:
            name = one.metadata.name
            await self._act(process, member, name, random.uniform(*self.work_s))
            few = makes and self.children.get(name, MOST_CHILDREN) < MOST_CHILDREN
            if few and random.random() < 0.5:
                self.children[name] += 1
                await client.create(CONFIG_MAPS, child_of(name, one.metadata.uid), "default")
            return self.again_s

        return reconcile

    def _acting_on_children(
        self, process: Process, member: KubeLeaseHolder, random: Random
    ) -> Reconcile:
        async def reconcile(_: KubeClient, one: Any) -> float | None:
            await self._act(process, member, one.metadata.name, random.uniform(*self.child_work_s))
            return self.child_again_s

        return reconcile

    async def _act(self, process: Process, member: KubeLeaseHolder, name: str, left: float) -> None:
        act = Act(process.name, name, self.world.now, self.world.now)
        self.acts.append(act)
        while left > 0:
            await asyncio.sleep(min(left, 0.25))
            left -= 0.25
            member.guard()
            act.ended = self.world.now

    def shared_by_range(self, *names: str) -> bool:
        """Whether these instances hold all ranges, each one some, and no range twice."""
        held = [self.processes[name].ranges for name in names]
        return all(held) and sorted(one for each in held for one in each) == list(range(16))

    def kill(self, name: str) -> None:
        """End a process at once, as SIGKILL does."""
        self.processes[name].loop.kill()

    # What tests look at.

    def websites(self) -> dict[str, dict[str, str]]:
        """The labels of all objects, by name."""
        return {
            one["metadata"]["name"]: one["metadata"].get("labels") or {}
            for one in self.server.objects("websites", GROUP)
        }

    def spread(self) -> dict[str, int]:
        """How many objects each instance has; "" for none."""
        counts: dict[str, int] = {}
        for labels in self.websites().values():
            name = labels.get(LABEL, "")
            counts[name] = counts.get(name, 0) + 1
        return counts

    def started(self, instances: int) -> bool:
        """Whether one sharder acts, and so many instances are there."""
        group = "admissionregistration.k8s.io"
        acting = self.server.objects("mutatingwebhookconfigurations", group)
        return bool(acting) and len(self.leases()) == instances + 1

    def at_rest(self, instances: list[str]) -> bool:
        """Whether each object has an instance that is there, and is not asked to let go."""
        everything = [*self.server.objects("websites", GROUP), *self.server.objects("configmaps")]
        for one in everything:
            labels = one["metadata"].get("labels") or {}
            if labels.get(LABEL) not in instances or DRAIN in labels:
                return False
        return True

    async def until(self, condition: Callable[[], bool], seconds: float = 700.0) -> None:
        """Wait in virtual time."""
        ends = self.world.now + seconds
        while not condition():
            if self.world.now >= ends:
                raise AssertionError(f"not within {seconds} s: {self.spread()} {self.leases()}")
            await asyncio.sleep(0.25)

    def leases(self) -> dict[str, str]:
        """The holders of all Leases."""
        return {
            one["metadata"]["name"]: one["spec"].get("holderIdentity", "")
            for one in self.server.objects("leases", "coordination.k8s.io")
        }

    async def add(self, number: int, *, child: bool = True) -> None:
        """Make an object, and one that it controls; with that, its instance makes more."""
        name = f"site-{number}"
        one = await self._admin.create(SITES, {"metadata": {"name": name}}, "default")
        if child:
            self.children[name] = 1
            body = child_of(name, one.metadata.uid)
            await self._admin.create(CONFIG_MAPS, body, "default")

    async def add_unnamed(self) -> None:
        """Make an object that has no name when the webhook is asked."""
        await self._admin.create(SITES, {"metadata": {"generateName": "unnamed-"}}, "default")

    def run(self, body: Callable[[Rings], Coroutine[Any, Any, None]]) -> None:
        """Run a test to its end, then judge."""
        loop = self.world.process("test")
        try:
            self.world.run(body(self), loop)
            judge(self)
            for name, context in self.world.errors:
                raise AssertionError(f"{name}: {context}") from context.get("exception")
        finally:
            self.world.close()


def child_of(site: str, uid: str) -> dict[str, Any]:
    """An object that a website controls. It gets its name when it is made."""
    owner = {
        "apiVersion": f"{GROUP}/v1",
        "kind": "Website",
        "name": site,
        "uid": uid,
        "controller": True,
    }
    return {"metadata": {"generateName": f"{site}-", "ownerReferences": [owner]}}


def judge(rings: Rings) -> None:
    """Objects that two instances worked on at a time; moves behind a living instance's back."""
    by_object: dict[str, list[Act]] = {}
    for act in rings.acts:
        by_object.setdefault(act.object, []).append(act)
    for name, acts in by_object.items():
        latest: Act | None = None
        for act in sorted(acts, key=lambda act: act.began):
            if latest is not None and latest.instance != act.instance:
                assert act.began >= latest.ended, f"two instances worked on {name}: {latest} {act}"
            if latest is None or act.ended > latest.ended:
                latest = act
    judge_moves(rings)


def judge_moves(rings: Rings) -> None:
    """Each change of an object's instance, against the Leases and the owner at that moment."""
    holders: dict[str, str] = {}
    sites: dict[str, str] = {}
    changes: dict[str, list[tuple[float, str]]] = {}
    for write in rings.server.log:
        now = write.labels().get(LABEL, "")
        if write.plural == "leases":
            holders[write.name] = (write.after or {}).get("spec", {}).get("holderIdentity") or ""
        if write.plural not in ("websites", "configmaps"):
            continue
        former = ""
        if write.before is not None:
            former = (write.before["metadata"].get("labels") or {}).get(LABEL, "")
        holder = holders.get(former, "")
        taken = former and now != former and write.client != former
        if write.plural == "websites":
            assert not taken or holder == "shardlease-controller", (
                f"{write.name} was taken from {former} while {holder!r} held its Lease"
            )
            sites[write.name] = now
            changes.setdefault(write.name, []).append((write.at, now))
            continue
        references = (write.after or write.before or {})["metadata"].get("ownerReferences") or ()
        if not references:
            continue
        owner = references[0]["name"]
        if taken and holder == former:
            assert sites[owner] != former, f"{write.name} left {former} before {owner} did"
        if not now or now == former or rings.was_wild:
            continue
        # The owner's instance, now or a moment ago; the ring's choice while the owner has none.
        recent = [at for at, _ in changes[owner] if at <= write.at - RECENT_S]
        since = max(recent, default=0.0)
        known = {instance for at, instance in changes[owner] if at >= since}
        away = [one for one in known if not one or holders.get(one) != one]
        assert now in known or away, (
            f"{write.name} was {'moved' if former else 'given'} to {now} by "
            f"{write.client or 'the webhook'}, and {owner} was at {sites[owner]}"
        )
