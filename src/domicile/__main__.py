"""The entrance to the command line: the script `domicile`, and `python -m domicile`.

What draws it is the extra `cli`: programs that only use the library do without. Without it, this
says how to install it, and nothing else under `domicile` may need it.
"""

from __future__ import annotations

import sys
from importlib import import_module

EXTRA = ("typer", "rich")
"""The packages of the extra `cli`."""

USAGE = 2


def main() -> None:
    """Run the command line, or exit with 2 and the command that installs it."""
    try:
        for name in EXTRA:
            import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        sys.stderr.write(
            f"error: the command line needs the package {error.name}, not installed here: "
            "pip install 'domicile[cli]'\n"
        )
        raise SystemExit(USAGE) from None
    from domicile.ops.cli import app

    app()


if __name__ == "__main__":
    main()
