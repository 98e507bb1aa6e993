"""The peers' environments: one each, made by uv from locked files, kept in a cache directory.

A peer that cannot be had is a `Missing` with a reason, never silence.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent / ".bench"
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
INSTALL_S = 600.0


class Missing(Exception):
    """Why a peer is not measured."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Something to compare with. `systems` are the ways to send that it shows, with titles."""

    name: str
    module: str
    systems: dict[str, str]
    package: str
    oldest: tuple[int, int] = (3, 11)
    local: bool = False
    """Whether its server can call itself."""
    idle: int = 0
    """How many idle entities it is weighed with; 0 if it has none."""
    wheels: bool = True
    """Whether all that it needs comes as wheels; else uv builds what does not."""

    @property
    def requirements(self) -> Path:
        """Its locked file."""
        return HERE / f"requirements-{self.name}.txt"


PEERS = (
    Peer("grpc", "proving.benchmarks.peers.grpc_aio",
         {"unary": "grpc.aio unary", "stream": "grpc.aio stream"}, "grpcio"),
    Peer("aiohttp", "proving.benchmarks.peers.aiohttp_http", {"http": "aiohttp"}, "aiohttp"),
    Peer("nats", "proving.benchmarks.peers.nats_reply", {"nats": "NATS"}, "nats-py"),
    Peer("casty", "proving.benchmarks.peers.casty_actor", {"casty": "casty"}, "casty", (3, 12),
         local=True, idle=50_000),
    Peer("ray", "proving.benchmarks.peers.ray_actor", {"ray": "Ray"}, "ray"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a peer runs."""

    python: str
    python_version: str
    package_version: str


def environment(peer: Peer, cache: Path, python: tuple[str, str] | None = None) -> Environment:
    """A peer's environment, made if need be; `Missing` if that is impossible.

    `python`: an interpreter and its version, if not any that is new enough will do.
    """
    if not peer.requirements.exists():
        raise Missing(f"{peer.requirements.name} is not there; compile it from its .in file")
    base, version = interpreter(peer.oldest) if python is None else python
    place = cache / f"{peer.name}-{version}"
    program = place / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    wanted = hashlib.sha256(peer.requirements.read_bytes() + base.encode()).hexdigest()
    stamp = place / ".ready"
    if not (stamp.exists() and stamp.read_text(encoding="ascii") == wanted):
        cache.mkdir(parents=True, exist_ok=True)
        uv = _uv()
        _run([uv, "venv", "--quiet", "--clear", "--python", base, str(place)])
        _run([
            uv, "pip", "install", "--quiet", "--python", str(program),
            *(["--only-binary", ":all:"] if peer.wheels else []),
            "--require-hashes", "--requirements", str(peer.requirements),
        ])  # fmt: skip
        stamp.write_text(wanted, encoding="ascii")
    code = f"from importlib.metadata import version; print(version({peer.package!r}))"
    return Environment(str(program), version, _run([str(program), "-c", code]).strip())


def interpreter(oldest: tuple[int, int]) -> tuple[str, str]:
    """This Python, or the oldest other one that is new enough, and its version."""
    found = [(known, path) for path in _candidates() if (known := version_of(path)) >= oldest]
    if sys.version_info[:2] >= oldest:
        found = [(sys.version_info[:2], sys.executable)]
    if not found:
        raise Missing(
            f"it needs Python {'.'.join(map(str, oldest))} or newer, and there is none here"
        )
    (major, minor), path = min(found)
    return path, f"{major}.{minor}"


def _candidates() -> Iterator[str]:
    for minor in range(20, 11, -1):
        path = shutil.which(f"python3.{minor}")
        if path is not None:
            yield path
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, root.glob("versions/*/bin/python"))
    data = Path(os.environ.get("XDG_DATA_HOME", Path.home() / ".local" / "share"))
    yield from map(str, data.glob("uv/python/*/bin/python3"))


def version_of(path: str) -> tuple[int, int]:
    """Of an interpreter; (0, 0) if it does not run: version managers leave stand-ins on PATH."""
    code = "import sys; print(*sys.version_info[:2])"
    try:
        ran = subprocess.run(
            [path, "-I", "-c", code], capture_output=True, text=True, check=True, timeout=20.0
        )
        major, minor = map(int, ran.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0, 0
    return major, minor


def _uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        raise Missing("its environment is made by uv, which is not installed")
    return found


def _run(command: list[str]) -> str:
    env = dict(os.environ)
    if AUTHORITIES.exists():
        env.setdefault("UV_SYSTEM_CERTS", "1")
    env.pop("PYTHONPATH", None)
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=INSTALL_S, env=env
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(f"its environment can't be made: {error}") from error
    if ran.returncode:
        said = [line.strip() for line in ran.stderr.splitlines() if line.strip()]
        raise Missing(f"its environment can't be made: {said[-1] if said else command}")
    return ran.stdout
