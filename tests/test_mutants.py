"""The planted bugs still fit the source. Whether the checkers find them is a suite of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PATCHES = sorted((ROOT / "tests" / "mutants").glob("*.patch"))

NAMED = (
    "owners-marker", "no-gate", "no-return", "no-prefix", "no-finishing-lane", "no-waves",
    "overtaking-flush", "late-flushed-believed", "released-not-final", "fence-without-lock",
    "timer-only-deadline", "assign-before-persist", "two-coordinators",
)  # fmt: skip


def test_the_broken_versions_of_the_protocol_are_all_there() -> None:
    names = [patch.stem for patch in PATCHES]
    assert [name for name in NAMED if name not in names] == []


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_applies_and_touches_only_the_source(patch: Path, tmp_path: Path) -> None:
    touched = [line[6:] for line in patch.read_text().splitlines() if line.startswith("+++ b/")]
    assert touched
    for name in touched:
        assert name.startswith("src/domicile/")
        assert not name.startswith("src/domicile/testing/"), "a mutant must not blind its judges"
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    applied = subprocess.run(
        ["git", "apply", "--check", str(patch)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)},
    )
    assert applied.returncode == 0, f"{applied.stderr}\nmake the patch anew against today's source"
