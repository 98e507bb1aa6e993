"""When a pod's processes can never run again: what counts as proof, and what does not (C9). Pure.

`pod_health` asks the API server and comes here with the answers. Two proofs count:

- The pod has ended: its phase is `Succeeded` or `Failed`, and each of its containers terminated. A
  pod never leaves such a phase. A container that terminated in another phase may have been started
  again by the time that we read of it, and our process may be in the new one.
- No pod of that uid exists, and its machine is gone from the API server or is marked as out of
  service. A pod that is missing proves nothing by itself: `kubectl delete --force` removes it
  without asking its machine.
"""

from __future__ import annotations

import msgspec

from domicile.kubeapi.objects import ContainerStatus, KubeNode, KubePod
from domicile.ports.health import Verdict

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
"""The taint by which an operator, or a controller with access to the machine's power, says that it
is off."""

ENDED = ("Succeeded", "Failed")

_SCHEME = "kubernetes:"


class PodPlace(msgspec.Struct, frozen=True):
    """The pod of an incarnation, as its node's record names it."""

    cluster: str
    """The uid of the namespace kube-system: pods of another Kubernetes cluster are not judged."""
    machine: str
    namespace: str
    name: str
    uid: str

    def text(self) -> str:
        """For the record. None of the parts may contain a slash."""
        parts = (self.cluster, self.machine, self.namespace, self.name, self.uid)
        return _SCHEME + "/".join(parts)


def parse_place(text: str) -> PodPlace | None:
    """The place from a record; None if it is no pod, or not fully known."""
    if not text.startswith(_SCHEME):
        return None
    parts = text.removeprefix(_SCHEME).split("/")
    return PodPlace(*parts) if len(parts) == 5 and all(parts) else None


def proof_in_pod(pod: KubePod) -> str:
    """The proof that no process of this pod runs or will run; empty if there is none."""
    status = pod.status
    wanted = {container.name for container in pod.spec.containers}
    ended = {one.name for one in status.container_statuses if one.state.terminated is not None}
    others = (*status.init_container_statuses, *status.ephemeral_container_statuses)
    if status.phase not in ENDED or not wanted or wanted - ended or any(map(_may_run, others)):
        return ""
    return f"{shown_pod(pod)} is {status.phase}: all of its containers have terminated"


def proof_in_machine(place: PodPlace, machine: KubeNode | None) -> str:
    """The proof for a pod of which it is certain that it does not exist; `None`: nor does its
    machine."""
    lost = f"pod {place.namespace}/{place.name} (uid {place.uid}) is gone, and its machine"
    if machine is None:
        return f"{lost} {place.machine} is gone, too"
    if any(taint.key == OUT_OF_SERVICE for taint in machine.spec.taints):
        return f"{lost} {place.machine} is marked as out of service ({OUT_OF_SERVICE})"
    return ""


def seems(pod: KubePod) -> Verdict:
    """Of a pod without proof: ALIVE if its containers run and none was ever started again."""
    statuses = pod.status.container_statuses
    runs = bool(statuses) and all(one.state.running is not None for one in statuses)
    first = all(one.restart_count == 0 for one in statuses)
    alive = pod.status.phase == "Running" and runs and first
    return Verdict.ALIVE if alive else Verdict.UNKNOWN


def shown_pod(pod: KubePod) -> str:
    """A pod for people."""
    metadata = pod.metadata
    return f"pod {metadata.namespace}/{metadata.name} (uid {metadata.uid})"


def _may_run(status: ContainerStatus) -> bool:
    return status.state.running is not None
