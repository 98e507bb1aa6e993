"""Log lines for people and for machines, set up by the command line only.

The library logs to `domicile` with `extra=` naming node, shard (`role/number`) and epoch
(`domicile.taglog`), and never configures logging itself: a host program's own set-up must not be
touched. Here these names have a place of their own, so a message is shown without them.
"""

from __future__ import annotations

import logging
import sys
import time
from datetime import UTC, datetime
from typing import Literal, TextIO

import msgspec
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

from domicile.taglog import place_in

Form = Literal["text", "json"]

LEVELS = ("debug", "info", "warning", "error", "critical")

_STYLES = {
    logging.DEBUG: Style.parse("dim"),
    logging.INFO: Style.parse("green"),
    logging.WARNING: Style.parse("yellow"),
    logging.ERROR: Style.parse("bold red"),
    logging.CRITICAL: Style.parse("bold white on red"),
}
_SHORT = {"WARNING": "WARN", "CRITICAL": "FATAL"}
_FAINT = Style.parse("dim")
_PLACE = Style.parse("cyan")


class TextFormatter(logging.Formatter):
    """`12:00:01.234 INFO  node-1 default/17@4  message`; what a record lacks stays blank."""

    def __init__(self, *, colour: bool = False) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback below it if there is one."""
        place = place_in(vars(record))
        message = super().format(record).removeprefix(f"{place}: ")
        level = _SHORT.get(record.levelname, record.levelname)
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        stamp = f"{clock}.{int(record.msecs):03d}"
        style = _STYLES.get(record.levelno, _FAINT)
        head = f"{self._dye(stamp, _FAINT)} {self._dye(f'{level:<5}', style)}"
        return f"{head} {self._dye(place, _PLACE)}  {message}" if place else f"{head} {message}"

    def _dye(self, text: str, style: Style) -> str:
        return style.render(text, color_system=ColorSystem.STANDARD) if self._colour else text


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's own fields, and those of `extra=` that it has."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage().removeprefix(f"{place_in(vars(record))}: "),
        }
        for name in ("node", "incarnation", "shard", "epoch"):
            value = getattr(record, name, None)
            if value is not None:
                line[name] = value
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def set_up(level: str, form: Form, stream: TextIO | None = None) -> None:
    """Send all logging of this process to one stream, by default standard error."""
    target: TextIO = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        JsonFormatter() if form == "json" else TextFormatter(colour=is_coloured(target))
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def is_coloured(stream: TextIO) -> bool:
    """Whether a stream is a terminal that shows colours, and `NO_COLOR` is not set."""
    console = Console(file=stream)
    return console.is_terminal and console.color_system is not None and not console.no_color
