"""Break the source with a patch and see whether a profile's checkers notice.

    python -m proving.mutants.run proving/mutants/no-gate.patch [more.patch ...]
    python -m proving.mutants.run --all
    python -m proving.mutants.run --profile store proving/mutants/name.patch
    python -m proving.mutants.run --chaos proving/mutants/name.patch
    python -m proving.mutants.run --chaos --all
    python -m proving.mutants.run proving/mutants/suites/name.patch
    python -m proving.mutants.run --write NAME --rule S1 --profile store

Each patch is applied to a copy of `src/`; seeds 0–199 run until the first bad one. A patch finds
its place by name (`symbol_patch.py`). Its head names the rule that it breaks, `Rule: S1`, and the
profile in which that is found, `Profile: store`; else it is the standard one. `Profile: groups` is
the campaign of replica groups (`proving/groups.py`); such patches lie in `proving/mutants/groups`.
`--write NAME` makes a patch of the changes that git sees in `src/`. A mutant is found only by a
checker's verdict on a seed that is clean without the patch; a crash or a hang does not count.
Several patches run side by side, one process each. Exit code 0 if all are found.

What only a real server or file has, as the SQL of a journal, is no part of a simulation. Patches in
`suites` say `Suite: tests/...`, a file or one test, instead of a profile: they are found if a test
there fails, and none does without the patch.

With `--chaos` the patch meets real processes instead: minutes of chaos (`--minutes`, or what the
patch says as `Chaos-Minutes`), one seed after the other, until a checker objects; `--only`, or
`Chaos-Only` in the patch, names the kinds of faults if not all are to strike. A patch says whether
it can be found there: `Chaos: yes`, or `Chaos: no, ` and why not, or `Chaos: untried`; with `--all`
those that can are tried, one after the other, and a table of them ends the run. Such a run does
not repeat, so `make chaos` without a patch is what shows that nobody objects without reason.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from proving.mutants import symbol_patch

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = Path(__file__).resolve().parent


SEEDS = "0:200"
CHAOS_SEEDS = "1:4"
CHAOS_MINUTES = 2.0
CHAOS_SLOWER = 3.0
"""How much longer than its minutes a chaos run may take, with all that is around it."""

HANG_S = 900.0
"""How long the seeds of one patch may take: a bug that spins in real time is not found."""

PROBE = """
import sys
from proving.campaign import run_seed, run_seeds
from proving.groups import run_group_seed
def results(seeds, jobs, profile):
    if profile == "groups":
        yield from map(run_group_seed, seeds)
    elif jobs > 1:
        yield from run_seeds(seeds, jobs, stop_at_first=True, until_verdict=True, profile=profile)
    else:
        for seed in seeds:
            yield run_seed(seed, profile)
if __name__ == "__main__":
    first, end, jobs = map(int, sys.argv[1:4])
    count, crashed = 0, []
    for result in results(range(first, end), jobs, sys.argv[4]):
        count += 1
        if result.violations:
            print("seed", result.seed)
            print(f"found at seed {result.seed}: {result.violations[0].splitlines()[0]}")
            sys.exit(0)
        if result.error:
            crashed.append(result)
    if crashed:
        why = crashed[0].error.splitlines()[0]
        print(f"no verdict, but {len(crashed)} seeds crashed, seed {crashed[0].seed}: {why}")
    else:
        print(f"survived {count} seeds")
    sys.exit(1)
"""


class Head(NamedTuple):
    """What a patch says of itself."""

    rule: str
    profile: str
    chaos: str = ""
    """`yes`, or `no` and why real processes can't show it."""
    chaos_minutes: float = CHAOS_MINUTES
    chaos_only: tuple[str, ...] = ()
    """The kinds of faults that show it, where all of them together hit too rarely."""
    suite: str = ""
    """The tests that must find it, if no simulation can."""

    @property
    def chaotic(self) -> bool:
        """Whether chaos must find it."""
        return self.chaos == "yes"


class Tried(NamedTuple):
    """What became of a patch."""

    patch: str
    found: bool
    seed: int | None
    seconds: float
    said: str


def head_of(patch: Path) -> Head:
    """What stands above the first hunk of a patch."""
    told: dict[str, str] = {}
    for line in patch.read_text(encoding="utf-8").splitlines():
        if line.startswith(symbol_patch.MARK):
            break
        name, colon, value = line.partition(": ")
        if colon:
            told[name] = value.strip()
    return Head(
        told.get("Rule", ""),
        told.get("Profile", "standard"),
        told.get("Chaos", ""),
        float(told.get("Chaos-Minutes", CHAOS_MINUTES)),
        tuple(told["Chaos-Only"].split(", ")) if "Chaos-Only" in told else (),
        told.get("Suite", ""),
    )


