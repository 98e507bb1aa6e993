"""Which databases a replica group can keep: the registry of kinds, by name.

A kind is registered under a name: the built-in ones by this module, those of other packages by an
entry point of the group `domicile.failover` that has the kind's name. It is loaded when a
configuration first names it, never before. Nothing here opens a connection or starts a process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import ClassVar, Literal, Protocol, cast

from domicile.errors import ConfigError
from domicile.failover.driver import ReplicaDriver, ServerGate, ServerProcess

GROUP = "domicile.failover"
"""The group of entry points by which other packages register their kinds."""

Mode = Literal["async", "sync"]

BUILT_IN = {
    "postgresql": "domicile.failover.drivers.postgres:PostgresKind",
    "redis": "domicile.failover.drivers.valkey:ValkeyKind",
    "valkey": "domicile.failover.drivers.valkey:ValkeyKind",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlace:
    """Where one server is, and what its agent and its guard may do with it."""

    url: str
    """How agent and guard reach the server; a password may be in it, or come from a file."""
    folder: Path
    """Takes what is saved of lost writes, and the notes."""
    command: tuple[str, ...] = ()
    """Starts the server; empty: somebody else starts and stops it."""
    data: Path | None = None
    """The server's data directory, for kinds that make it or repair it."""
    options: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())
    """What only this kind knows. A kind refuses an option that it does not know."""
    answer_s: float = 1.0
    """How long the server may take to answer before it counts as down: the setting `probe_s`."""


class DatabaseKind(Protocol):
    """One kind of database. Its methods make objects and do no I/O, except `check`."""

    name: ClassVar[str]
    modes: ClassVar[tuple[Mode, ...]]
    options: ClassVar[tuple[str, ...]]
    """Names of the table `[server]` that only this kind has; they come in `ServerPlace.options`."""

    async def check(self, place: ServerPlace, mode: Mode) -> tuple[str, ...]:
        """Warnings about a server that may be down yet; `ConfigError` if it can never serve."""
        ...

    def driver(self, place: ServerPlace, mode: Mode) -> ReplicaDriver:
        """For the agent's process."""
        ...

    def gate(self, place: ServerPlace, mode: Mode) -> ServerGate:
        """For the guard's process."""
        ...

    def process(self, place: ServerPlace) -> ServerProcess | None:
        """For the guard's process; None: somebody else starts and stops the server."""
        ...


PARTS = ("name", "modes", "options", "check", "driver", "gate", "process")
"""What every kind has."""


def database_kind(name: str) -> DatabaseKind:
    """The kind of this name. `ConfigError` names those that exist, or why it can't be loaded."""
    others = {each.name: each for each in entry_points(group=GROUP)}
    if name in BUILT_IN:
        found = EntryPoint(name, BUILT_IN[name], GROUP)
    elif name in others:
        found = others[name]
    else:
        known = sorted({*BUILT_IN, *others})
        near = get_close_matches(name, known, 1)
        raise ConfigError(
            f"there is no database kind {name!r}"
            + (f"; did you mean {near[0]!r}?" if near else ".")
            + f" Known: {', '.join(known)}"
        )
    try:
        kind = cast("type[DatabaseKind]", found.load())
        made = kind()
    except ConfigError:
        raise
    except Exception as error:
        origin = "" if found.dist is None else f" (package {found.dist.name})"
        raise ConfigError(
            f"the database kind {name!r} can't be loaded from {found.value}{origin}: "
            f"{type(error).__name__}: {error}; repair or uninstall that package"
        ) from error
    missing = [part for part in PARTS if not hasattr(made, part)]
    if missing:
        raise ConfigError(
            f"the database kind {name!r} of {found.value} can't be used: it has no "
            f"{', '.join(missing)}; see domicile.failover.database_kinds.DatabaseKind"
        )
    return made
