"""What an import loads, and what it leaves for later: imports are CPU time of every process."""

from __future__ import annotations

import subprocess
import sys

import pytest

import domicile
import domicile.testing

LATE = ("asyncio", "msgspec", "apsw", "ssl", "domicile.node", "domicile.core", "domicile.entity")
"""Heavy modules that the bare package must not import."""

SIMULATOR = ("domicile.testing.sim", "domicile.testing.checkers", "domicile.testing.single_entity")

STORES = ("apsw", "importlib.metadata", "domicile.stores.sqlite.store")


def loaded_by(line: str) -> list[str]:
    script = f"import sys\n{line}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "unwanted"),
    [
        ("import domicile", LATE),
        ("from domicile import Entity, handler", ("asyncio", "apsw", "ssl", "domicile.node")),
        ("from domicile import Node, connect", STORES),
        ("import domicile.testing.processes.member_process", SIMULATOR),
    ],
)
def test_an_import_leaves_what_it_does_not_need(line: str, unwanted: tuple[str, ...]) -> None:
    loaded = loaded_by(line)
    assert "domicile" in loaded
    assert [name for name in unwanted if name in loaded] == []


def test_every_public_name_is_found_where_it_is_defined() -> None:
    for package in (domicile, domicile.testing):
        for name in package.__all__:
            assert getattr(package, name).__module__.startswith("domicile.")
        assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="has no attribute 'Nod'"):
        _ = domicile.Nod  # type: ignore[attr-defined]  # pyright: ignore
