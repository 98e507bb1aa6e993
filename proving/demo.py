"""`domicile demo` on a store with a server, which this starts and ends.

    python -m proving.demo --store postgresql      or: make demo STORE=postgresql

The other options are those of `domicile demo`. Without `--store` it is the demo as users have it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from proving.chaos.server import NO_SERVER, SERVERS

MISUSED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m proving.demo", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--store", choices=("sqlite", *SERVERS), default="sqlite")
    options, more = parser.parse_known_args(arguments)
    command = [sys.executable, "-m", "domicile", "demo", *more]
    if options.store not in SERVERS:
        return subprocess.run(command, check=False).returncode
    try:
        server = SERVERS[options.store]()
    except NO_SERVER as error:
        sys.stderr.write(f"{error}\n")
        return MISUSED
    try:
        server.start()
        command += ["--store", server.new_database()]
        return subprocess.run(command, check=False).returncode
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main())
