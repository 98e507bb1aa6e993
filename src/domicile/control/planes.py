"""The control planes by name. Called by an incarnation, which names none of them itself.

A plane is one module of this package and one row here. A `control` that differs between the nodes
of one cluster must be refused when they join (RG-24): its name belongs into `ConfigRecord`, beside
the shards and the types, and into `core.state.agreement`, once there are two.
"""

from __future__ import annotations

from domicile.control.elected import Elected
from domicile.errors import ConfigError
from domicile.ports.control import ControlPlane, ControlWiring, PlaneTable

PLANES: PlaneTable = {"elected": Elected}


def make_plane(control: str, wiring: ControlWiring) -> ControlPlane:
    """The plane of that name for one incarnation; `ConfigError` if there is none."""
    plane = PLANES.get(control)
    if plane is None:
        known = ", ".join(repr(name) for name in PLANES)
        raise ConfigError(f"control={control!r} is no control plane; known are {known}")
    return plane(wiring)