def _environment(tree: Path) -> dict[str, str]:
    """The product comes from a tree, what judges it from here."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(tree / "src"), str(ROOT)))}


def probe(
    tree: Path, seeds: tuple[int, int], jobs: int, profile: str = "standard"
) -> tuple[bool, list[str]]:
    """Run seeds on a source tree: whether a checker objected, and what was said."""
    (tree / "probe.py").write_text(PROBE)
    try:
        ran = subprocess.run(
            [sys.executable, str(tree / "probe.py"), *map(str, seeds), str(jobs), profile],
            cwd=tree, capture_output=True, text=True, check=False, timeout=HANG_S,
            env={**_environment(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False, [f"no verdict within {HANG_S:.0f} s"]
    said = (ran.stdout.strip() or ran.stderr.strip()).splitlines() or ["no output"]
    return ran.returncode == 0, said


def suite(tree: Path, tests: str) -> tuple[bool, list[str]]:
    """Run tests on a source tree: whether one of them failed, and what was said."""
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", tests],
            cwd=ROOT, capture_output=True, text=True, check=False, timeout=HANG_S,
            env={
                **_environment(tree), "PYTHONDONTWRITEBYTECODE": "1", "DOMICILE_TEST_STORES": "all",
            },
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False, [f"no verdict within {HANG_S:.0f} s"]
    failed = re.search(r"^FAILED \S+::(\S+)", ran.stdout, re.MULTILINE)
    if ran.returncode == 1 and failed:
        return True, [f"found by {failed[1]}"]
    last = (ran.stdout.strip() or ran.stderr.strip()).splitlines()[-1:]
    return False, [f"no test failed: {' '.join(last)}"]


def chaos(
    tree: Path, seeds: tuple[int, int], minutes: float, only: Sequence[str] = ()
) -> tuple[int | None, list[str]]:
    """Chaos on a source tree: the seed with which a checker objected, and what was said."""
    from domicile.testing.checkers import CHECKERS

    said: list[str] = []
    for seed in range(*seeds):
        arguments = ["--minutes", str(minutes), "--seed", str(seed), "--out", str(tree / "out")]
        arguments += ["--eager", *(part for kind in only for part in ("--only", kind))]
        try:
            ran = subprocess.run(
                [sys.executable, "-P", "-m", "proving.chaos", *arguments],
                cwd=tree, capture_output=True, text=True, check=False,
                timeout=minutes * 60 * CHAOS_SLOWER + 60,
                env=_environment(tree),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            said.append(f"seed {seed} did not end")
            continue
        for line in ran.stdout.splitlines():
            verdict = re.match(r"(\w+) broken at", line)
            if verdict and verdict[1] in CHECKERS:
                return seed, [*said, f"found with seed {seed}: {line}"]
        other = [line for line in ran.stdout.splitlines() if " broken at " in line]
        said.append(f"seed {seed}: no checker objected{', but ' + other[0] if other else ''}")
        if not other and "chaos: seed" not in ran.stdout:
            said[-1] = f"seed {seed}: the run broke: {ran.stderr.strip()[-300:]}"
    return None, said


def try_mutant(
    patch: Path,
    seeds: tuple[int, int],
    jobs: int,
    profile: str | None = None,
    *,
    chaotic: bool = False,
    minutes: float | None = None,
    only: Sequence[str] = (),
) -> Tried:
    """Apply, run, tell."""
    began = time.monotonic()
    head = head_of(patch)
    profile = "chaos" if chaotic else head.suite or profile or head.profile
    seed: int | None = None
    with tempfile.TemporaryDirectory(prefix="domicile-mutant-") as scratch:
        tree = Path(scratch)
        shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__"))
        try:
            symbol_patch.apply(patch.read_text(encoding="utf-8"), tree / "src" / "domicile")
        except symbol_patch.DoesNotApply as why:
            print(f"{patch.stem}: the patch no longer applies: {why}")
            return Tried(patch.stem, False, None, 0.0, "does not apply")
        if chaotic:
            seed, said = chaos(tree, seeds, minutes or head.chaos_minutes, only or head.chaos_only)
            found = seed is not None
        elif head.suite:
            found, said = suite(tree, head.suite)
            fails, of_today = suite(ROOT, head.suite) if found else (False, [])
            if fails:
                found = False
                said.append(f"without the patch, too: {of_today[-1]}; this proves nothing")
        else:
            found, said = probe(tree, seeds, jobs, profile)
        if found and not chaotic and not head.suite:
            seed = int(said[0].split()[1])
            shutil.rmtree(tree / "src")
            shutil.copytree(ROOT / "src", tree / "src")
            if probe(tree, (seed, seed + 1), 1, profile)[0]:
                found = False
                said.append(f"seed {seed} is bad without the patch too: this proves nothing")
    took_s = time.monotonic() - began
    print(f"{patch.stem}, {profile}: {said[-1]} ({took_s:.0f} s)", flush=True)
    return Tried(patch.stem, found, seed, took_s, said[-1])


def table(tried: Sequence[Tried]) -> str:
    """What became of each, for people."""
    lines = ["| mutant | seed | seconds | verdict |", "| --- | --- | --- | --- |"]
    for one in tried:
        broken = re.search(r"(\w+) broken at", one.said)
        verdict = broken[1] if one.found and broken else "survived"
        seed = "" if one.seed is None else str(one.seed)
        lines.append(f"| `{one.patch}` | {seed} | {one.seconds:.0f} | {verdict} |")
    return "\n".join(lines)


def write(name: str, rule: str, profile: str) -> Path:
    """Keep what git says has changed in the source as a patch."""
    diff = subprocess.run(
        ["git", "diff", "--unified=3", "src"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    patch = MUTANTS / f"{name}.patch"
    head = f"Rule: {rule}\nProfile: {profile}\nChaos: untried\n"
    patch.write_text(head + symbol_patch.as_text(symbol_patch.from_diff(diff, ROOT)))
    return patch


def patches_of(*, chaotic: bool) -> list[Path]:
    """All patches, or all that chaos must find."""
    if not chaotic:
        folders = (MUTANTS, MUTANTS / "groups", MUTANTS / "suites")
        return sorted(patch for folder in folders for patch in folder.glob("*.patch"))
    every = sorted([*MUTANTS.glob("*.patch"), *(MUTANTS / "chaos").glob("*.patch")])
    return [patch for patch in every if head_of(patch).chaotic]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("patches", nargs="*", type=Path)
    parser.add_argument("--all", action="store_true", help="every patch beside this file")
    parser.add_argument("--seeds", help=f"{SEEDS}, or {CHAOS_SEEDS} of chaos")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--profile", help="of the campaign; default: what the patch says")
    parser.add_argument("--chaos", action="store_true", help="real processes, not the simulator")
    parser.add_argument("--minutes", type=float, help="of chaos, per seed")
    parser.add_argument("--only", action="append", default=[], help="only this kind of fault")
    parser.add_argument("--write", metavar="NAME", help="make a patch of what git sees changed")
    parser.add_argument("--rule", help="that the written patch breaks")
    options = parser.parse_args(arguments)
    if options.write:
        if not options.rule:
            parser.error("--write needs the rule that is broken: --rule S1")
        print(f"wrote {write(options.write, options.rule, options.profile or 'standard')}")
        print("try it, then restore the source: git checkout src")
        return 0
    patches: list[Path] = patches_of(chaotic=options.chaos) if options.all else options.patches
    if not patches:
        parser.error("name a patch, or --all")
    missing = [str(patch) for patch in patches if not patch.is_file()]
    if missing:
        parser.error(f"no such patch: {', '.join(missing)}")
    seeds: str = options.seeds or (CHAOS_SEEDS if options.chaos else SEEDS)
    first, end = (int(part) for part in seeds.split(":"))
    # Seeds after the one that tells are wasted, so several patches share the processes instead.
    jobs = options.jobs if len(patches) == 1 else 1
    attempt = partial(
        try_mutant, seeds=(first, end), jobs=jobs, profile=options.profile,
        chaotic=options.chaos, minutes=options.minutes, only=options.only,
    )  # fmt: skip
    # Real clusters take the machine each for itself.
    with ThreadPoolExecutor(1 if options.chaos else options.jobs) as pool:
        tried = list(pool.map(attempt, patches))
    if options.chaos:
        print(f"\n{table(tried)}")
    found = sum(one.found for one in tried)
    print(f"{found} of {len(tried)} mutants found by a checker")
    return 0 if found == len(tried) else 1


if __name__ == "__main__":
    sys.exit(main())
