"""Runs the console sessions of a page for real and compares what they print.

A ```` ```console ```` block holds commands after `$ ` and their output; a command that ends with a
backslash goes on in the next line. `domicile run`, `manager` and `replica run`, also after `env`,
stay in the background, as in terminals of their own, until killed by a later command or the session
ends; the lines shown for it must appear in its log in that order. A question (`domicile status`,
`domicile where`, `domicile replica`) is asked again until the answer is the one shown, within a
bound. Process numbers, node names, ports, times, ages, figures, positions, revisions and epochs may
differ from those on the page.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

BLOCK = re.compile(r"^```console\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
NODE = re.compile(r"[\w.-]+-(?P<pid>\d+)-[0-9a-f]{4}\b")
VARYING = (
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"), "<when>"),
    (re.compile(r"\d\d:\d\d:\d\d\.\d{3}"), "<time>"),
    (NODE, "<node>"),
    (re.compile(r"127\.0\.0\.\d:\d+"), "<address>"),
    (re.compile(r"\([0-9a-f]{8}\)"), "(<incarnation>)"),
    (re.compile(r"\brevision \d+"), "revision <n>"),
    (re.compile(r"\bepoch +\d+"), "epoch <n>"),
    (re.compile(r"(?<= )\d+:[\d,]+(?= )"), "<position>"),
    (re.compile(r"^logged as audit/.*"), "<audit>"),
    # Pytest says more of a run of over a minute.
    (re.compile(r"\bin \d+\.\d+ ?s\b(?: \(\d+:\d\d:\d\d\))?"), "in <n> s"),
    (re.compile(r"[\d,]+ +[\d,]+ +[\d,]+(?= +[\d,]+ ms )"), "<figures>"),
    (re.compile(r"(?<= )\d[\d.,]* (?:ms|s|min)(?= |$)"), "<age>"),
    (re.compile(r"[─━]+|={3,}|_{3,}"), ""),
    (re.compile(r"\b0x[0-9a-f]+"), "<object>"),
)
UNWANTED = ("DOMICILE_STORE", "CI", "BUILD_NUMBER")
"""Variables that a reader's terminal does not have: with the last two pytest prints more."""
SOON_S = 60.0
ENDS_S = 300.0
"""How long a command may take: a busy machine is no error of a page."""
SIGNALS = {
    "": signal.SIGTERM,
    "-9": signal.SIGKILL,
    "-STOP": signal.SIGSTOP,
    "-CONT": signal.SIGCONT,
}
ENDING = {signal.SIGTERM: 0, signal.SIGKILL: -signal.SIGKILL}
QUESTIONS = ("domicile status", "domicile where", "domicile replica")


class Step(NamedTuple):
    """A command and the lines it is said to print."""

    command: str
    shown: tuple[str, ...]


def steps(text: str) -> list[Step]:
    """All commands of a page, in order."""
    found: list[Step] = []
    for block in BLOCK.finditer(text):
        for line in block["body"].splitlines():
            if line.startswith("$ "):
                found.append(Step(line[2:], ()))
            elif found and found[-1].command.endswith("\\") and not found[-1].shown:
                found[-1] = Step(f"{found[-1].command}\n{line}", ())
            elif line.strip():
                command, shown = found[-1]
                found[-1] = Step(command, (*shown, line) if plain(line) else shown)
    return found


def plain(line: str) -> str:
    """A line without what differs from run to run."""
    for pattern, word in VARYING:
        line = pattern.sub(word, line)
    # The coordinator is whoever came first, and rows are sorted by name.
    return " ".join(line.replace("coordinator", "").split())


class Terminal(NamedTuple):
    """A command that goes on."""

    process: subprocess.Popen[bytes]
    log: Path


class Session:
    """One directory, its terminals, and the process numbers that stand for those on the page."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._terminals: list[Terminal] = []
        self._pids: dict[str, int] = {}
        scripts = Path(sys.executable).parent
        self._environment = {
            **{name: value for name, value in os.environ.items() if name not in UNWANTED},
            "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src"),
            "COLUMNS": "120",
            "NO_COLOR": "1",
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing goes on."""
        for process, _ in self._terminals:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def play(self, step: Step) -> None:
        """Do one step; `AssertionError` if it prints something else."""
        if re.match(r"(env (\w+=\S+ )+)?domicile (replica )?(run|manager) ", step.command):
            self._open(step)
        elif step.command.startswith("kill ") and "$(" not in step.command:
            self._kill(step)
        else:
            self._call(step)

    def _open(self, step: Step) -> None:
        log = self._directory / f"terminal-{len(self._terminals)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                shlex.split(step.command),
                cwd=self._directory,
                env=self._environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._terminals.append(Terminal(process, log))

        def matched() -> bool:
            lines = iter(log.read_text(encoding="utf-8").splitlines())
            for shown in step.shown:
                found = next((line for line in lines if plain(line) == plain(shown)), None)
                if found is None:
                    assert process.poll() is None, f"{step.command}\n{log.read_text()}"
                    return False
                self._pair(shown, found)
            return True

        assert eventually(matched), f"{step.command}\n{log.read_text()}"

    def _kill(self, step: Step) -> None:
        *options, shown = shlex.split(step.command)[1:]
        kind = SIGNALS[" ".join(options)]
        process = next(
            one.process for one in self._terminals if one.process.pid == self._pids[shown]
        )
        os.kill(process.pid, kind)
        if kind in ENDING:
            code = process.wait(SOON_S)
            assert code == ENDING[kind], f"{step.command}: exit code {code}"

    def _call(self, step: Step) -> None:
        output: list[str] = []

        def matched() -> bool:
            output[:] = self._printed(step.command)
            pairs = list(zip(_in_order(step.shown), _in_order(output), strict=False))
            if len(step.shown) != len(output) or any(plain(a) != plain(b) for a, b in pairs):
                return False
            for shown, line in pairs:
                self._pair(shown, line)
            return True

        again = step.command.startswith(QUESTIONS)
        assert eventually(matched) if again else matched(), "\n".join([step.command, *output])

    def _printed(self, command: str) -> list[str]:
        ran = subprocess.run(
            command,
            shell=True,
            cwd=self._directory,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=ENDS_S,
        )
        return _telling(ran.stdout.splitlines())

    def _pair(self, shown: str, line: str) -> None:
        """Learn which process stands for one on the page; two that were mixed up change places."""
        for page, found in zip(_pids(shown), _pids(line), strict=True):
            before, real = self._pids.get(page), int(found)
            for other in [one for one, pid in self._pids.items() if pid == real]:
                if before is None:
                    del self._pids[other]
                else:
                    self._pids[other] = before
            self._pids[page] = real


def _telling(lines: Iterable[str]) -> list[str]:
    """Lines that say something. Only some shells say that a program was killed, and only a command
    that takes long says what it waits for."""
    return [
        line
        for line in lines
        if plain(line) and line != "Killed" and not line.startswith("waiting: ")
    ]


def _in_order(lines: Sequence[str]) -> list[str]:
    """Rows of a table come in the order of names, which are of the moment."""
    return sorted(lines, key=plain)


def _pids(line: str) -> Iterator[str]:
    return (match["pid"] for match in NODE.finditer(line))


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether something comes true within the bound."""
    ends = time.monotonic() + SOON_S
    while not condition():
        if time.monotonic() > ends:
            return False
        time.sleep(0.1)
    return True
