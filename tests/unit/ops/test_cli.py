"""The command line itself: help, version, usage, and what importing it costs others."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from cluster_lab import healthy
from run_lab import running
from typer.testing import CliRunner

import domicile
from domicile.ops.cli import app

COMMANDS = (
    "run", "manager", "status", "where", "drain", "target", "declare-dead", "free",
    "unquarantine", "reset-history", "demo",
)  # fmt: skip
DOCS = Path(domicile.__file__).parents[2] / "docs" / "reference" / "cli.md"


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    return result.stdout


def examples(text: str) -> list[str]:
    return re.findall(r"• ((?:\w+=\S+ )?domicile .*)", text)


def test_the_version_is_that_of_the_package() -> None:
    assert re.fullmatch(r"domicile \d+\.\d+\.\d+\n", shown("--version"))


def test_the_module_runs_too() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "domicile", "--version"], capture_output=True, text=True, check=True
    )
    assert ran.stdout == shown("--version")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples_that_parse(command: str) -> None:
    found = examples(shown(command, "--help"))
    assert len(found) >= 2
    for example in found:
        words = [word for word in shlex.split(example) if "=" not in word.partition(" ")[0]]
        assert words[:2] == ["domicile", command]
        # With --help at its end everything before it is parsed, and nothing is done.
        assert CliRunner().invoke(app, [*words[1:], "--help"]).exit_code == 0


def test_help_lists_the_commands() -> None:
    text = shown("--help")
    assert [command for command in COMMANDS if f" {command} " not in text] == []
    assert "domicile demo" in text


def test_the_page_names_every_command_and_option() -> None:
    page = DOCS.read_text(encoding="utf-8")
    for command in COMMANDS:
        assert f"## domicile {command}" in page
        section = page.partition(f"## domicile {command}")[2].partition("\n## ")[0]
        options = set(re.findall(r"--[a-z-]+", shown(command, "--help"))) - {"--help"}
        assert [option for option in sorted(options) if f"`{option}" not in section] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("run",),
        ("run", "app:node", "--loop", "trio"),
        ("run", "app:node", "--log-level", "loud"),
        ("where", "counter"),
        ("demo", "--nodes", "2"),
        ("demo", "--seconds", "0"),
        ("manager",),
        ("manager", "sqlite:///x.db", "--strategy", "magic"),
        ("manager", "mysql://x"),
        ("manager", "sqlite:///no/such/x.db", "--listen", "foo"),
        ("manager", "sqlite:///no/such/x.db", "--advertise", "here:0"),
        ("free", "default/7"),
        ("reset-history", "sqlite:///x.db", "--gap", "0"),
    ],
)
def test_wrong_usage_exits_with_2(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DOMICILE_STORE", raising=False)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("manager",),
        ("where", "counter", "c 1"),
        ("inspect", "node-1"),
        ("inspect", "counter", "c1"),
        ("kick", "counter", "c1"),
        ("drain", "node-1"),
        ("target",),
        ("target", "2.1.0"),
        ("declare-dead", "node-1"),
        ("free", "default/7"),
        ("unquarantine", "default/7"),
        ("reset-history",),
        ("store", "reopen"),
        ("replica", "status"),
        ("replica", "status", "orders"),
        ("replica", "remove", "orders", "s 3"),
    ],
)
def test_a_store_that_is_missing_is_asked_for_with_what_was_typed(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DOMICILE_STORE", raising=False)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    typed = shlex.join(("domicile", *words))
    assert f"say which store: {typed} sqlite:///path/to/file.db," in result.stderr


@pytest.mark.parametrize("command", ["run", "manager"])
def test_help_names_the_exit_codes(command: str) -> None:
    text = " ".join(shown(command, "--help").split())
    for code in ("with 0 once", "1 after", "2 if", "3 if the store is away"):
        assert code in text


def test_nobody_else_pays_for_the_command_line() -> None:
    code = "import sys, domicile.testing; domicile.Node, domicile.testing.Sim; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = ran.stdout.split()
    assert "domicile.node" in loaded
    heavy = ("typer", "rich", "click", "domicile.ops")
    assert [name for name in loaded if name.split(".")[0] in heavy or name.startswith(heavy)] == []


WITHOUT = """
import sys
from importlib.abc import MetaPathFinder


class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Absent())
"""
"""Has a process run as if some packages were not installed."""


def without(absent: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    program = WITHOUT.format(absent=absent) + code
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )


def test_the_library_does_without_the_command_line_packages() -> None:
    ran = without(
        ("typer", "rich", "click"),
        "import domicile, domicile.testing, domicile.backends\n"
        "import domicile.testing.suites.store, domicile.testing.suites.journal\n"
        "domicile.Node('memory://x'); print('fine')",
    )
    assert (ran.returncode, ran.stdout) == (0, "fine\n"), ran.stderr


@pytest.mark.parametrize("absent", ["typer", "rich"])
def test_without_its_packages_the_command_says_how_to_install_them(absent: str) -> None:
    script = next(iter(entry_points(group="console_scripts", name="domicile"))).value
    module, _, name = script.partition(":")
    for code in (
        f"from {module} import {name}; {name}()",
        "import runpy; runpy.run_module('domicile', run_name='__main__')",
    ):
        ran = without((absent,), code)
        assert (ran.returncode, ran.stdout) == (2, "")
        assert ran.stderr == (
            f"error: the command line needs the package {absent}, not installed here: "
            "pip install 'domicile[cli]'\n"
        )


def test_a_package_that_is_broken_is_not_called_missing(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import nowhere_at_all", encoding="utf-8")
    path = f"sys.path.insert(0, {str(tmp_path)!r})"
    ran = without((), f"{path}; from domicile.__main__ import main; main()")
    assert ran.returncode == 1
    assert "No module named 'nowhere_at_all'" in ran.stderr
    assert "pip install" not in ran.stderr


def test_watching_shows_it_again_until_interrupted(tmp_path: Path) -> None:
    url = healthy().write(tmp_path / "s.db")
    with running(tmp_path, "status", url, "--watch", "--json") as watching:
        assert watching.process.stdout is not None
        first, second = watching.process.stdout.readline(), watching.process.stdout.readline()
        assert json.loads(first) == json.loads(second)
        watching.signal(signal.SIGINT)
        assert watching.ended() == 0
        assert watching.said == []
