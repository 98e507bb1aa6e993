"""Patches that find their place by the name of what they change, not by file and line.

A patch is a head of `Name: value` lines, then hunks:

    @@ Owner._admit
         context
    -    old line
    +    new line

`Owner._admit` is a class, function, method or constant of a module. A hunk applies if exactly one
thing of that name under the source tree contains its old lines, in that order, exactly once. So
moving a module or adding lines elsewhere breaks no patch; renaming what it changes does.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

MARK = "@@ "


class DoesNotApply(Exception):
    """A hunk has no place in the source, or more than one."""


class Hunk(NamedTuple):
    """One change: the name of what it changes, and lines with ` `, `-` or `+` in front."""

    symbol: str
    lines: tuple[str, ...]

    def side(self, sign: str) -> list[str]:
        """The lines before (`-`) or after (`+`) the change."""
        return [line[1:] for line in self.lines if line[:1] in (" ", "", sign)]


class Symbol(NamedTuple):
    """A definition of a module and its lines, from the first to the one after the last."""

    name: str
    start: int
    end: int


def symbols(text: str) -> list[Symbol]:
    """Classes, functions, methods and assigned names, outer ones before inner ones."""
    found: list[Symbol] = []

    def visit(body: Sequence[ast.stmt], prefix: str) -> None:
        for node in body:
            match node:
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                    assert node.end_lineno is not None
                    found.append(Symbol(prefix + node.name, first - 1, node.end_lineno))
                    if isinstance(node, ast.ClassDef):
                        visit(node.body, f"{prefix}{node.name}.")
                case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
                    assert node.end_lineno is not None
                    found.append(Symbol(prefix + name, node.lineno - 1, node.end_lineno))
                case _:
                    pass

    visit(ast.parse(text).body, "")
    return found


def parse(text: str) -> list[Hunk]:
    """The hunks of a patch; its head is not among them."""
    hunks: list[Hunk] = []
    for part in re.split(rf"^(?={MARK})", text, flags=re.MULTILINE)[1:]:
        first, *lines = part.rstrip("\n").split("\n")
        hunks.append(Hunk(first.removeprefix(MARK).strip(), tuple(lines)))
    return hunks


def _places(lines: list[str], symbol: Symbol, old: list[str]) -> Iterator[int]:
    for at in range(symbol.start, symbol.end - len(old) + 1):
        if lines[at : at + len(old)] == old:
            yield at


def apply(text: str, package: Path, *, spare: Sequence[str] = ("testing",)) -> list[Path]:
    """Change the modules of a package, but none in the folders to spare; name the changed ones."""
    hunks = parse(text)
    if not hunks:
        raise DoesNotApply("the patch has no hunk: each begins with `@@ name`")
    modules = {
        path: path.read_text(encoding="utf-8")
        for path in sorted(package.rglob("*.py"))
        if path.relative_to(package).parts[0] not in spare
    }
    changed: dict[Path, None] = {}
    for hunk in hunks:
        path, at = _place(hunk, modules)
        old = hunk.side("-")
        lines = modules[path].splitlines()
        lines[at : at + len(old)] = hunk.side("+")
        modules[path] = "\n".join(lines) + "\n"
        changed[path] = None
    for path in changed:
        path.write_text(modules[path], encoding="utf-8")
    return list(changed)


def _place(hunk: Hunk, modules: dict[Path, str]) -> tuple[Path, int]:
    old = hunk.side("-")
    name = re.compile(rf"\b{re.escape(hunk.symbol.rpartition('.')[2])}\b")
    named = False
    fits: list[tuple[Path, int]] = []
    for path, text in modules.items():
        if not name.search(text):
            continue
        for symbol in symbols(text):
            if symbol.name == hunk.symbol:
                named = True
                fits += [(path, at) for at in _places(text.splitlines(), symbol, old)]
    if not named:
        raise DoesNotApply(f"nothing in the source is called {hunk.symbol}")
    if len(fits) != 1:
        where = "nowhere" if not fits else f"in {len(fits)} places"
        raise DoesNotApply(f"{hunk.symbol} contains the old lines {where}:\n" + "\n".join(old))
    return fits[0]


def from_diff(diff: str, root: Path) -> list[Hunk]:
    """Hunks from a unified diff of the source as it is under `root`, with or without changes."""
    hunks: list[Hunk] = []
    for file in re.split(r"^(?=diff )", diff, flags=re.MULTILINE)[1:]:
        name = re.search(r"^\+\+\+ b/(.+)$", file, re.MULTILINE)
        assert name, "a difference without a name"
        text = (root / name[1]).read_text(encoding="utf-8")
        for part in re.split(r"^(?=@@ )", file, flags=re.MULTILINE)[1:]:
            _, *lines = part.rstrip("\n").split("\n")
            hunks += _by_symbol(lines, text)
    return hunks


def _by_symbol(lines: Sequence[str], text: str) -> list[Hunk]:
    """Cut one hunk of a diff to the definitions that it changes."""
    source, known = text.splitlines(), symbols(text)
    for sign in "-+":
        side = [line[1:] for line in lines if line[:1] in (" ", "", sign)]
        places = [at for at in range(len(source)) if source[at : at + len(side)] == side]
        if len(places) == 1:
            break
    else:
        raise DoesNotApply("the difference is not one of this source:\n" + "\n".join(lines))
    rows: list[tuple[int, str]] = []
    number = places[0]
    for line in lines:
        rows.append((number, line))
        number += line[:1] in (" ", "", sign)
    owners: dict[int, Symbol] = {}
    for index, (number, line) in enumerate(rows):
        if line[:1] in (" ", ""):
            continue
        around = [one for one in known if one.start < number < one.end or (
            one.start == number and line[:1] == sign)]  # fmt: skip
        if not around:
            raise DoesNotApply(f"outside of every definition: {line}")
        owners[index] = around[-1]
    wanted = [one for one in known if one in owners.values()]
    outer = [one for one in wanted if not any(_within(one, other) for other in wanted)]
    return [
        Hunk(one.name, tuple(
            line for index, (number, line) in enumerate(rows)
            if (_within(owners[index], one) or owners[index] == one if index in owners
                else one.start <= number < one.end)
        ))
        for one in outer
    ]  # fmt: skip


def _within(inner: Symbol, outer: Symbol) -> bool:
    return inner != outer and outer.start <= inner.start and inner.end <= outer.end


def as_text(hunks: Sequence[Hunk]) -> str:
    """The hunks of a patch as they are kept."""
    return "".join(
        f"\n{MARK}{hunk.symbol}\n" + "\n".join(line.rstrip() for line in hunk.lines) + "\n"
        for hunk in hunks
    )
