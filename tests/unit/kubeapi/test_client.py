"""The client's calls: what is repeated, what is not, and what errors say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from domicile.errors import ConfigError
from domicile.kube.holding import GuardedExchange
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.credentials import Credentials, find_credentials, of_pod
from domicile.kubeapi.errors import (
    KubeConflict,
    KubeForbidden,
    KubeGone,
    KubeNotFound,
    KubeUnanswered,
    KubeUnavailable,
    refusal_of,
)
from domicile.kubeapi.exchange import ApiAnswer, ApiExchange, ApiRequest
from domicile.kubeapi.follow import ObjectChanged, ObjectRemoved, ObjectsListed, follow
from domicile.kubeapi.kinds import CONFIG_MAPS, LEASES
from domicile.kubeapi.objects import is_object_name
from domicile.testing.kube import ApiFault, FakeApiServer
from domicile.testing.sim.loop import World


def in_virtual_time(
    body: Callable[[FakeApiServer, KubeClient], Coroutine[Any, Any, None]],
) -> None:
    world = World(1)
    server = FakeApiServer(random=world.stream("server"))
    client = KubeClient(server.exchange("a"), random=world.stream("client"))
    try:
        world.run(body(server, client), world.process("test"))
        assert not world.errors
    finally:
        world.close()


def test_verbs_and_conflicts() -> None:
    async def body(server: FakeApiServer, client: KubeClient) -> None:
        made = await client.create(
            CONFIG_MAPS, {"metadata": {"name": "a"}, "data": {"x": "1"}}, "default"
        )
        assert made.data == {"x": "1"}
        with pytest.raises(KubeConflict, match="already exists"):
            await client.create(CONFIG_MAPS, {"metadata": {"name": "a"}}, "default")
        version = made.metadata.resource_version
        changed = await client.patch(
            CONFIG_MAPS, "a", "default", merge={"data": {"x": "2"}}, resource_version=version
        )
        assert changed.data == {"x": "2"}
        with pytest.raises(KubeConflict, match="modified"):
            await client.patch(
                CONFIG_MAPS, "a", "default", merge={"data": {"x": "3"}}, resource_version=version
            )
        with pytest.raises(KubeConflict):
            await client.delete(CONFIG_MAPS, "a", "default", resource_version=version)
        step = {"op": "replace", "path": "/data/x", "value": "4"}
        await client.patch(CONFIG_MAPS, "a", "default", operations=[step])
        applied = {"metadata": {"name": "a", "namespace": "default"}, "data": {"y": "5"}}
        await client.apply(CONFIG_MAPS, applied, manager="m")
        assert (await client.get(CONFIG_MAPS, "a", "default")).data == {"x": "4", "y": "5"}
        other = {**applied, "data": {"y": "6"}}
        with pytest.raises(KubeConflict, match="owned by m"):
            await client.apply(CONFIG_MAPS, other, manager="n")
        await client.apply(CONFIG_MAPS, other, manager="n", force=True)
        page = await client.list(CONFIG_MAPS, "default")
        assert [one.metadata.name for one in page.items] == ["a"]
        await client.delete(CONFIG_MAPS, "a", "default")
        with pytest.raises(KubeNotFound, match=r"get configmaps default/a was refused \(404"):
            await client.get(CONFIG_MAPS, "a", "default")

    in_virtual_time(body)


@pytest.mark.parametrize(
    ("fault", "ran"),
    [
        (ApiFault.UNREACHABLE, True),
        (ApiFault.BUSY, True),
        (ApiFault.UNANSWERED, False),
        (ApiFault.BROKEN, False),
    ],
)
def test_a_write_is_repeated_only_if_it_did_not_run(fault: ApiFault, ran: bool) -> None:
    async def body(server: FakeApiServer, client: KubeClient) -> None:
        faults = [fault]
        server.faults = lambda who, request: faults.pop() if faults else None
        body = {"metadata": {"name": "a"}}
        if ran:
            await client.create(CONFIG_MAPS, body, "default")
        else:
            with pytest.raises(KubeUnanswered, match="may have happened"):
                await client.create(CONFIG_MAPS, body, "default")
        stored = server.objects("configmaps")
        assert len(stored) == (0 if fault is ApiFault.BROKEN else 1)

    in_virtual_time(body)


class Standing:
    """Implements `WriteGuard`."""

    def guard(self) -> None:
        pass


class Late:
    """Implements `ApiExchange`: the answers come too late."""

    def __init__(self, inner: ApiExchange) -> None:
        self._inner = inner
        self.server = inner.server

    @asynccontextmanager
    async def open(self, request: ApiRequest) -> AsyncGenerator[ApiAnswer, None]:
        async with self._inner.open(request) as answer:
            await asyncio.sleep(20.0)
            yield answer

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("guarded", [False, True])
def test_a_write_that_found_no_connection_in_time_did_not_run(guarded: bool) -> None:
    """I9: a server that cannot be reached takes nothing, however long it is tried."""

    async def body(server: FakeApiServer, _: KubeClient) -> None:
        exchange = server.exchange("b")
        client = KubeClient(exchange, timeout_s=10.0)
        if guarded:
            client = client.through(lambda inner: GuardedExchange(inner, Standing()))
        exchange.connect_s = 11.0
        with pytest.raises(KubeUnavailable, match="nothing changed"):
            await client.create(CONFIG_MAPS, {"metadata": {"name": "a"}}, "default")
        assert not server.objects("configmaps")
        exchange.connect_s = 0.0
        client = client.through(Late)
        with pytest.raises(KubeUnanswered, match="may have happened"):
            await client.create(CONFIG_MAPS, {"metadata": {"name": "a"}}, "default")

    in_virtual_time(body)


@pytest.mark.parametrize("fault", list(ApiFault))
def test_a_read_is_repeated_until_its_deadline(fault: ApiFault) -> None:
    async def body(server: FakeApiServer, client: KubeClient) -> None:
        faults = [fault] * 3
        server.faults = lambda who, request: faults.pop() if faults else None
        assert (await client.list(CONFIG_MAPS)).items == ()
        server.faults = lambda who, request: fault
        began = asyncio.get_running_loop().time()
        with pytest.raises(KubeUnavailable, match="nothing changed"):
            await client.list(CONFIG_MAPS)
        assert asyncio.get_running_loop().time() - began == pytest.approx(10.0)

    in_virtual_time(body)


def test_following_goes_on_after_breaks_and_compaction() -> None:
    async def body(server: FakeApiServer, client: KubeClient) -> None:
        seen: list[object] = []

        async def watch() -> None:
            async with aclosing(follow(client, CONFIG_MAPS, "default", labels="a=b")) as changes:
                async for change in changes:
                    seen.append(change)

        def made(name: str) -> dict[str, Any]:
            return {"metadata": {"name": name, "labels": {"a": "b"}}}

        server.put("configmaps", made("one"))
        task = asyncio.ensure_future(watch())
        await asyncio.sleep(1)
        server.put("configmaps", made("two"))
        await asyncio.sleep(1)
        server.break_watches()
        server.put("configmaps", made("three"))
        await asyncio.sleep(5)
        await client.patch(
            CONFIG_MAPS, "one", "default", merge={"metadata": {"labels": {"a": None}}}
        )
        await asyncio.sleep(1)
        kinds = [type(change) for change in seen]
        assert kinds == [ObjectsListed, ObjectChanged, ObjectChanged, ObjectRemoved]
        server.put("configmaps", made("four"))
        server.compact()
        await asyncio.sleep(20)
        last = seen[-1]
        assert isinstance(last, ObjectsListed)
        names = [one.metadata.name for one in last.items]
        assert names == ["four", "three", "two"]
        # Hours of bookmarks and ended watches change nothing.
        await asyncio.sleep(4000)
        assert seen[-1] is last
        task.cancel()
        await asyncio.wait((task,))

    in_virtual_time(body)


def test_metadata_is_streamed() -> None:
    async def body(server: FakeApiServer, client: KubeClient) -> None:
        for number in range(300):
            one = {"metadata": {"name": f"c{number:03}"}, "data": {"big": "x" * 500}}
            server.put("configmaps", one)
        async with aclosing(client.stream_metadata(CONFIG_MAPS)) as objects:
            names = [one.metadata.name async for one in objects]
        assert names == [f"c{number:03}" for number in range(300)]
        _, request = server.requests[-1]
        assert request.query["resourceVersion"] == "0"
        assert "limit" not in request.query

    in_virtual_time(body)


@pytest.mark.parametrize(
    ("said", "version"), [("1.36", (1, 36)), ("1.27+", (1, 27)), ("two", (0, 0))]
)
def test_the_version_of_the_server(said: str, version: tuple[int, int]) -> None:
    async def body(server: FakeApiServer, client: KubeClient) -> None:
        server.kubernetes = said
        assert await client.version() == version

    in_virtual_time(body)


def test_a_missing_rule_is_named() -> None:
    error = refusal_of(
        403, "Forbidden", "no", "list", LEASES.shown, "", "the service account of this pod"
    )
    assert isinstance(error, KubeForbidden)
    assert 'apiGroups: ["coordination.k8s.io"], resources: ["leases"], verbs: ["list"]' in str(
        error
    )
    assert isinstance(refusal_of(410, "Gone", "", "watch", "x", ""), KubeGone)


def test_a_request_that_only_reads_is_no_write() -> None:
    assert not ApiRequest("GET", "/").writes
    assert ApiRequest("PATCH", "/").writes


KUBECONFIG = """
current-context: main
contexts:
- name: main
  context: {cluster: c, user: u, namespace: team}
