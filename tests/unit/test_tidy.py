"""What no linter checks. Each rule is a pure function from text to complaints, tried on a sample
that it must reject before it judges the tree.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import tomllib
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "domicile"
CORE = SRC / "core"

PURE = (
    "core",
    "settings.py",
    "diagnose/records.py",
    "entity/hosting/policies.py",
    "failover/chains.py",
    "failover/choice.py",
    "failover/machine.py",
    "failover/records.py",
    "failover/sync_set.py",
    "failover/tables.py",
    "failover/view.py",
    "journals/key_days.py",
    "kube/admission.py",
    "kube/conventions.py",
    "kube/hashring.py",
    "kube/leases.py",
    "kube/pod_proof.py",
    "kube/ranges.py",
    "kube/ring_metrics.py",
    "kube/sharder.py",
    "kubeapi/kinds.py",
    "kubeapi/listing.py",
    "kubeapi/objects.py",
    "links/departed.py",
    "observe/readiness.py",
    "persist/batches.py",
    "stores/etcd/watch_pulse.py",
    "stores/storetime.py",
)
"""Decisions without a loop, a clock, a socket or entropy of their own. `make check` also looks at
what they import, to the end (the contract "Pure modules" in pyproject.toml)."""

ENTRANCES = ("__main__", "sync", "ops.cli", "failover.serve")
"""Modules that are used from outside: by Python, by the console script."""

IMPURE = (
    *("asyncio", "concurrent", "logging", "multiprocessing", "os", "secrets", "selectors"),
    *("signal", "socket", "ssl", "subprocess", "threading", "time", "uuid"),
)
SET_NAMES = ("set", "frozenset", "Set", "FrozenSet", "AbstractSet", "MutableSet")
LINUX_ONLY = ("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty")
UNIX_SIGNALS = ("SIGKILL", "SIGSTOP", "SIGCONT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM")
MACHINE_PATHS = tuple(f"/{folder}/" for folder in ("work", "root", "home"))

COMPOSERS = ("incarnation", "backends", "process")
"""What puts a process together: each other room is known to them by its main module."""

DRIVEN = ("core.coordinator.machine", "failover.answers", "failover.proxy")
"""Parts that have a room of their own, and one module in another that drives or serves them."""

Rule = Callable[[str], list[str]]


def imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of an import statement; the name is empty for a plain import."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, ""
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield node.module or "", alias.name


def impure(text: str) -> list[str]:
    """Imports and calls that would give the core a clock, a loop or entropy of its own."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        for module, name in imports(node):
            if module.split(".")[0] in IMPURE:
                found.append(f"line {node.lineno}: imports {module}")  # type: ignore[attr-defined]
            if module == "random" and name != "Random":
                found.append(f"line {node.lineno}: only Random may come from random")  # type: ignore[attr-defined]
        match node:
            case ast.Attribute(
                value=ast.Name("datetime" | "date") | ast.Attribute(attr="datetime" | "date"),
                attr="now" | "utcnow" | "today" as attr,
            ):
                found.append(f"line {node.lineno}: reads the clock by {attr}()")
            case ast.Name("hash", ast.Load()) | ast.Attribute(attr="__hash__"):
                found.append(f"line {node.lineno}: uses hash()")
            case _:
                pass
    return found


def unordered(text: str) -> list[str]:
    """Set types, literals, comprehensions and calls."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        names = [name for _, name in imports(node)]
        match node:
            case ast.Set() | ast.SetComp():
                found.append(f"line {node.lineno}: a set")
            case ast.Name(name) if name in SET_NAMES:
                found.append(f"line {node.lineno}: {name}")
            case ast.Attribute(value=ast.Name("typing" | "abc" | "builtins"), attr=name):
                if name in SET_NAMES:
                    found.append(f"line {node.lineno}: {name}")
            case ast.Import() | ast.ImportFrom() if any(name in SET_NAMES for name in names):
                found.append(f"line {node.lineno}: imports a set type")
            case _:
                pass
    return found


def unguarded(text: str) -> list[str]:
    """Imports that only some platforms have, outside `try` and outside a platform check."""
    found: list[str] = []

    def visit(node: ast.AST, guarded: bool) -> None:
        for module, name in imports(node):
            special = module.split(".")[0] in LINUX_ONLY
            special = special or (module == "signal" and name in UNIX_SIGNALS)
            if special and not guarded:
                found.append(f"line {node.lineno}: {module} {name}".rstrip())  # type: ignore[attr-defined]
        if isinstance(node, ast.Try):
            caught = " ".join(ast.unparse(h.type) for h in node.handlers if h.type is not None)
            inside = guarded or "ImportError" in caught or "ModuleNotFoundError" in caught
            for child in node.body:
                visit(child, inside)
            for child in (*node.handlers, *node.orelse, *node.finalbody):
                visit(child, guarded)
            return
        if isinstance(node, ast.If):
            guarded = guarded or "sys.platform" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            visit(child, guarded)

    visit(ast.parse(text), False)
    return found


def undocumented(text: str) -> list[str]:
    """Public classes, functions and methods without a docstring."""
    found: list[str] = []

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name.startswith("_"):
                continue
            if not ast.get_docstring(node):
                found.append(f"line {node.lineno}: {prefix}{node.name} has no docstring")
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    visit(ast.parse(text).body, "")
    return found


def unopened(text: str) -> list[str]:
    """A module without a docstring, or one with definitions but without the future import."""
    tree = ast.parse(text)
    found = [] if ast.get_docstring(tree) else ["line 1: the module has no docstring"]
    trivial = all(isinstance(node, ast.Expr | ast.ImportFrom | ast.Assign) for node in tree.body)
    if not trivial and ("__future__", "annotations") not in [
        pair for node in tree.body for pair in imports(node)
    ]:
        found.append("line 1: `from __future__ import annotations` is missing")
    return found


def machine_paths(text: str) -> list[str]:
    """Paths that exist on somebody's machine only."""
    return [
        f"line {number}: {path}"
        for number, line in enumerate(text.splitlines(), start=1)
        for path in MACHINE_PATHS
        if path in line
    ]


