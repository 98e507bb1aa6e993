"""Proof of death on Kubernetes (C9): what counts, what does not, and what is asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from domicile.backends.registry import OpenOptions, open_health
from domicile.core.ids import Incarnation
from domicile.errors import ConfigError, StoreUnavailable
from domicile.kube.pod_health import DELETION_COST, KEPT, OwnPod, PodHealth, own_pod
from domicile.kube.pod_proof import OUT_OF_SERVICE, PodPlace, parse_place, proof_in_pod
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.errors import KubeNotFound, refusal_of
from domicile.kubeapi.exchange import ApiRequest
from domicile.kubeapi.kinds import AnyApiKind
from domicile.kubeapi.objects import KubePod
from domicile.ports.health import Health, JudgesByPlace, SweepsProofs, Verdict
from domicile.stores.file_locks import FileLocks
from domicile.testing.kube import ApiFault, FakeApiServer, Json
from domicile.testing.sim.loop import World

A, B = Incarnation("a" * 32), Incarnation("b" * 32)

RUNS: Json = {"running": {}}
ENDED: Json = {"terminated": {"exitCode": 137}}
WAITS: Json = {"waiting": {"reason": "CrashLoopBackOff"}}


def status(phase: str, *states: Json, restarts: int = 0, **more: list[Json]) -> Json:
    containers = [
        {"name": f"c{number}", "state": state, "restartCount": restarts}
        for number, state in enumerate(states)
    ]
    shown = {f"{name}ContainerStatuses": statuses for name, statuses in more.items()}
    return {"phase": phase, "containerStatuses": containers, **shown}


def pod(name: str, said: Json, *, machine: str = "m1", containers: int = 1) -> Json:
    spec = {
        "nodeName": machine,
        "containers": [{"name": f"c{number}"} for number in range(containers)],
    }
    return {"metadata": {"name": name, "namespace": "default"}, "spec": spec, "status": said}


class Judge:
    """The health port of a process in pod `b`, which judges incarnation `a` of pod `a`."""

    def __init__(self, server: FakeApiServer, world: World, locks: FileLocks | None = None) -> None:
        self.server = server
        for machine in ("m1", "m2"):
            server.put("nodes", {"metadata": {"name": machine}})
        server.put("namespaces", {"metadata": {"name": "kube-system"}})
        self.uid = server.put("pods", pod("a", status("Running", RUNS)))["metadata"]["uid"]
        mine = server.put("pods", pod("b", status("Running", RUNS), machine="m2"))
        self.own = OwnPod("default", "b", mine["metadata"]["uid"])
        self.client = KubeClient(server.exchange("judge"), random=world.stream("judge"))
        self.health = PodHealth(
            self.client, lambda: self.own, locks=locks, random=world.stream("health")
        )
        self.proved = 0
        self.shards = 0
        self.place = ""

    async def begin(self) -> asyncio.Task[None]:
        mine = parse_place(await self.health.find_place())
        assert mine is not None
        self.place = PodPlace(mine.cluster, "m1", "default", "a", self.uid).text()
        self.health.placed(A, self.place)
        running = asyncio.ensure_future(self.health.run(self._count, lambda: self.shards))
        await asyncio.sleep(1)
        return running

    def _count(self) -> None:
        self.proved += 1

    async def probed(self, seconds: float = 10.0) -> Verdict:
        """The verdict after the probes of some seconds."""
        for _ in range(int(seconds * 4)):
            self.health.verdict(A)
            await asyncio.sleep(0.25)
        return self.health.verdict(A)

    async def say(self, said: Json) -> None:
        """The kubelet reports about pod `a`."""
        from domicile.kubeapi.kinds import PODS

        await self.client.patch(PODS, "a", "default", merge={"status": said})

    async def remove(self, kind: AnyApiKind, name: str, namespace: str = "") -> None:
        await self.client.delete(kind, name, namespace)


Body = Callable[[Judge], Coroutine[Any, Any, None]]


def judged(body: Body, locks: FileLocks | None = None) -> None:
    world = World(1)
    judge = Judge(FakeApiServer(random=world.stream("server")), world, locks)

    async def main() -> None:
        running = await judge.begin()
        try:
            await body(judge)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    try:
        world.run(main(), world.process("test"))
        assert not world.errors
    finally:
        world.close()


def test_it_is_a_health_port_that_judges_by_place() -> None:
    health: Health = PodHealth(KubeClient(FakeApiServer().exchange("a")), own_pod())
    assert isinstance(health, JudgesByPlace)
    assert isinstance(health, SweepsProofs)
    assert health.sweep() == 0


def test_a_pod_that_runs_is_alive_and_costs_nothing() -> None:
    async def body(judge: Judge) -> None:
        before = len(judge.server.requests)
        assert await judge.probed(100) is Verdict.ALIVE
        assert len(judge.server.requests) - before <= 1, "only the watch, which may begin anew"
        assert judge.proved == 0

    judged(body)


def test_a_pod_whose_containers_have_terminated_is_dead_at_once() -> None:
    async def body(judge: Judge) -> None:
        await judge.say(status("Failed", ENDED))
        await asyncio.sleep(0.5)
        assert judge.proved == 1, "the look-out is woken"
        assert judge.health.verdict(A) is Verdict.DEAD
        assert f"default/a (uid {judge.uid}) is Failed" in judge.health.evidence(A)

    judged(body)


@pytest.mark.parametrize(
    ("said", "containers"),
    [
        (status("Running", ENDED), 1),  # the next container may run by now
        (status("Running", WAITS, restarts=3), 1),
        (status("Running", RUNS, restarts=1), 1),
        (status("Failed", RUNS), 1),  # as the pod collector says of a machine that is silent
        (status("Failed", ENDED, RUNS), 2),
        (status("Failed", ENDED), 2),  # one container has no status
        (status("Failed"), 0),
        (status("Failed", ENDED, init=[{"name": "side", "state": RUNS}]), 1),
        (status("Failed", ENDED, ephemeral=[{"name": "debug", "state": RUNS}]), 1),
        (status("Unknown", ENDED), 1),
        ({}, 1),
    ],
)
def test_everything_else_about_a_pod_is_no_proof(said: Json, containers: int) -> None:
    import msgspec

    assert proof_in_pod(msgspec.convert(pod("a", said, containers=containers), KubePod)) == ""


def test_a_pod_that_restarts_is_unknown() -> None:
    async def body(judge: Judge) -> None:
        await judge.say(status("Running", ENDED))
        assert await judge.probed() is Verdict.UNKNOWN
        await judge.say(status("Running", RUNS, restarts=1))
        assert await judge.probed() is Verdict.UNKNOWN

    judged(body)


def test_a_pod_that_is_missing_proves_nothing_until_its_machine_is_gone() -> None:
    from domicile.kubeapi.kinds import MACHINES, PODS

    async def body(judge: Judge) -> None:
        await judge.remove(PODS, "a", "default")
        assert await judge.probed(60) is Verdict.UNKNOWN, "kubectl delete --force asks no machine"
        asked = [one for _, one in judge.server.requests if one.path.endswith("/nodes/m1")]
        assert 30 < len(asked) <= 62, "about one question a second"
        await judge.remove(MACHINES, "m1")
        assert await judge.probed(3) is Verdict.DEAD
        assert judge.proved == 1
        assert judge.health.evidence(A).endswith("its machine m1 is gone, too")

    judged(body)


def test_or_out_of_service() -> None:
    from domicile.kubeapi.kinds import MACHINES, PODS

    async def body(judge: Judge) -> None:
        other = {"spec": {"taints": [{"key": "node.kubernetes.io/unreachable", "effect": "x"}]}}
        await judge.client.patch(MACHINES, "m1", merge=other)
        taint = {"spec": {"taints": [{"key": OUT_OF_SERVICE, "effect": "NoExecute"}]}}
        await judge.client.patch(MACHINES, "m2", merge=taint)
        await judge.remove(PODS, "a", "default")
        assert await judge.probed() is Verdict.UNKNOWN, "another machine, another taint"
        await judge.client.patch(MACHINES, "m1", merge=taint)
        assert await judge.probed(3) is Verdict.DEAD
        assert OUT_OF_SERVICE in judge.health.evidence(A)

    judged(body)


def test_a_machine_that_is_gone_proves_nothing_of_a_pod_that_is_there() -> None:
    from domicile.kubeapi.kinds import MACHINES

    async def body(judge: Judge) -> None:
        await judge.remove(MACHINES, "m1")
        assert await judge.probed() is Verdict.ALIVE

    judged(body)


def test_another_pod_of_that_name_is_another_pod() -> None:
    from domicile.kubeapi.kinds import MACHINES, PODS

    async def body(judge: Judge) -> None:
        await judge.remove(PODS, "a", "default")
        judge.server.put("pods", pod("a", status("Running", RUNS), machine="m2"))
        assert await judge.probed() is Verdict.UNKNOWN, "it is not alive, nor is it proved dead"
        await judge.remove(MACHINES, "m1")
        assert await judge.probed(3) is Verdict.DEAD

    judged(body)


def test_the_last_words_of_a_pod_count() -> None:
    """A pod that is deleted in peace ends first; that is in the event of its removal, too."""
    from domicile.kubeapi.kinds import PODS

    async def body(judge: Judge) -> None:
        judge.server.break_watches()
        await judge.say(status("Succeeded", ENDED))
        await judge.remove(PODS, "a", "default")
        assert await judge.probed() is Verdict.DEAD

    judged(body)


@pytest.mark.parametrize("fault", [ApiFault.UNREACHABLE, ApiFault.BROKEN, ApiFault.BUSY])
def test_errors_prove_nothing(fault: ApiFault) -> None:
    from domicile.kubeapi.kinds import MACHINES, PODS

    async def body(judge: Judge) -> None:
        def of_machines(_: str, request: ApiRequest) -> ApiFault | None:
            return fault if request.method == "GET" and "/nodes/" in request.path else None

        await judge.remove(MACHINES, "m1")
        judge.server.faults = of_machines
        await judge.remove(PODS, "a", "default")
        assert await judge.probed(60) is Verdict.UNKNOWN
        judge.server.faults = lambda client, request: None
        assert await judge.probed(30) is Verdict.DEAD, "and it is asked again"

    judged(body)


@pytest.mark.parametrize(
    ("status_code", "reason", "message"),
    [
        (403, "Forbidden", 'pods "a" is forbidden'),
        (404, "", "<html>not here</html>"),
        (404, "NotFound", "the server could not find the requested resource"),
        (404, "NotFound", 'pods "b" not found'),
    ],
)
def test_a_refusal_by_something_else_proves_nothing(
    status_code: int, reason: str, message: str
) -> None:
    from domicile.kubeapi.kinds import MACHINES, PODS

    async def body(judge: Judge) -> None:
        await judge.remove(MACHINES, "m1")
        await judge.remove(PODS, "a", "default")
        real = judge.client.get

        async def get(kind: AnyApiKind, name: str, namespace: str = "") -> Any:
            if kind is PODS:
                raise refusal_of(status_code, reason, message, "get", "pods", "default/a")
            return await real(kind, name, namespace)

        judge.client.get = get  # type: ignore[method-assign]
        assert await judge.probed() is Verdict.UNKNOWN

    judged(body)


def test_pods_of_another_kubernetes_cluster_are_not_judged() -> None:
    async def body(judge: Judge) -> None:
        foreign = PodPlace("another", "nowhere", "default", "a", "uid-x").text()
        judge.health.placed(B, foreign)
        judge.health.placed(Incarnation("c"), "a rack in the cellar")
        for _ in range(40):
            assert judge.health.verdict(B) is Verdict.UNKNOWN
            assert judge.health.verdict(Incarnation("c")) is Verdict.UNKNOWN
            await asyncio.sleep(0.25)

    judged(body)


def test_a_new_container_of_the_pod_proves_the_death_of_the_one_before(tmp_path: Path) -> None:
    before, after = FileLocks(tmp_path), FileLocks(tmp_path)
    before.hold(A)

    async def body(judge: Judge) -> None:
        judge.health.hold(B)
        await judge.say(status("Running", RUNS, restarts=1))
        assert await judge.probed() is Verdict.ALIVE, "the lock is held"
        before.let_go(A, gone=False)
        assert judge.health.verdict(A) is Verdict.DEAD
        assert "can be taken" in judge.health.evidence(A)
        judge.health.let_go(A)
        assert judge.health.verdict(A) is Verdict.UNKNOWN
        judge.health.let_go(B)

    judged(body, after)


def test_the_deletion_cost_follows_the_shards_slowly() -> None:
    async def body(judge: Judge) -> None:
        def told() -> list[str]:
            return [
                write.after["metadata"]["annotations"][DELETION_COST]
                for write in judge.server.log
                if write.verb == "patch" and write.name == "b" and write.after is not None
            ]

        assert told() == ["0"]
        for judge.shards in range(1, 100):
            await asyncio.sleep(0.25)
        assert 3 <= len(told()) <= 4, "it writes once in ten seconds"
        await asyncio.sleep(11)
        assert told()[-1] == "99"
        writes = len(judge.server.log)
        await asyncio.sleep(100)
        assert len(judge.server.log) == writes, "what is told is not told again"

    judged(body)


def test_without_the_right_to_write_pods_the_rest_works() -> None:
    async def body(judge: Judge) -> None:
        await judge.say(status("Failed", ENDED))
        await asyncio.sleep(0.5)
        assert judge.health.verdict(A) is Verdict.DEAD

    world = World(1)
    judge = Judge(FakeApiServer(random=world.stream("server")), world)
    real = judge.client.patch

    async def patch(kind: AnyApiKind, name: str, *rest: Any, **more: Any) -> Any:
        if name == "b":
            raise refusal_of(403, "Forbidden", "no", "patch", "pods", "default/b")
        return await real(kind, name, *rest, **more)

    judge.client.patch = patch  # type: ignore[method-assign]

    async def main() -> None:
        running = await judge.begin()
        await body(judge)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    try:
        world.run(main(), world.process("test"))
        assert not world.errors
    finally:
        world.close()


def test_a_wrong_or_missing_pod_is_told() -> None:
    async def body(judge: Judge) -> None:
        judge.own = OwnPod("default", "b", "uid-of-another")
        with pytest.raises(ConfigError, match="POD_UID is uid-of-another"):
            await judge.health.find_place()
        judge.own = OwnPod("default", "nobody", "uid")
        with pytest.raises(ConfigError, match='"nobody" not found'):
            await judge.health.find_place()
        judge.server.put("pods", pod("new", status("Pending"), machine=""))
        uid = judge.server.objects("pods")[-1]["metadata"]["uid"]
        judge.own = OwnPod("default", "new", uid)
        with pytest.raises(StoreUnavailable, match="has no machine yet"):
            await judge.health.find_place()
        judge.server.faults = lambda client, request: ApiFault.UNREACHABLE
        with pytest.raises(StoreUnavailable, match="can't ask"):
            await judge.health.find_place()

    judged(body)
    with pytest.raises(ConfigError, match="POD_UID by the downward API"):
        own_pod("default", {"POD_NAME": "a"})()
    found = own_pod("default", {"POD_NAME": "a", "POD_UID": "1"})()
    assert found == OwnPod("default", "a", "1")


def test_places_are_bounded() -> None:
    health = PodHealth(KubeClient(FakeApiServer().exchange("a")), own_pod())
    for number in range(KEPT + 10):
        health.placed(Incarnation(str(number)), PodPlace("c", "m", "n", "p", str(number)).text())
    assert len(health._places) == KEPT  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    "url", ["kubernetes://x/y", "kubernetes://?lock=x", "etcd://a:1", "kubernetes", "nothing://"]
)
def test_a_wrong_url_is_told(url: str) -> None:
    with pytest.raises(ConfigError, match="kubernetes://"):
        open_health(url, OpenOptions("test"))


def test_a_url_opens_it(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        '{"current-context": "x", "contexts": [{"name": "x", "context": {"cluster": "c", "user":'
        ' "u"}}], "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],'
        ' "users": [{"name": "u", "user": {"token": "t"}}]}'
    )
    url = f"kubernetes://shop?kubeconfig={config}&locks={tmp_path / 'locks'}&labels=app%3Dx"
    health = open_health(url, OpenOptions("test"))
    assert isinstance(health, PodHealth)
    health.hold(A)
    assert health.verdict(A) is Verdict.ALIVE
    health.let_go(A)
    asyncio.run(health.close())


def test_refusals_keep_the_servers_reason() -> None:
    error = refusal_of(404, "NotFound", 'pods "a" not found', "get", "pods", "default/a")
    assert isinstance(error, KubeNotFound)
    assert error.reason == "NotFound"
