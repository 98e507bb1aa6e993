"""The examples do what their pages show, in processes of their own."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import console_lab
import pytest
from console_lab import Session, Step, plain, steps
from postgres_lab import shared_server
from valkey_lab import program

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path for path in (ROOT / "examples").iterdir() if path.is_dir())


def copy_of(example: Path, place: Path) -> Path:
    """The example in a directory that may be written to."""
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    return Path(shutil.copytree(example, place / example.name, ignore=ignored))


def test_there_are_examples() -> None:
    assert [path.name for path in EXAMPLES] == [
        "01-counter", "02-event-sourced-cart", "03-postgres-ledger",
        "04-three-hosts", "05-follow-the-primary", "06-replica-driver",
    ]  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_page_of_an_example_is_true(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (example / "README.md").read_text(encoding="utf-8")
    if "DATABASE_URL" in text:
        monkeypatch.setenv("DATABASE_URL", shared_server().new_database())
    if "valkey-server" in text:
        server = program()
        if server is None:
            pytest.skip("no Valkey or Redis server is installed")
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "valkey-server").symlink_to(server)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    session = steps(text)
    assert session
    # A short path: a socket lies in it.
    with (
        tempfile.TemporaryDirectory(prefix="dx-") as short,
        Session(copy_of(example, Path(short))) as console,
    ):
        for step in session:
            console.play(step)


def test_the_tests_of_the_examples_are_on_their_pages() -> None:
    """And so are run with them."""
    missing = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "examples").glob("*/test_*.py")
        if f"$ python -m pytest -q {path.name}\n"
        not in (path.parent / "README.md").read_text(encoding="utf-8")
    ]
    assert missing == []


def test_every_console_block_is_read() -> None:
    page = "```console\n$ one\na\n\nb\n$ two\n```\ntext\n```console\n$ three\n```\n"
    assert steps(page) == [Step("one", ("a", "b")), Step("two", ()), Step("three", ())]
    assert steps("```console\n$ one \\\n  two\nthree\n```\n") == [Step("one \\\n  two", ("three",))]


def test_what_differs_from_run_to_run_is_left_out() -> None:
    assert (
        plain("12:00:01.234 INFO  vm-1-00ff  at 127.0.0.1:99") == "<time> INFO <node> at <address>"
    )
    assert plain("vm-1-00ff   up   128   31 s   coordinator") == "<node> up 128 <age>"
    assert plain("epoch    2") == "epoch <n>"
    assert plain("visits is at 7") == "visits is at 7"


def test_a_page_that_is_wrong_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_lab, "SOON_S", 5.0)
    with Session(tmp_path) as console:
        console.play(Step("echo 1", ("1",)))
        with pytest.raises(AssertionError, match="echo 1"):
            console.play(Step("echo 1", ("2",)))
        with pytest.raises(AssertionError, match="nothing:node"):
            console.play(Step("domicile run nothing:node", ("joined",)))
