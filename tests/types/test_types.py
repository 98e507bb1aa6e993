"""Misuse of the public API is a type error, in mypy and in pyright, and correct use is none.

A line of `cases/` that must be an error ends in `# E: <mypy's code>`. Both checkers run once
over a copy of the cases; the lines they complain about must be exactly the marked ones.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "cases"
SRC = Path(__file__).parents[2] / "src"
MARK = re.compile(r"# E: ([a-z-]+)$")
MYPY_ERROR = re.compile(r"^(?:.*[/\\])?(\w+\.py):(\d+): error: (.*)  \[([a-z-]+)\]$")

Line = tuple[str, int]


def marked() -> dict[Line, str]:
    """The lines that must be errors, with mypy's code."""
    found: dict[Line, str] = {}
    for path in sorted(CASES.glob("*.py")):
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if mark := MARK.search(text):
                found[path.name, number] = mark[1]
    return found


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of its own, so that no setting of this one plays a part."""
    root = tmp_path_factory.mktemp("types")
    for path in sorted(CASES.glob("*.py")):
        shutil.copy(path, root / path.name)
    return root


def run(command: list[str], root: Path) -> str:
    environment = {**os.environ, "MYPYPATH": str(SRC), "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, (
        f"{command[0]} did not run as expected:\n{done.stdout}{done.stderr}"
    )
    return done.stdout


def test_mypy_reports_exactly_the_marked_lines(project: Path) -> None:
    files = [path.name for path in sorted(project.glob("*.py"))]
    (project / "mypy.ini").write_text("[mypy]\n", encoding="utf-8")
    command = ["mypy", "--strict", "--no-pretty", "--follow-imports", "silent"]
    output = run(
        [*command, "--enable-error-code", "unused-awaitable", "--config-file", "mypy.ini", *files],
        project,
    )
    errors = [line for line in output.splitlines() if ": error: " in line]
    found: dict[Line, str] = {}
    for line in errors:
        parts = MYPY_ERROR.match(line)
        assert parts, line
        found[parts[1], int(parts[2])] = parts[4]
    assert found == marked(), output


def test_pyright_reports_exactly_the_marked_lines(project: Path) -> None:
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(SRC)], "include": ["."]}
    (project / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    command = ["pyright", "--outputjson", "--pythonpath", sys.executable, "-p", "."]
    output = run(command, project)
    found: dict[Line, str] = {}
    for report in json.loads(output)["generalDiagnostics"]:
        line = (Path(report["file"]).name, report["range"]["start"]["line"] + 1)
        found[line] = report["message"]
    assert sorted(found) == sorted(marked()), json.dumps(
        [f"{name}:{number}: {text}" for (name, number), text in sorted(found.items())], indent=1
    )


def test_every_kind_of_misuse_has_a_case() -> None:
    names = {name for name, _ in marked()}
    assert names == {"asks.py", "definitions.py", "durable.py", "sync_refs.py", "tells.py"}
    assert len(marked()) >= 30