- name: plugin
  context: {cluster: c, user: e}
clusters:
- name: c
  cluster: {server: "https://10.0.0.1:6443", certificate-authority-data: Q0E=}
users:
- name: u
  user: {tokenFile: token}
- name: e
  user: {auth-provider: {name: gcp}}
"""


def test_a_kubeconfig_is_read_and_its_token_again(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(KUBECONFIG)
    (tmp_path / "token").write_text("first\n")
    found = find_credentials(str(path))
    assert (found.server, found.namespace, found.ca) == ("https://10.0.0.1:6443", "team", b"CA")
    assert found.bearer() == "first"
    (tmp_path / "token").write_text("second")
    assert found.bearer() == "second"
    assert "second" not in repr(found)
    with pytest.raises(ConfigError, match="gets credentials by auth-provider"):
        find_credentials(str(path), "plugin")
    with pytest.raises(ConfigError, match="no context named 'other'; it has: main, plugin"):
        find_credentials(str(path), "other")
    with pytest.raises(ConfigError, match="set KUBECONFIG"):
        find_credentials(str(tmp_path / "nothing"))


def test_a_pod_knows_its_server(tmp_path: Path) -> None:
    for name, text in (("ca.crt", "CA"), ("namespace", "team"), ("token", "t1")):
        (tmp_path / name).write_text(text)
    where = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    found = find_credentials(environment=where, service_account=tmp_path)
    assert (found.server, found.namespace, found.bearer()) == (
        "https://[fd00::1]:443",
        "team",
        "t1",
    )
    with pytest.raises(ConfigError, match="automountServiceAccountToken"):
        of_pod(where, tmp_path / "none")
    with pytest.raises(ConfigError, match="can't be read"):
        Credentials("https://x", token_file=tmp_path / "gone").bearer()


def test_names_of_objects() -> None:
    assert is_object_name("web-0")
    assert is_object_name("a.b")
    assert not is_object_name("A")
    assert not is_object_name("-a")
    assert not is_object_name("a" * 64)
