"""From `module:name` to a node."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from domicile.ops.apps import TargetError, find_node

APP = """
from domicile import Node

node = Node("memory://apps", node_id="plain")
other = Node("memory://apps", node_id="other")
number = 7


class Shelf:
    node = node


def make():
    return Node("memory://apps", node_id="made")


def wrong():
    return 7


def needy(name):
    return node


async def later():
    return node
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    before = sys.path[:]
    (tmp_path / "appmod.py").write_text(APP, encoding="utf-8")
    (tmp_path / "apppkg").mkdir()
    (tmp_path / "apppkg" / "__init__.py").write_text("", encoding="utf-8")
    (tmp_path / "apppkg" / "main.py").write_text(APP, encoding="utf-8")
    (tmp_path / "appempty.py").write_text("import json\n", encoding="utf-8")
    (tmp_path / "appneedy.py").write_text("import no_such_library\n", encoding="utf-8")
    yield tmp_path
    sys.path[:] = before
    for name in [name for name in sys.modules if name.startswith("app")]:
        del sys.modules[name]


@pytest.mark.parametrize("target", ["appmod:node", "apppkg.main:node", "appmod:Shelf.node"])
def test_a_node_is_found(place: Path, target: str) -> None:
    assert find_node(target, place).store == "memory://apps"


def test_a_function_makes_one(place: Path) -> None:
    made = find_node("appmod:make", place)
    assert made is not find_node("appmod:make", place)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("appmode:node", ["no module 'appmode' in ", "did you mean appmod?", "appmod, appneedy"]),
        ("apppkg.mein:node", ["no module 'apppkg.mein'"]),
        ("appmod:nod", ["appmod has no 'nod'", "write appmod:node or appmod:other"]),
        ("appmod", ["names no node", "appmod:node"]),
        ("appmod:", ["names no node"]),
        ("appmod:number", ["is an int, not a Node", "appmod:node"]),
        ("appmod:Shelf", ["is the class Shelf, not a Node"]),
        ("appmod:wrong", ["appmod:wrong() returned an int"]),
        ("appmod:needy", ["can't be called without arguments", "'name'"]),
        ("appmod:later", ["async function"]),
        ("appempty:node", ["appempty has no 'node'", "holds no Node"]),
        ("appmod.py:node", ["names a file", "appmod:node"]),
        ("./apppkg/main.py:node", ["names a file", "module: apppkg.main:node"]),
        (":node", ["no module name"]),
        ("..up:node", ["no module name"]),
    ],
)
def test_what_is_wrong_is_said(place: Path, target: str, words: list[str]) -> None:
    with pytest.raises(TargetError) as caught:
        find_node(target, place)
    said = str(caught.value)
    assert [word for word in words if word not in said] == [], said
    assert str(place) in said or "no module 'app" not in said


def test_a_library_that_the_module_misses_is_not_the_module_missing(place: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        find_node("appneedy:node", place)