def module_of(path: Path) -> str:
    """The name of a module below the package: `core.handoff.owner`."""
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def importers(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Who imports each module, by names below the package; imports inside functions count."""
    found: dict[str, list[str]] = {module: [] for module in texts}
    for module, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            for source, name in imports(node):
                target = source.removeprefix("domicile").lstrip(".")
                for one in (f"{target}.{name}".strip("."), target):
                    if one in found and one != module:
                        if module not in found[one]:
                            found[one].append(module)
                        break
    return found


def astray(texts: Mapping[str, str]) -> list[str]:
    """Modules with one importer that live in another part of the house than that one.

    Such a module belongs into its importer, or beside it, or into a room below it.
    """
    wrong: list[str] = []
    for module, found in importers(texts).items():
        if len(found) != 1 or module in ENTRANCES or not module or found == [""]:
            # The package itself imports what users see.
            continue
        home, user = module.rpartition(".")[0], found[0].rpartition(".")[0]
        rooms = f"{home}.".startswith(f"{user}.") or f"{user}.".startswith(f"{home}.") or not home
        if not rooms and found[0].split(".")[0] not in COMPOSERS and module not in DRIVEN:
            wrong.append(f"{module} is imported by {found[0]} alone")
    return wrong


def shared_names(texts: Mapping[str, str]) -> list[str]:
    """Public classes and functions that two modules define."""
    where: dict[str, dict[str, None]] = {}
    for module, text in texts.items():
        for node in ast.parse(text).body:
            name = ""
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = node.name
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                alias = node.targets[0].id
                # Type aliases are things, too; a TypeVar's one letter is none.
                name = alias if len(alias) > 1 and not alias.isupper() and alias != "log" else ""
            if name and not name.startswith("_"):
                where.setdefault(name, {})[module] = None
    return [f"{name}: {', '.join(found)}" for name, found in where.items() if len(found) > 1]


def unsorted_names(names: list[str]) -> list[str]:
    """Neighbours in `__all__` that are out of order or equal."""
    return [f"{b} after {a}" for a, b in pairwise(names) if a >= b]


def complaints(rule: Rule, files: Iterator[Path]) -> list[str]:
    """All complaints of a rule, each with its file."""
    return [
        f"{path.relative_to(ROOT)}: {complaint}"
        for path in files
        for complaint in rule(path.read_text(encoding="utf-8"))
    ]


def python_files(*folders: Path) -> Iterator[Path]:
    """The Python files under folders, in order."""
    for folder in folders:
        yield from sorted(folder.rglob("*.py"))


def text_files(folder: Path) -> Iterator[Path]:
    """All files that belong to the project: no caches, no build results, nothing binary."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            hidden = path.name.startswith(".") and path.name not in (".ci", ".github")
            if not hidden and path.name not in ("__pycache__", "build", "dist"):
                yield from text_files(path)
        elif path.name not in (".coverage", ".git") and b"\0" not in path.read_bytes()[:4096]:
            yield path


@pytest.mark.parametrize(
    ("rule", "bad"),
    [
        (impure, "import asyncio"),
        (impure, "import os.path"),
        (impure, "from time import monotonic"),
        (impure, "def f():\n    import socket"),
        (impure, "import random"),
        (impure, "from random import choice"),
        (impure, "from datetime import datetime\nx = datetime.now()"),
        (impure, "import datetime\nx = datetime.datetime.utcnow()"),
        (impure, "x = hash('a')"),
        (impure, "x = sorted('ab', key=hash)"),
        (impure, "x = 'a'.__hash__()"),
        (unordered, "x = {1, 2}"),
        (unordered, "x = {y for y in ()}"),
        (unordered, "x = set()"),
        (unordered, "x = frozenset((1,))"),
        (unordered, "def f(x: set[int]) -> None: ..."),
        (unordered, "from collections.abc import Set as Names"),
        (unordered, "import typing\ndef f(x: typing.FrozenSet[int]) -> None: ..."),
        (unguarded, "import fcntl"),
        (unguarded, "def f():\n    from resource import getrlimit"),
        (unguarded, "from signal import SIGSTOP"),
        (unguarded, "try:\n    pass\nexcept ImportError:\n    import pwd"),
        (unguarded, "try:\n    import pwd\nexcept ValueError:\n    pass"),
        (undocumented, "class A:\n    pass"),
        (undocumented, "async def f(): ..."),
        (undocumented, "class A:\n    'Yes.'\n    def f(self): ..."),
        (unopened, "from __future__ import annotations\nx = 1"),
        (unopened, "'Yes.'\ndef f(): ..."),
        (machine_paths, f"see {MACHINE_PATHS[0]}x"),
    ],
)
def test_a_rule_rejects_a_bad_sample(rule: Rule, bad: str) -> None:
    assert rule(bad)


@pytest.mark.parametrize(
    ("rule", "good"),
    [
        (impure, "from random import Random\nfrom datetime import datetime, timedelta"),
        (unordered, "x = {'a': 1}\ny = {k: v for k, v in x.items()}\nsettings = dict(set_to=1)"),
        (unguarded, "try:\n    import fcntl\nexcept ImportError:\n    fcntl = None"),
        (unguarded, "import sys\nif sys.platform != 'win32':\n    import resource"),
        (unguarded, "from signal import SIGTERM"),
        (undocumented, "class _A:\n    pass\ndef f():\n    'Yes.'"),
        (unopened, "'Yes.'\nfrom domicile.errors import Fenced\n__all__ = ['Fenced']"),
        (unopened, "'Yes.'\nfrom __future__ import annotations\ndef f(): ..."),
    ],
)
def test_a_rule_accepts_a_good_sample(rule: Rule, good: str) -> None:
    assert rule(good) == []


def test_order_of_names_is_judged() -> None:
    assert unsorted_names(["A", "a", "b"]) == []
    assert unsorted_names(["a", "c", "b"]) == ["b after c"]
    assert unsorted_names(["a", "a"]) == ["a after a"]


def product() -> dict[str, str]:
    """The product's modules: all but the kit for tests."""
    return {
        module_of(path): path.read_text(encoding="utf-8")
        for path in python_files(SRC)
        if "testing" not in path.relative_to(SRC).parts
    }


def pure_files() -> Iterator[Path]:
    for name in PURE:
        path = SRC / name
        assert path.exists(), f"{name} has moved: name its new place in PURE"
        yield from [path] if path.is_file() else python_files(path)


def test_the_contract_of_pure_modules_names_the_same_modules() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (pure,) = [one for one in contracts if one["name"].startswith("Pure modules")]
    mine = ["domicile." + name.removesuffix(".py").replace("/", ".") for name in PURE]
    assert mine == pure["source_modules"]


def test_what_must_be_pure_is() -> None:
    assert complaints(impure, pure_files()) == []


def test_no_public_name_stands_for_two_things() -> None:
    assert shared_names({"a": "class A: ...", "b": "def A(): ..."}) == ["A: a, b"]
    assert shared_names(product()) == []


def test_a_module_with_one_importer_lives_with_it() -> None:
    texts = {"": "", "a.x": "from domicile.b.y import f", "b.y": "def f(): ...", "a.z": ""}
    assert astray(texts) == ["b.y is imported by a.x alone"]
    assert astray({**texts, "a.z": "from domicile.b import y"}) == []
    assert astray(product()) == []


def test_the_core_has_no_sets() -> None:
    assert complaints(unordered, python_files(CORE)) == []


def test_linux_only_imports_are_guarded() -> None:
    assert complaints(unguarded, python_files(SRC)) == []


def test_modules_open_with_a_docstring_and_the_future_import() -> None:
    assert complaints(unopened, python_files(SRC)) == []


def test_ports_are_documented() -> None:
    assert complaints(undocumented, python_files(SRC / "ports")) == []


def test_no_file_names_a_path_of_one_machine() -> None:
    assert complaints(machine_paths, text_files(ROOT)) == []


@pytest.mark.parametrize("module", ["domicile", "domicile.testing"])
def test_public_names_are_sorted_and_documented(module: str) -> None:
    package = importlib.import_module(module)
    names: list[str] = list(package.__all__)
    assert unsorted_names(names) == []
    public = {name: getattr(package, name) for name in names}
    assert public
    bare = [
        name
        for name, thing in public.items()
        if (inspect.isclass(thing) and not vars(thing).get("__doc__"))
        or (inspect.isroutine(thing) and not thing.__doc__)
    ]
    assert bare == []
