"""Log lines as the command line writes them."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Iterator

import pytest

from domicile.ops import logs
from domicile.taglog import TaggedLog

TAGS = {"node": "node-1", "shard": "default/17", "epoch": 4}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def record(message: str, level: int = logging.INFO, **extra: object) -> logging.LogRecord:
    return logging.getLogger("domicile").makeRecord(
        "domicile", level, __file__, 1, message, (), None, extra=extra
    )


def test_a_line_names_node_shard_and_epoch() -> None:
    line = logs.TextFormatter().format(record("moved", **TAGS))
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} INFO  node-1 default/17@4  moved", line)


@pytest.mark.parametrize(
    ("extra", "rest"),
    [
        ({}, "WARN  hm"),
        ({"node": "node-1"}, "WARN  node-1  hm"),
        ({"shard": "default/0", "epoch": 0}, "WARN  default/0@0  hm"),
        ({"shard": "default/3"}, "WARN  default/3  hm"),
    ],
)
def test_what_a_record_lacks_stays_blank(extra: dict[str, object], rest: str) -> None:
    line = logs.TextFormatter().format(record("hm", logging.WARNING, **extra))
    assert line.partition(" ")[2] == rest


def test_json_lines_hold_the_same() -> None:
    line = json.loads(logs.JsonFormatter().format(record("moved", **TAGS)))
    assert line["time"].endswith("+00:00")
    assert {name: line[name] for name in ("level", "logger", "message", *TAGS)} == {
        "level": "info", "logger": "domicile", "message": "moved", **TAGS,
    }  # fmt: skip
    assert "traceback" not in line


def test_a_traceback_stays_inside_its_json_line() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError:
        failed = record("it failed")
        failed.exc_info = sys.exc_info()
    line = logs.JsonFormatter().format(failed)
    assert "\n" not in line
    assert "ValueError: a\nb" in json.loads(line)["traceback"]


def test_set_up_writes_what_is_at_least_that_important(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    logs.set_up("warning", "text", stream)
    logging.getLogger("domicile").info("not this")
    logging.getLogger("domicile").warning("this", extra={"node": "node-2"})
    assert stream.getvalue().partition(" ")[2] == "WARN  node-2  this\n"


def test_colour_is_for_terminals_without_objection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    assert not logs.is_coloured(io.StringIO())
    assert logs.is_coloured(Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not logs.is_coloured(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not logs.is_coloured(Terminal())


def test_colour_changes_no_words() -> None:
    dyed = logs.TextFormatter(colour=True).format(record("moved", logging.ERROR, **TAGS))
    assert "\x1b[" in dyed
    assert re.sub(r"\x1b\[[0-9;]*m", "", dyed).endswith("ERROR node-1 default/17@4  moved")


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_place_that_a_message_carries_itself_is_shown_once(form: logs.Form) -> None:
    stream = io.StringIO()
    logs.set_up("info", form, stream)
    TaggedLog().info("opened %d shards", 3, extra=TAGS)
    line = stream.getvalue()
    assert line.count("node-1") == 1
    assert line.count("default/17") == 1
    assert "opened 3 shards" in line
