"""What a run of the benchmarks measures and how it goes on: systems, rounds, stages, the report.

Driven by `proving.benchmarks.run`. A system that can't be measured gets a reason, never silence.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import socket
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from proving.benchmarks import certificates, pause, recovery, seeds
from proving.benchmarks.caller import PAYLOAD_BYTES
from proving.benchmarks.environments import Missing, Peer, environment
from proving.benchmarks.processes import Part, PartFailed, cpu_of_each_s
from proving.benchmarks.report import OURS, Report, is_ours

DEPTHS = (1, 100, 1_000)
NEW_DEPTH = 100
STAGES = ("messages", "idle", "pause", "recovery", "seed")
TLS_MODULE = "domicile.transports.tls"

Tell = Callable[[str], None]
Kind = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything."""

    rounds: int = 5
    seconds: float = 2.0
    warm_s: float = 0.5
    entities: int = 1_000
    idle: int = 1_000_000
    moves: int = 20
    kills: int = 10
    seeds: int = 5


QUICK = Scale(
    rounds=1, seconds=0.01, warm_s=0.0, entities=20, idle=300, moves=1, kills=1, seeds=1
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class System:
    """Two processes, and the columns they fill: `shown` are names in the part, keys, titles."""

    name: str
    python: str
    module: str
    loop: str
    version: str
    python_version: str
    shown: tuple[tuple[str, str, str], ...]
    local: bool = False
    fresh: bool = False
    """Whether there are entities that can be new."""
    idle: int = 0
    tls: bool = False

    def kinds(self) -> Iterator[Kind]:
        """What is measured; what leaves many entities behind comes last."""
        places = ("remote", "local") if self.local else ("remote",)
        for where in places:
            for what in ("ask", "tell"):
                yield from ((where, what, depth) for depth in DEPTHS)
        if self.fresh:
            yield from ((where, "new", NEW_DEPTH) for where in places)


@dataclass(slots=True)
class Bench:
    """One run: what is measured, what was found, and what could not be measured."""

    scale: Scale
    tell: Tell
    systems: list[System] = field(default_factory=list[System])
    missing: dict[str, str] = field(default_factory=dict[str, str])
    found: dict[tuple[str, str, int, str], list[dict[str, float]]] = field(
        default_factory=dict[tuple[str, str, int, str], list[dict[str, float]]]
    )
    single: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    failed: list[str] = field(default_factory=list[str])
    """What of Domicile's own could not be measured although it is there."""
    _beyond: set[tuple[str, str, str, int]] = field(default_factory=set[tuple[str, str, str, int]])
    """What peers have failed at; they are not asked for it again."""

    def attempt(self, stage: str) -> None:
        """One stage; if it fails, the others are still worth having."""
        try:
            getattr(self, stage)()
        except Exception as error:
            traceback.print_exc()
            self._fail(stage, f"{type(error).__name__}: {error}".splitlines()[0])

    def _fail(self, what: str, why: str) -> None:
        self.missing[what] = why
        self.failed.append(what)

    # messages

    def messages(self) -> None:
        """Asks and tells of every system, round after round, each round in another order."""
        for turn in range(self.scale.rounds):
            at = turn % max(1, len(self.systems))
            for system in [*self.systems[at:], *self.systems[:at]]:
                try:
                    self._round(system)
                except (PartFailed, Missing) as error:
                    self._leave_out(system, str(error))
                self.tell(f"round {turn + 1} of {self.scale.rounds}: {system.name}")

    def _round(self, system: System) -> None:
        left = [kind for kind in system.kinds() if (system.name, *kind) not in self._beyond]
        while left:
            try:
                with ExitStack() as stack:
                    self._measure(system, left, stack)
            except PartFailed as error:
                if not left or any(is_ours(key) for _, key, _ in system.shown):
                    raise
                # A peer that fails at one thing is still measured at the others.
                self._give_up(system, left.pop(0), str(error))

    def _give_up(self, system: System, kind: tuple[str, str, int], why: str) -> None:
        where, what, depth = kind
        self._beyond.add((system.name, *kind))
        self.missing[f"{system.name}, {where} {what}, {depth:,} in flight"] = why
        for _, key, _ in system.shown:
            self.found.pop((*kind, key), None)

    def _measure(self, system: System, left: list[tuple[str, str, int]], stack: ExitStack) -> None:
        """What is left to be measured, as far as it gets."""
        try:
            server, client = self._pair(system, stack)
        except PartFailed as error:
            raise Missing(str(error)) from error
        while left:
            where, what, depth = left[0]
            for shown, key, _ in system.shown:
                caller, *others = (client, server) if where == "remote" else (server,)
                before_s = cpu_of_each_s(caller, *others)
                told = caller.run(
                    system=shown, what=what, depth=depth, seconds=self.scale.seconds,
                    warm_s=self.scale.warm_s,
                )  # fmt: skip
                after_s = cpu_of_each_s(caller, *others)
                one = {
                    "per_s": told["count"] / told["took_s"],
                    **{name: told[name] for name in ("p50_s", "p99_s", "max_s")},
                }
                if before_s is not None and after_s is not None:
                    used = [now_s - before_s.get(pid, 0.0) for pid, now_s in after_s.items()]
                    one["cpu_s"] = sum(used) / told["all"]
                    one["busiest_s"] = max(used) / told["all"]
                self.found.setdefault((where, what, depth, key), []).append(one)
            del left[0]

    def _pair(self, system: System, stack: ExitStack, *, alone: bool = False) -> tuple[Part, Part]:
        """Server and client; the server twice if it is to be alone."""
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="domicile-bench-")))
        options: dict[str, Any] = {
            "loop": system.loop, "entities": self.scale.entities, "where": "sqlite:///bench.db",
        }  # fmt: skip
        if system.tls:
            options |= {"tls": str(certificates.make(place / "tls")), "port": _free_port()}

        def part(name: str) -> Part:
            made = Part(system.python, system.module, name, options, place)
            stack.callback(made.close)
            options["where"] = made.ready()
            return made

        server = part("server")
        return server, server if alone else part("client")

    def _leave_out(self, system: System, why: str) -> None:
        self.systems.remove(system)
        for _, key, title in system.shown:
            if is_ours(key):
                self._fail(title, why)
            self.missing[title] = why
            for name in [name for name in self.found if name[3] == key]:
                del self.found[name]

    # the rest

    def idle(self) -> None:
        """Bytes per idle entity, each round in a fresh process."""
        for system in list(self.systems):
            if not system.idle:
                continue
            shown, key, title = system.shown[0]
            rounds: list[float] = []
            try:
                for turn in range(self.scale.rounds):
                    with ExitStack() as stack:
                        server, _ = self._pair(system, stack, alone=True)
                        told = server.run(system=shown, what="idle", count=system.idle)
                        rounds.append(told["bytes"])
                    self.tell(f"round {turn + 1} of {self.scale.rounds}: idle entities of {title}")
            except (PartFailed, NotImplementedError) as error:
                self.missing[f"bytes per idle entity of {title}"] = str(error)
                continue
            name = f"idle entity of {title}, of {system.idle:,}"
            self._single("idle" if key == OURS else f"idle-{key}", name, "bytes", rounds)

    def pause(self) -> None:
        """Hand-offs under an open-loop caller."""
        told = asyncio.run(pause.measure(self.scale.moves, self._loop()))
        title = f"of {self.scale.moves} moves of a shard"
        self._single("pause", f"longest gap between answers, {title}", "ms", _ms(told.gaps_s))
        self._single("slowest", f"slowest ask, {title}", "ms", _ms(told.slowest_s))
        self._single(
            "quiet", "longest gap between answers, for as long without a move", "ms",
            _ms(told.quiet_s),
        )  # fmt: skip
        self.tell(f"{self.scale.moves} moves")

    def recovery(self) -> None:
        """Crashes."""
        answers, serves = asyncio.run(recovery.measure(self.scale.kills, self._loop()))
        title = f"after SIGKILL, of {self.scale.kills}"
        self._single("answered", f"first answer {title}", "ms", _ms(answers))
        self._single("served", f"all shards served {title}", "ms", _ms(serves))
        self.tell(f"{self.scale.kills} kills")

    def seed(self) -> None:
        """What a simulated cluster costs."""
        rounds = seeds.measure(self.scale.rounds, self.scale.seeds)
        name = f"CPU time of a seed of the campaign, median of {self.scale.seeds}"
        self._single("seed", name, "s", rounds)
        self.tell("seeds")

    def _single(self, key: str, name: str, unit: str, rounds: list[float]) -> None:
        self.single.append(
            {"key": key, "name": name, "unit": unit, "median": median(rounds), "rounds": rounds}
        )

    def _loop(self) -> str:
        return "uvloop" if _has_uvloop() else "asyncio"

    def report(self, took_s: float, load: float, quick: bool) -> Report:
        """Everything, for tables and for machines."""
        return {
            "domicile": version("domicile"),
            "python": platform.python_version(),
            "build": python_build(),
            "system": f"{platform.system()} {platform.machine()}",
            "cpus": os.cpu_count(),
            "load": load,
            "quick": quick,
            "payload_bytes": PAYLOAD_BYTES,
            "entities": self.scale.entities,
            "rounds": self.scale.rounds,
            "round_s": self.scale.seconds,
            "warm_s": self.scale.warm_s,
            "took_s": took_s,
            "systems": [
                {
                    "key": key, "title": title, "loop": one.loop, "version": one.version,
                    "python": one.python_version,
                }
                for one in self.systems
                for _, key, title in one.shown
            ],
            "missing": self.missing,
            "failed": self.failed,
            "rows": [
                {
                    "where": where, "what": what, "in_flight": depth, "system": key,
                    **{
                        name: median(one[name] for one in rounds) if name in rounds[0] else None
                        for name in (
                            "per_s", "p50_s", "p99_s", "max_s", "cpu_s", "busiest_s",
                        )
                    },
                    "rounds": rounds,
                }
                for (where, what, depth, key), rounds in self.found.items()
            ],
            "single": self.single,
        }  # fmt: skip


