"""What the commands of the benchmarks share: options that make sense, and an end by Ctrl-C.

Used by those that measure moves, recovery, crowds and soaks.
"""

from __future__ import annotations

import math
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

INTERRUPTED = 130


def positive(text: str) -> float:
    """A number above 0, for argparse."""
    number = float(text)
    if not 0 < number < math.inf:
        raise ArgumentTypeError(f"{text} is not above 0")
    return number


def count(text: str) -> int:
    """A whole number above 0, for argparse."""
    number = int(text)
    if number < 1:
        raise ArgumentTypeError(f"{text} is not above 0")
    return number


def report(text: str) -> Path:
    """The file of an earlier report, for argparse."""
    path = Path(text)
    if not path.is_file():
        raise ArgumentTypeError(f"{text} is no file; --json FILE writes one")
    return path


def run(main: Callable[[], int]) -> NoReturn:
    """Be that command; whoever interrupts it is told so, and gets no traceback."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted: nothing is reported", file=sys.stderr)
        sys.exit(INTERRUPTED)
