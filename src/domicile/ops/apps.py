"""Finds the `Node` that a user means by `module:name`, and says what is wrong if there is none.

Used by the command line. Importing runs the user's module; nothing may be started here.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from domicile.node import Node


class TargetError(Exception):
    """A target names no node; the message says what was found instead and what to write."""


class FactoryError(Exception):
    """The function that should make a node raised `raised`."""

    def __init__(self, raised: Exception) -> None:
        super().__init__(str(raised))
        self.raised = raised


def find_node(target: str, directory: Path | None = None) -> Node:
    """The node of `module:name`; `name` is a `Node` or a function without arguments that returns
    one.

    `directory`, the current one unless given, comes first on the import path.
    """
    place = Path.cwd() if directory is None else directory
    module_name, colon, name = target.partition(":")
    if module_name.endswith(".py") or os.sep in module_name:
        bare = module_name.removesuffix(".py").removeprefix(f".{os.sep}").strip(os.sep)
        dotted = bare.replace(os.sep, ".")
        raise TargetError(
            f"{target!r} names a file; name the module: {dotted}:{name or 'node'}, from the "
            "directory that it is imported from"
        )
    module = _import(module_name, place)
    if not colon or not name:
        raise TargetError(f"{target!r} names no node; {_offer(module)}")
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise TargetError(f"module {module_name} has no {name!r}; {_offer(module)}")
        found = getattr(found, part)
    if isinstance(found, Node):
        return found
    return _made(found, target, module)


def _made(found: Any, target: str, module: ModuleType) -> Node:
    if inspect.isclass(found) or not callable(found):
        kind = f"the class {found.__name__}" if inspect.isclass(found) else _a(found)
        raise TargetError(f"{target} is {kind}, not a Node; {_offer(module)}")
    if inspect.iscoroutinefunction(found):
        raise TargetError(f"{target} is an async function; make it a plain one that returns a Node")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise TargetError(f"{target} can't be called without arguments: {error}") from error
    except ValueError:
        pass  # some builtins have no signature to look at
    try:
        made: Any = found()
    except Exception as error:
        raise FactoryError(error) from error
    if not isinstance(made, Node):
        raise TargetError(f"{target}() returned {_a(made)}, not a Node; {_offer(module)}")
    return made


def _import(name: str, place: Path) -> ModuleType:
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        parts = name.split(".")
        wanted = [".".join(parts[: count + 1]) for count in range(len(parts))]
        if error.name not in wanted:
            raise  # the module is there, something that it imports is not
        raise TargetError(_not_found(name, place)) from None
    except (TypeError, ValueError) as error:
        if name.strip(".") == name and name:
            raise
        raise TargetError(f"{name!r} is no module name; write module:name") from error


def _not_found(name: str, place: Path) -> str:
    near = sorted(
        {path.stem for path in place.glob("*.py")}
        | {path.parent.name for path in place.glob("*/__init__.py")}
    )
    matches = get_close_matches(name.partition(".")[0], near, n=1)
    hint = f"did you mean {matches[0]}? " if matches else ""
    hint += f"Modules there: {', '.join(near)}." if near else "There are no modules there."
    return f"no module {name!r} in {place} or among the installed packages; {hint}"


def _offer(module: ModuleType) -> str:
    nodes = [name for name, value in vars(module).items() if isinstance(value, Node)]
    if nodes:
        return "write " + " or ".join(f"{module.__name__}:{name}" for name in nodes)
    return (
        f"{module.__name__} holds no Node at its top level: add one, as in "
        'node = Node("sqlite:///.domicile/dev.db", entities=[...])'
    )


def _a(value: Any) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[:1] in 'aeiou' else 'a'} {kind}"
