"""`domicile ring`: what is printed, and what a ring looks like."""

from __future__ import annotations

import yaml
from typer.testing import CliRunner

from domicile.kube.ring_metrics import RingMetrics
from domicile.kubeapi.client import KubeClient
from domicile.observe.exposition import write
from domicile.ops.cli import app
from domicile.ops.ring import look_at_ring
from domicile.testing.kube import FakeApiServer
from domicile.testing.sim.loop import World

SHARD = "shard.alpha.sharding.timebertt.dev/sites"
DRAIN = "drain.alpha.sharding.timebertt.dev/sites"


def test_install_prints_what_the_sharder_needs() -> None:
    done = CliRunner().invoke(app, ["ring", "install", "--resource", "example.com/websites"])
    assert done.exit_code == 0
    found = {one["kind"]: one for one in yaml.safe_load_all(done.output)}
    assert list(found) == [
        *("CustomResourceDefinition", "Namespace", "ServiceAccount", "ClusterRole"),
        *("ClusterRoleBinding", "Role", "RoleBinding", "Service", "Deployment"),
    ]
    rule = {"apiGroups": ["example.com"], "resources": ["websites"], "verbs": ["list", "patch"]}
    assert rule in found["ClusterRole"]["rules"]
    assert all("watch" not in one["verbs"] for one in found["ClusterRole"]["rules"][-1:])


def test_a_resource_that_is_none_is_a_usage_error() -> None:
    done = CliRunner().invoke(app, ["ring", "install", "--resource", "websites"])
    assert done.exit_code == 2
    done = CliRunner().invoke(app, ["ring", "sharder"])
    assert done.exit_code == 2
    assert "--service or --url" in done.output


def test_a_ring_is_shown_with_what_waits() -> None:
    world = World(1)
    server = FakeApiServer(random=world.stream("server"))
    client = KubeClient(server.exchange("a"), random=world.stream("client"))
    spec = {"resources": [{"group": "", "resource": "configmaps"}]}
    ring = {"metadata": {"name": "sites"}, "spec": spec}
    server.put("controllerrings", ring, "sharding.timebertt.dev")
    labels = {
        "alpha.sharding.timebertt.dev/controllerring": "sites",
        "alpha.sharding.timebertt.dev/state": "ready",
    }
    lease = {"metadata": {"name": "a", "labels": labels}, "spec": {"holderIdentity": "a"}}
    server.put("leases", lease, "coordination.k8s.io")
    for name, mine in (("x", {SHARD: "a"}), ("y", {SHARD: "a", DRAIN: "true"}), ("z", {})):
        server.put("configmaps", {"metadata": {"name": name, "labels": mine}})
    try:
        seen: dict[str, object] = {}

        async def body() -> None:
            seen.update(await look_at_ring(client, "sites"))

        world.run(body(), world.process("test"))
    finally:
        world.close()
    assert seen["instances"] == {"a": {"state": "ready", "holder": "a", "objects": 2}}
    assert seen["draining"] == [{"object": "configmaps default/y", "instance": "a"}]
    assert seen["unassigned"] == ["configmaps default/z"]
    assert seen["well"] is False


def test_metrics_have_the_names_of_the_wire() -> None:
    metrics = RingMetrics()
    of_ring = (("controllerring", "sites"), ("group", ""), ("resource", "configmaps"))
    metrics.count("movements", of_ring)
    metrics.show("sites", {"a": "ready"}, 1)
    text = write(metrics.families())
    assert (
        'controller_sharding_movements_total{controllerring="sites",group="",'
        'resource="configmaps"} 1' in text
    )
    assert (
        'controller_sharding_shard_state{controllerring="sites",shard="a",state="ready"} 1' in text
    )
    assert (
        'controller_sharding_controllerring_status_available_shards{controllerring="sites"} 1'
        in text
    )
    metrics.forget("sites")
    assert "shard_info{" not in write(metrics.families())
