"""No command, log or error shows the password of a store's URL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from postgres_lab import shared_server

from domicile import ConfigError, Node, connect
from domicile.backends.registry import shown_url
from domicile.sync import connect_sync

SECRET = "Tr0ub4dor-hidden"
APP = """
import os
from domicile import Entity, Node, handler

class Counter(Entity, name="words.counter"):
    @handler
    async def add(self) -> int:
        return 1

node = Node(os.environ["WORDS_STORE"], entities=[Counter])
"""
COMMANDS = (
    ("status",), ("where", "words.counter", "x"), ("drain", "nobody"), ("journal", "info"),
    ("reset-history", "--yes"),
)  # fmt: skip


def said(directory: Path, url: str, *command: str) -> str:
    """All that a command writes."""
    environ = {**os.environ, "DOMICILE_STORE": url, "WORDS_STORE": url}
    done = subprocess.run(
        [sys.executable, "-m", "domicile", *command],
        capture_output=True, text=True, env=environ, check=False, cwd=directory, timeout=120,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_no_command_shows_a_password(tmp_path: Path) -> None:
    server = shared_server()
    (tmp_path / "words.py").write_text(APP, encoding="utf-8")
    # The server asks this user for no password, so a wrong one is right, too.
    right = server.new_database().replace("domicile@", f"domicile:{SECRET}@")
    nowhere = f"postgresql://domicile:{SECRET}@127.0.0.1:1/gone?application_name={SECRET}"
    for command in COMMANDS:
        told = said(tmp_path, right, *command)
        assert told.strip(), command
        assert SECRET not in told, command
    for command in (("status",), ("journal", "info"), ("run", "words:node", "--port", "x")):
        told = said(tmp_path, nowhere, *command)
        assert told.strip(), command
        assert SECRET not in told, command


def test_nothing_that_a_program_sees_shows_a_password() -> None:
    url = f"postgresql://app:{SECRET}@127.0.0.1:1/gone"
    for thing in (Node(url, entities=[]), connect(url), connect_sync(url)):
        assert SECRET not in repr(thing)
    with pytest.raises(ConfigError) as told:
        Node(url.replace("postgresql", "postgres"), entities=[])
    assert SECRET not in str(told.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"postgresql://u:{SECRET}@h:5/db?x=y", "postgresql://h:5/db"),
        (f"postgresql://u:{SECRET}/more@h/db", "postgresql://h/db"),
        (f"postgresql://u:{SECRET}?more@h/db", "postgresql://h/db"),
        (f"postgresql://u:{SECRET}@more@h/db", "postgresql://h/db"),
        (f"postgresql://h/db?password={SECRET}", "postgresql://h/db"),
        (f"postgresql://h?password={SECRET}", "postgresql://h"),
        ("postgresql://a:1,b:2/db", "postgresql://a:1,b:2/db"),
        ("sqlite:///a@b/c.db", "sqlite:///a@b/c.db"),
    ],
)
def test_what_is_shown_of_a_url(url: str, shown: str) -> None:
    assert shown_url(url) == shown
