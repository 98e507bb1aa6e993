"""Is an instance there? By what was seen to change, on our own clock (K1)."""

from __future__ import annotations

import pytest

from domicile.errors import ConfigError
from domicile.kube.leases import InstanceState, ObservedLease, observed
from domicile.kube.member import Ring
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.objects import KubeLease, LeaseSpec, ObjectMeta
from domicile.testing.kube import FakeApiServer

S = InstanceState


def lease(
    holder: str | None = "a",
    renewed: str | None = "2020-01-01T00:00:00.000000Z",
    version: str = "1",
    duration_s: int | None = 15,
) -> KubeLease:
    spec = LeaseSpec(holder_identity=holder, renew_time=renewed, lease_duration_seconds=duration_s)
    return KubeLease(metadata=ObjectMeta(name="a", resource_version=version), spec=spec)


def test_states_follow_our_own_clock_whatever_its_times_say() -> None:
    seen = observed(lease(renewed="1999-01-01T00:00:00.000000Z"), None, 100.0)
    assert [seen.state(at) for at in (100.0, 114.9, 115.0, 129.9, 130.0)] == [
        *(S.READY, S.READY, S.EXPIRED, S.EXPIRED, S.UNCERTAIN),
    ]
    assert seen.next_change(100.0) == 115.0
    assert seen.next_change(115.0) == 130.0
    assert seen.next_change(130.0) is None


def test_a_renewal_counts_from_when_it_was_seen() -> None:
    first = observed(lease(), None, 100.0)
    second = observed(lease(renewed="2020-01-01T00:00:05.000000Z", version="2"), first, 120.0)
    assert second.state(134.0) is S.READY


def test_a_label_is_no_renewal() -> None:
    first = observed(lease(), None, 100.0)
    second = observed(lease(version="2"), first, 120.0)
    assert second.changed_at == 100.0
    assert second.state(131.0) is S.UNCERTAIN


@pytest.mark.parametrize("holder", [None, "", "shardlease-controller"])
def test_dead_and_orphaned(holder: str | None) -> None:
    seen = observed(lease(holder=holder), None, 100.0)
    assert seen.state(159.0) is S.DEAD
    assert seen.state(160.0) is S.ORPHANED
    assert not seen.state(160.0).available
    assert seen.next_change(100.0) == 160.0


def test_a_lease_without_times_ends_too() -> None:
    seen: ObservedLease = observed(lease(renewed=None, duration_s=None), None, 100.0)
    assert seen.state(130.0) is S.UNCERTAIN


def test_a_duration_counts_in_full() -> None:
    """Its holder believes in it: an observer that believes in less moves its objects too early."""
    seen = observed(lease(duration_s=3600), None, 100.0)
    assert seen.state(7299.0) is S.EXPIRED
    assert seen.state(7300.0) is S.UNCERTAIN


@pytest.mark.parametrize(("duration_s", "said"), [(2, "too short"), (601, "too long")])
def test_an_instance_of_ours_asks_for_a_sensible_duration(duration_s: int, said: str) -> None:
    client = KubeClient(FakeApiServer().exchange("a"))
    with pytest.raises(ConfigError, match=f"duration_s={duration_s} is {said}"):
        Ring("sites").member(client, instance="a", namespace="x", duration_s=duration_s)
