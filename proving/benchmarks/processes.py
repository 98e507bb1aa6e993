"""Measured processes as their parent sees them. Whoever starts one closes it.

The CPU time of a part is that of its process and of all that it started, servers included.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

ANSWER_S = 180.0
LEAVE_S = 20.0
ROOT = Path(__file__).resolve().parents[2]


class PartFailed(Exception):
    """A measured process did not do what was asked of it; the text says why."""


class Part:
    """One process."""

    def __init__(
        self, python: str, module: str, name: str, options: Mapping[str, Any], directory: Path
    ) -> None:
        self.name = f"{module.rpartition('.')[2]} {name}"
        self._stderr = TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        paths = [str(ROOT)]
        if python == sys.executable and os.environ.get("PYTHONPATH"):
            paths.insert(0, os.environ["PYTHONPATH"])
        self._process = subprocess.Popen(
            [
                python, "-P", "-m", "proving.benchmarks.part",
                module, name, json.dumps(dict(options)),
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, cwd=directory,
            text=True, bufsize=1, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ready(self) -> str:
        """Where it is, once it can be used."""
        return str(self._answer()["ready"])

    def run(self, **wanted: Any) -> dict[str, Any]:
        """What it answers to a wish; `NotImplementedError` if it can't do such a thing."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(wanted) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failed("ended early") from error
        answer = self._answer()
        if "cannot" in answer:
            raise NotImplementedError(answer["cannot"])
        return answer

    def close(self) -> None:
        """Have it leave; kill it, and what it started, if it does not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        below = {pid: _started(pid) for pid in descendants(self.pid)}
        try:
            self._process.stdin.close()
            self._process.wait(LEAVE_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        finally:
            self._process.stdout.close()
            self._stderr.close()
            for pid, started in below.items():
                if started and _started(pid) == started:
                    _kill(pid)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], ANSWER_S)[0]:
            raise self._failed(f"has not answered for {ANSWER_S:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._failed("ended early")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self, what: str) -> PartFailed:
        self._stderr.seek(0)
        said = [line for line in self._stderr.read().splitlines() if line.strip()]
        return PartFailed(f"{self.name} {what}: {said[-1].strip() if said else 'it said nothing'}")


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _stat(pid: int | str) -> list[str]:
    """What the kernel tells of a process, from its state on; nothing if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _started(pid: int) -> str:
    """When a process began: a number of a process may be used again, the two together not."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] != "Z" else ""


def descendants(pid: int) -> list[int]:
    """A process and all that it started, as far as that can be known here."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(entry.name)
        if fields:
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    pending = [pid]
    while pending:
        one = pending.pop()
        found.append(one)
        pending += children.get(one, [])
    return found


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process so far, to the nanosecond."""
    used_ns = 0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            used_ns += int(thread.read_text(encoding="ascii").split()[0])
        except OSError:
            continue
    return used_ns / 1e9


def cpu_of_each_s(*parts: Part) -> dict[int, float] | None:
    """What each process of parts has used of a processor; None where nobody knows."""
    if sys.platform != "linux":
        return None
    return {pid: cpu_s(pid) for part in parts for pid in descendants(part.pid)}


def cpu_of_all_s(*parts: Part) -> float | None:
    """What parts and all that they started have used of a processor; None where nobody knows."""
    each = cpu_of_each_s(*parts)
    return None if each is None else sum(each.values())
