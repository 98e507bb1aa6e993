"""What a failing round leaves for whoever looks into it.

Its directory has the logs and records of all processes and the store already; added are the merged
history, the violations, the timeline as text and as a picture, and the command that repeats it.
"""

from __future__ import annotations

import gzip
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from domicile.testing.checkers import Violation
from domicile.testing.history import History
from domicile.testing.timeline.picture import draw
from domicile.testing.timeline.trace import trace
from domicile.testing.timeline.words import text


def leave(
    directory: Path, history: History, violations: Sequence[Violation], command: str, title: str
) -> list[str]:
    """Write everything into the round's directory; what could not be written, and why."""

    def keep_history() -> None:
        encode = msgspec.json.Encoder(enc_hook=repr).encode
        with gzip.open(directory / "history.jsonl.gz", "wb") as file:
            for event in history.events:
                file.write(encode((event.at, event.kind, event.fields)) + b"\n")

    def keep_timeline() -> None:
        traced = trace(history, violations, title=title)
        (directory / "timeline.txt").write_text(text(traced), encoding="utf-8")
        (directory / "timeline.svg").write_text(draw(traced), encoding="utf-8")

    def keep_verdict() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "command.txt").write_text(f"{command}\n", encoding="utf-8")
        told = "\n\n".join(str(violation) for violation in violations)
        (directory / "violations.txt").write_text(f"{title}\n\n{told}\n", encoding="utf-8")

    parts: dict[str, Callable[[], None]] = {
        "verdict": keep_verdict,
        "history": keep_history,
        "timeline": keep_timeline,
    }
    missing: list[str] = []
    for name, keep in parts.items():
        try:
            keep()
        except Exception:
            # A history that breaks its own picture is worth all the more.
            missing.append(f"no {name} in the bundle: {traceback.format_exc()}")
    return missing
