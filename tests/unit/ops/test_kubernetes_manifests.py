"""`domicile kubernetes manifests`: what is printed fits together, and the page shows the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import domicile
from domicile import Entity, Node, handler
from domicile.backends.registry import OpenOptions, open_health
from domicile.config import from_environment
from domicile.errors import ConfigError
from domicile.ops.cli import app
from domicile.ops.entity_manifests import DRAIN_S

PAGE = Path(domicile.__file__).parents[2] / "docs" / "how-to" / "deploy-on-kubernetes.md"
RIGHTS = PAGE.with_name("run-on-kubernetes-store.md")
LINE = ["kubernetes", "manifests", "shop", "--app", "shop.main:node", "--image", "shop:1"]
ETCD = ["--store", "etcd://etcd:2379"]


class Till(Entity, name="till"):
    @handler
    async def hello(self) -> None: ...


def printed(*more: str) -> list[dict[str, Any]]:
    done = CliRunner().invoke(app, [*LINE, *ETCD, *more])
    assert done.exit_code == 0, done.output
    return list(yaml.safe_load_all(done.stdout))


def container(found: list[dict[str, Any]]) -> dict[str, Any]:
    (workload,) = (one for one in found if one["kind"] in ("Deployment", "StatefulSet"))
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    mine: dict[str, Any] = only
    return mine


def rules_of_store(*more: str) -> dict[str, Any] | None:
    name = "default-shop-store"
    found = [one for one in printed(*more) if one["metadata"]["name"] == name]
    for one in found:
        assert one["metadata"]["namespace"] == "bank"
    return next((one for one in found if one["kind"] == "Role"), None)


def test_a_store_of_kubernetes_needs_rights_in_its_namespace() -> None:
    role = rules_of_store("--store", "kubernetes://bank?store=tills")
    assert role is not None
    on_page = RIGHTS.read_text().partition("kind: Role\n")[2].partition("```")[0]
    assert role["rules"] == yaml.safe_load(on_page)["rules"]
    assert rules_of_store() is None
    assert rules_of_store("--store", "kubernetes://bank?kubeconfig=/etc/other") is None


def test_a_store_without_a_namespace_is_told() -> None:
    done = CliRunner().invoke(app, [*LINE, "--store", "kubernetes://"])
    assert done.exit_code == 2
    assert "names no namespace" in done.output


@pytest.mark.parametrize("workload", ["Deployment", "StatefulSet"])
def test_what_is_printed_fits_together(workload: str) -> None:
    found = printed("--workload", workload, "--version", "2.1.0", "--namespace", "live")
    kinds = [one["kind"] for one in found]
    assert kinds == [
        *("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"),
        *("Service", workload, "PodDisruptionBudget"),
    ]
    for one in found:
        everywhere = one["kind"].startswith("Cluster")
        assert one["metadata"].get("namespace", "") == ("" if everywhere else "live")
        assert one["metadata"]["name"] == ("live-shop-health" if everywhere else "shop")
    by_kind = dict(zip(kinds, found, strict=True))
    for kind in ("Role", "ClusterRole"):
        binding = by_kind[f"{kind}Binding"]
        assert binding["roleRef"]["name"] == by_kind[kind]["metadata"]["name"]
        assert binding["subjects"][0]["name"] == by_kind["ServiceAccount"]["metadata"]["name"]
    spec = by_kind[workload]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    for selector in (
        spec["selector"]["matchLabels"],
        by_kind["Service"]["spec"]["selector"],
        by_kind["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        # A version in a selector would leave the pods of an older version without one.
        assert selector == {"app.kubernetes.io/name": "shop"}
        assert selector.items() <= labels.items()
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > DRAIN_S + 40
    volumes = [one["name"] for one in pod["volumes"]]
    mounts = container(found)["volumeMounts"]
    assert [one["name"] for one in mounts] == volumes
    ports = {one["name"]: one["containerPort"] for one in container(found)["ports"]}
    assert {one["name"]: one["port"] for one in by_kind["Service"]["spec"]["ports"]} == ports


def test_the_environment_is_what_a_node_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = container(printed("--version", "2.1.0"))
    given = {one["name"]: one.get("value", "x" * 32) for one in found["env"]}
    given["DOMICILE_VERSION"] = "2.1.0"
    settings = from_environment(given)
    assert caplog.text == "", "a variable that nothing reads"
    assert settings.http == "0.0.0.0:9464"
    assert settings.health == f"kubernetes://?locks={found['volumeMounts'][0]['mountPath']}"
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="set KUBECONFIG"):  # as far as one can get outside a pod
        open_health(settings.health, OpenOptions("test"))
    monkeypatch.setenv("DOMICILE_VERSION", "2.1.0")
    node = Node("memory://x", entities=[Till])
    assert node._version == "2.1.0"  # pyright: ignore[reportPrivateUsage]
    assert Node("memory://x", entities=[Till], version="3")._version == "3"  # pyright: ignore[reportPrivateUsage]


def test_without_a_version_nobody_claims_one() -> None:
    found = printed()
    assert "DOMICILE_VERSION" not in [one["name"] for one in container(found)["env"]]
    assert all("app.kubernetes.io/version" not in one["metadata"]["labels"] for one in found)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--store", "sqlite:///x.db"], "pods run on several machines"),
        (["--store", "memory://x"], "pods run on several machines"),
        (["--store", "nonsense"], "is not one of the known kinds"),
        ([*ETCD, "--replicas", "0"], "--replicas"),
    ],
)
def test_what_can_not_work_is_told(more: list[str], said: str) -> None:
    done = CliRunner().invoke(app, [*LINE, *more])
    assert done.exit_code == 2
    assert said in re.sub(r"\s+", " ", done.output)


def test_a_password_in_the_url_is_warned_of() -> None:
    done = CliRunner().invoke(app, [*LINE, "--store", "etcd://me:secret@etcd:2379"])
    assert "put it into the Secret" in done.stderr


def test_the_page_shows_what_is_printed() -> None:
    text = PAGE.read_text(encoding="utf-8")
    (shown,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    real = container(printed())
    for key, value in yaml.safe_load(shown).items():
        assert real[key] == value
    (line,) = re.findall(r"^(domicile kubernetes .*?) >", text, re.DOTALL | re.MULTILINE)
    words = line.replace("\\\n", " ").split()[1:]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