def python_build() -> str:
    """How this Python was built: figures depend on it."""
    given = str(sysconfig.get_config_var("CONFIG_ARGS") or "")
    found = [name for name in ("--enable-optimizations", "--with-lto") if name in given]
    return f"{platform.python_compiler()}, {' '.join(found) or 'without optimizations'}"


def own(scale: Scale, missing: dict[str, str]) -> list[System]:
    """Domicile on both loops, and with TLS."""
    plain = System(
        "Domicile", sys.executable, "proving.benchmarks.home", "uvloop", version("domicile"),
        platform.python_version(), (("domicile", OURS, "Domicile"),), True, True, scale.idle,
    )  # fmt: skip
    on_asyncio = replace(
        plain, name="Domicile on asyncio", loop="asyncio", idle=0,
        shown=(("domicile", f"{OURS}-asyncio", "on asyncio"),),
    )  # fmt: skip
    if not _has_uvloop():
        missing["uvloop"] = "it is not installed, so Domicile was measured on asyncio"
        return [replace(plain, loop="asyncio")]
    if importlib.util.find_spec(TLS_MODULE) is None:
        missing["with TLS"] = "this version of Domicile has none"
        return [plain, on_asyncio]
    with_tls = replace(
        plain, name="Domicile with TLS", local=False, fresh=False, idle=0, tls=True,
        shown=(("domicile", f"{OURS}-tls", "with TLS"),),
    )  # fmt: skip
    return [plain, on_asyncio, with_tls]


def peers(
    wanted: Sequence[Peer], loops: Sequence[str], cache: Path, missing: dict[str, str], tell: Tell
) -> Iterator[System]:
    """Those that can be had; the others get a reason."""
    for peer in wanted:
        try:
            found = environment(peer, cache)
        except Missing as error:
            missing.update(dict.fromkeys(peer.systems.values(), str(error)))
            continue
        tell(f"{peer.name} {found.package_version} on Python {found.python_version}")
        for loop in loops:
            mark = "" if loop == loops[0] else f", {loop}"
            yield System(
                f"{peer.name}{mark}", found.python, peer.module, loop, found.package_version,
                found.python_version,
                tuple(
                    (key, f"{key}{'@' if mark else ''}{mark[2:]}", f"{title}{mark}")
                    for key, title in peer.systems.items()
                ),
                peer.local, peer.local, 0 if mark else peer.idle,
            )  # fmt: skip


def _ms(seconds: Sequence[float]) -> list[float]:
    return [1_000 * one for one in seconds]


def _has_uvloop() -> bool:
    return importlib.util.find_spec("uvloop") is not None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port
