"""The same seed gives the same history on every Python and under every hash seed.

The digests in `golden/digests.json` are compared with those of the running Python, always, and
with those of each other supported version for which an interpreter is found and the locked
packages can be installed into `.venvs/<version>`; the end of the session names which they were.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DIGESTS = ROOT / "proving" / "golden" / "digests.json"
LOCKED = ROOT / "requirements" / "base.txt"

RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
SUPPORTED = ("3.11", "3.12", "3.13")
HASH_SEEDS = ("0", "1", "4242")
OTHERS_HASH_SEED = "7"

PROBE_S = 20
INSTALL_S = 180
SEEDS_S = 300

PROBE = "import platform, sys; print(platform.python_version(), sys.executable)"


class Comparisons:
    """What became of each version, for the end of the session."""

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}

    def add(self, version: str, line: str) -> None:
        self.lines[version] = "; ".join(filter(None, (self.lines.get(version), line)))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("golden digests by Python version")
        for version, line in sorted(self.lines.items()):
            terminalreporter.write_line(f"{version:>7}  {line}")


@pytest.fixture(scope="module")
def comparisons(request: pytest.FixtureRequest) -> Comparisons:
    """Collects results by version and prints them at the end of the session."""
    found = Comparisons()
    request.config.pluginmanager.register(found, "golden-comparisons")
    return found


def golden() -> dict[str, str]:
    """The committed digests by seed."""
    digests: dict[str, str] = json.loads(DIGESTS.read_text(encoding="utf-8"))
    return digests


def differences(expected: dict[str, str], found: dict[str, str]) -> list[str]:
    """The seeds whose digests are not the same, or that only one side has."""
    seeds = sorted({*expected, *found}, key=int)
    return [
        f"seed {seed}: {expected.get(seed, 'nothing')} committed, {found.get(seed, 'nothing')} ran"
        for seed in seeds
        if expected.get(seed) != found.get(seed)
    ]


def digests_of(python: Path | str, hash_seed: str) -> dict[str, str]:
    """Run the seeds on an interpreter."""
    ran = subprocess.run(
        [str(python), "-P", "-m", "proving.golden.update", "--print"],
        env={
            **os.environ,
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=SEEDS_S,
    )
    assert ran.returncode == 0, f"{python} could not run the golden seeds:\n{ran.stderr}"
    digests: dict[str, str] = json.loads(ran.stdout)
    return digests


def assert_golden(found: dict[str, str], where: str) -> None:
    """Fail with what to do next."""
    wrong = differences(golden(), found)
    assert not wrong, "\n".join(
        [
            f"histories differ from proving/golden/digests.json on {where}:",
            *(f"  {line}" for line in wrong),
            "If all versions and hash seeds fail alike and runs were meant to change, run",
            "`make golden` and commit the file. If only some fail, a run depends on what it must",
            "not: the order of a set, hash(), id(), real time, or a version's own behaviour.",
        ]
    )


def by_number(folder: Path) -> list[int]:
    """Sorts `versions/3.12.10/bin` behind `versions/3.12.9/bin`."""
    return [int(part) for part in folder.parent.name.split(".") if part.isdigit()]


def interpreter(version: str) -> tuple[str, str] | None:
    """The full version and path of an interpreter, from PATH or from pyenv, if one works."""
    name = f"python{version}"
    folders = [Path(folder) for folder in os.get_exec_path()]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    # A shim on PATH may refuse, so each is tried and not only looked at.
    installed = sorted(pyenv.glob(f"versions/{version}.*/bin"), key=by_number, reverse=True)
    for folder in [*folders, *installed]:
        if not (folder / name).is_file():
            continue
        try:
            ran = subprocess.run(
                [str(folder / name), "-c", PROBE],
                capture_output=True, text=True, check=True, timeout=PROBE_S,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError):
            continue
        full, _, path = ran.stdout.strip().partition(" ")
        if full.startswith(f"{version}."):
            return full, path
    return None


def prepared(full: str, base: str) -> Path | str:
    """The python of `.venvs/<version>` with the locked packages, or why there is none."""
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.is_file() else shutil.which("uv")
    if uv is None:
        return "uv is neither beside the running Python nor on PATH; run make setup"
    venv = ROOT / ".venvs" / full.rpartition(".")[0]
    python = venv / "bin" / "python"
    stamp = venv / ".ready"
    wanted = f"{full} {hashlib.sha256(LOCKED.read_bytes()).hexdigest()}\n"
    if stamp.is_file() and stamp.read_text() == wanted and python.exists():
        return python
    for command in (
        ["venv", "--allow-existing", "--no-python-downloads", "--python", base, str(venv)],
        ["pip", "install", "--python", str(python), "--require-hashes", "-r", str(LOCKED)],
    ):
        try:
            ran = subprocess.run(
                [uv, *command], capture_output=True, text=True, check=False, timeout=INSTALL_S
            )
        except subprocess.TimeoutExpired:
            return f"uv {command[0]} took over {INSTALL_S} s"
        if ran.returncode:
            said = " ".join(ran.stderr.split())
            return f"uv {command[0]} failed: {said[-200:] or 'no message'}"
    stamp.write_text(wanted)
    return python


def compare(python: Path | str, full: str, hash_seed: str, comparisons: Comparisons) -> None:
    """Run the seeds there, note the result for the end of the session, and judge it."""
    version = full.rpartition(".")[0]
    verdict = "did not agree"
    try:
        where = f"Python {full}, PYTHONHASHSEED={hash_seed}"
        assert_golden(digests_of(python, hash_seed), where)
        verdict = "agreed"
    finally:
        comparisons.add(version, f"{full} under hash seed {hash_seed} {verdict}")


@pytest.mark.parametrize("hash_seed", HASH_SEEDS)
def test_the_running_python_agrees_under_every_hash_seed(
    hash_seed: str, comparisons: Comparisons
) -> None:
    compare(sys.executable, platform.python_version(), hash_seed, comparisons)


@pytest.mark.parametrize("version", [v for v in SUPPORTED if v != RUNNING])
def test_another_python_agrees(version: str, comparisons: Comparisons) -> None:
    found = interpreter(version)
    python = f"no python{version} on PATH or in pyenv" if found is None else prepared(*found)
    if found is None or isinstance(python, str):
        comparisons.add(version, f"not compared: {python}")
        pytest.skip(f"Python {version} not compared: {python}")
    compare(python, found[0], OTHERS_HASH_SEED, comparisons)


def test_a_handful_of_distinct_digests_is_committed() -> None:
    digests = golden()
    assert len(digests) >= 5
    assert len(set(digests.values())) == len(digests)
    assert all(len(digest) == 32 for digest in digests.values())


def test_a_difference_in_any_seed_is_told() -> None:
    assert differences({"0": "a", "10": "b"}, {"0": "a", "10": "b"}) == []
    assert differences({"0": "a", "10": "b"}, {"0": "a", "10": "c"}) == [
        "seed 10: b committed, c ran"
    ]
    assert differences({"0": "a"}, {"2": "b"}) == [
        "seed 0: a committed, nothing ran",
        "seed 2: nothing committed, b ran",
    ]
