"""The digests of a few seeds of the campaign's default profile, which `digests.json` holds still.

    python -m proving.golden.update          rewrite digests.json (`make golden`)
    python -m proving.golden.update --print  print them instead

A digest covers every frame, commit and handler start with its virtual time, so it changes with
whatever changes a run; rewrite the file when that was the intention. `proving/tests/test_golden.py`
runs this under other hash seeds and other versions of Python, so it needs nothing but the package.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from proving.campaign import run_seed

DIGESTS = Path(__file__).with_name("digests.json")
SEEDS = range(6)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a seed is bad, for then its digest is not worth keeping."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--print", action="store_true", help="print, do not write")
    options = parser.parse_args(arguments)
    results = [run_seed(seed) for seed in SEEDS]
    bad = [result for result in results if not result.ok]
    for result in bad:
        why = [*result.violations, result.error][0]
        print(f"seed {result.seed} is bad: {why}", file=sys.stderr)
        print(
            f"repeat it with: python -m proving.campaign --seeds {result.seed}:{result.seed + 1}",
            file=sys.stderr,
        )
    text = json.dumps({str(result.seed): result.tally.digest for result in results}, indent=2)
    if options.print:
        print(text)
    elif not bad:
        DIGESTS.write_text(text + "\n", encoding="utf-8")
        print(f"wrote the digests of {len(results)} seeds to {DIGESTS.name}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
