"""What a process of `domicile.testing.processes.cluster` runs: a node or manager, until told to
leave.

The harness writes `MemberPlan` to a file, and `main` reads it here. The process dies with the one
that started it, so that nothing outlives a test run.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import importlib
import importlib.util
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from domicile.backends.wiring import LOOPBACK
from domicile.entity.model.entity import Entity
from domicile.errors import ConfigError
from domicile.incarnation.signals import LeaveSignals
from domicile.manager import Manager
from domicile.node import Node
from domicile.settings import Settings
from domicile.testing.processes.recorder import FileRecorder
from domicile.testing.processes.switches import Levers, install
from domicile.transports import tcp
from domicile.transports.tcp import prepare

_PR_SET_PDEATHSIG = 1
NEW_NETWORK = 0x40000000
_NEW_MOUNTS = 0x00020000
_BIND, _PRIVATE = 0x1000, 0x44000


class ImportPath(msgspec.Struct, frozen=True):
    """The place of a class: its module, the file of that module, its name in there."""

    module: str
    file: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


class Place(msgspec.Struct, frozen=True):
    """A member's network: the address it listens at, the one others dial, and the one it dials
    from.

    Empty texts leave that to the member itself. `namespace` is the network namespace to enter.
    """

    listen: str
    advertise: str
    source: str = ""
    namespace: str = ""


class MemberPlan(msgspec.Struct, frozen=True):
    """Everything that a member's process needs to know."""

    parent: int
    index: int
    store: str
    cluster: str
    node_id: str
    candidate: bool
    manager: bool
    entities: list[ImportPath]
    settings: dict[str, bool | int | float | str]
    loop: str
    protocols: tuple[int, int]
    records: str | None
    sys_path: list[str]
    place: Place
    version: str
    journal: str | None
    levers: str
    hosts: str = ""
    """A file that this process shall see as /etc/hosts."""


def import_path(kind: type[Entity]) -> ImportPath:
    """How another process can import a class; `ConfigError` if it can't."""
    module = sys.modules.get(kind.__module__)
    found: Any = module
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not kind or kind.__module__ == "__main__":
        raise ConfigError(
            f"{kind.__module__}:{kind.__qualname__} cannot be imported by another process: define "
            "the class at the top of a module that is not the program itself"
        )
    file = getattr(module, "__file__", None) or ""
    return ImportPath(kind.__module__, file, kind.__qualname__)


def import_class(path: ImportPath) -> type[Entity]:
    """The class at an import path."""
    found: Any = _module(path)
    for part in path.name.split("."):
        found = getattr(found, part)
    assert isinstance(found, type)
    assert issubclass(found, Entity)
    return found


def _module(path: ImportPath) -> ModuleType:
    """A module by its name, or else from its file: a test runner may have given it its own name."""
    try:
        return importlib.import_module(path.module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not path.file or not f"{path.module}.".startswith(f"{missing}."):
            raise
    spec = importlib.util.spec_from_file_location(path.module, path.file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path.file} is no Python file, {path} cannot be imported from it")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.module] = module
    spec.loader.exec_module(module)
    return module


def die_with(parent: int) -> None:
    """Be killed when the parent ends, also if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the process that started this node is gone")


def loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """A function that makes event loops of one kind; `ConfigError` if that kind is not
    available."""
    if name == "asyncio":
        return asyncio.new_event_loop
    if name != "uvloop":
        raise ConfigError(f'loop={name!r} is not known: use "asyncio" or "uvloop"')
    try:
        uvloop = importlib.import_module("uvloop")
    except ModuleNotFoundError as error:
        raise ConfigError('loop="uvloop" needs the package uvloop; install it') from error
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _member(plan: MemberPlan, meter: FileRecorder | None) -> Node | Manager:
    settings = Settings(**plan.settings)  # type: ignore[arg-type]
    listen, advertise = plan.place.listen or LOOPBACK, plan.place.advertise or None
    if plan.manager:
        return Manager(
            plan.store, cluster=plan.cluster, settings=settings, node_id=plan.node_id, meter=meter,
            listen=listen, advertise=advertise,
        )  # fmt: skip
    return Node(
        plan.store,
        cluster=plan.cluster,
        listen=listen,
        advertise=advertise,
        journal=plan.journal,
        version=plan.version or None,
        entities=[import_class(path) for path in plan.entities],
        candidate=plan.candidate,
        settings=settings,
        node_id=plan.node_id,
        meter=meter,
        _protocols=plan.protocols,
    )


async def _serve(member: Node | Manager) -> None:
    # Others see its record before it has joined: a signal that comes in between counts, too.
    with LeaveSignals() as signals:
        async with member:
            await member.run_until(signals.asked)


def enter_namespace(path: str) -> None:
    """Move this process into a network namespace. Call it before it has threads."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        system_call("setns", descriptor, NEW_NETWORK)
    finally:
        os.close(descriptor)


def see_hosts(path: str) -> None:
    """Let this process, and what it starts, see a file as /etc/hosts. As root, on Linux."""
    system_call("unshare", _NEW_MOUNTS)
    system_call("mount", b"none", b"/", None, _PRIVATE, None)
    system_call("mount", path.encode(), b"/etc/hosts", None, _BIND, None)


def system_call(name: str, *arguments: object) -> None:
    """Call a function of the C library that Python does not offer everywhere; raises `OSError`."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _dial_from(source: str) -> None:
    """Dial from this address, so that fault proxies know which node dials."""

    def from_here(sock: socket.socket) -> None:
        prepare(sock)
        try:
            sock.getpeername()
        except OSError:
            sock.bind((source, 0))

    setattr(tcp, "prepare", from_here)  # noqa: B010


def main() -> None:
    """Run the member that the file named by the first argument describes."""
    plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=MemberPlan)
    die_with(plan.parent)
    if plan.place.namespace:
        enter_namespace(plan.place.namespace)
    if plan.hosts:
        see_hosts(plan.hosts)
    if plan.place.source:
        _dial_from(plan.place.source)
    install(Levers(Path(plan.levers)), plan.index)
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    sys.path[:] = plan.sys_path
    recorder = None if plan.records is None else FileRecorder(Path(plan.records))
    member = _member(plan, recorder)
    try:
        with asyncio.Runner(loop_factory=loop_factory(plan.loop)) as runner:
            runner.run(_serve(member))
    finally:
        if recorder is not None:
            recorder.close()
