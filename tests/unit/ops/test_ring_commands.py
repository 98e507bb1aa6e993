"""`domicile ring`: what is printed, and what a ring looks like."""

from __future__ import annotations

from datetime import UTC, datetime
from io import StringIO
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from domicile.errors import ConfigError
from domicile.kube.conventions import GROUP as RING_GROUP
from domicile.kube.leases import InstanceState
from domicile.kube.ring_metrics import RingMetrics, ShownInstance
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.objects import ControllerRing, ObjectMeta, RingStatus
from domicile.observe.exposition import write
from domicile.ops.cli import app
from domicile.ops.ring import look_at_ring, ring_view
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
    verbs = ["get", "list", "patch"]
    rule = {"apiGroups": ["example.com"], "resources": ["websites"], "verbs": verbs}
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
        noted = {
            "time": "2026-01-01T00:00:00Z",
            "fieldsV1": {"f:metadata": {"f:labels": {f"f:{label}": {} for label in mine}}},
        }
        metadata = {"name": name, "labels": mine, "managedFields": [noted]}
        server.put("configmaps", {"metadata": metadata})
    try:
        seen: dict[str, object] = {}

        async def body() -> None:
            now = datetime(2026, 1, 1, 0, 1, 30, tzinfo=UTC).timestamp()
            seen.update(await look_at_ring(client, "sites", now=now))
            with pytest.raises(ConfigError, match="there are: sites"):
                await look_at_ring(client, "site")

        world.run(body(), world.process("test"))
    finally:
        world.close()
    assert seen["instances"] == {"a": {"state": "ready", "holder": "a", "objects": 2}}
    assert seen["draining"] == [{"object": "configmaps default/y", "instance": "a", "age_s": 90.0}]
    assert seen["unassigned"] == ["configmaps default/z"]
    assert seen["well"] is False


@pytest.mark.parametrize("width", [80, 120])
def test_a_ring_fits_the_terminal_whatever_its_names_are(width: int) -> None:
    long = "website-operator-" + "x" * 46
    seen = {
        "conditions": [
            {"type": "Ready", "status": "True", "reason": "ReconciliationSucceeded",
             "message": "2 instances, of which 1 is available"},
        ],
        "instances": {
            long: {"state": "ready", "holder": long, "objects": 98_765},
            "b": {"state": "uncertain", "holder": "b", "objects": 7},
        },
        "draining": [{"object": "websites.example.com a/b", "instance": "b", "age_s": 61.0}],
        "draining_count": 1,
        "unassigned": ["websites.example.com a/c"],
        "unassigned_count": 1,
    }  # fmt: skip
    console = Console(width=width, file=StringIO(), highlight=False)
    console.print(ring_view(seen))
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    text = "".join(line.strip() for line in lines)
    assert long[: width - 25] in text, "a name of 63 letters is folded at 80 columns"
    assert any(line.split()[-2:] == ["ready", "98765"] for line in lines)
    assert any("a/b at b, for 61 s" in line for line in lines)


def test_what_stands_in_the_way_is_told(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("clusters: []")
    done = CliRunner().invoke(app, ["ring", "status", "sites", "--kubeconfig", str(config)])
    assert done.exit_code == 2
    assert "has no context named" in done.output
    missing = CliRunner().invoke(app, ["ring", "status", "x", "--kubeconfig", str(tmp_path / "n")])
    assert missing.exit_code == 2
    assert "give --kubeconfig" in missing.output


def test_metrics_have_the_names_of_the_wire() -> None:
    metrics = RingMetrics()
    of_ring = (("controllerring", "sites"), ("group", ""), ("resource", "configmaps"))
    metrics.count("movements", of_ring)
    ring = ControllerRing(
        metadata=ObjectMeta(name="sites", uid="u1", generation=3),
        status=RingStatus(observed_generation=2),
    )
    instances = [
        ShownInstance("a", "default", "u2", InstanceState.READY),
        ShownInstance("b", "default", "u3", InstanceState.DEAD),
    ]
    metrics.show("sites", lambda: (ring, instances))
    text = write(metrics.families())
    of_ring_shown = '{controllerring="sites",uid="u1"}'
    of_a = 'namespace="default",shard="a",controllerring="sites"'
    for shown in (
        'movements_total{controllerring="sites",group="",resource="configmaps"} 1',
        f'shard_info{{{of_a},uid="u2"}} 1',
        f'shard_state{{{of_a},state="ready"}} 1',
        f"controllerring_metadata_generation{of_ring_shown} 3",
        f"controllerring_observed_generation{of_ring_shown} 2",
        f"controllerring_status_shards{of_ring_shown} 2",
        f"controllerring_status_available_shards{of_ring_shown} 1",
    ):
        assert f"\ncontroller_sharding_{shown}\n" in text, shown
    # A state set: each state has a sample, and one of them is 1.
    others = ("expired", "uncertain", "dead", "orphaned", "unknown")
    for state in others:
        assert f'controller_sharding_shard_state{{{of_a},state="{state}"}} 0' in text
    metrics.forget("sites")
    assert "shard_info{" not in write(metrics.families())


def test_objects_beside_the_sharder_are_left_out_wherever_it_runs() -> None:
    world = World(1)
    server = FakeApiServer(random=world.stream("server"))
    client = KubeClient(server.exchange("a"), random=world.stream("client"))
    spec = {"resources": [{"group": "", "resource": "configmaps"}]}
    server.put("controllerrings", {"metadata": {"name": "sites"}, "spec": spec}, RING_GROUP)
    for name in ("controllers", "sharding-system"):
        server.put("namespaces", {"metadata": {"name": name}})
        server.put("configmaps", {"metadata": {"name": f"in-{name}", "namespace": name}})
    labels = {"app.kubernetes.io/name": "domicile-sharder"}
    metadata = {"name": "domicile-sharder", "namespace": "controllers", "labels": labels}
    server.put("leases", {"metadata": metadata, "spec": {}}, "coordination.k8s.io")
    try:
        seen: dict[str, object] = {}

        async def body() -> None:
            seen.update(await look_at_ring(client, "sites"))

        world.run(body(), world.process("test"))
    finally:
        world.close()
    assert seen["unassigned"] == ["configmaps sharding-system/in-sharding-system"]
