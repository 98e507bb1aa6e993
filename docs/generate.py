"""Draws the diagrams in the docs from the transition tables in `domicile.core`.

`make docs` runs it; `tests/test_docs.py` fails while a page differs from what it would write.
A page asks for a drawing by a pair of markers, `<!-- generated:owner -->` and
`<!-- /generated:owner -->`; only what stands between them is ever replaced.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

DOCS = Path(__file__).parent

MARKED = re.compile(
    r"(?P<open><!-- generated:(?P<name>[\w-]+) -->\n).*?(?P<close><!-- /generated:(?P=name) -->)",
    re.DOTALL,
)
MARKER = re.compile(r"<!-- /?generated:[\w-]+ -->")


class Transition(Protocol):
    """What the drawings need to know of a row."""

    @property
    def to(self) -> tuple[Any, ...]: ...
    @property
    def rule(self) -> str: ...
    @property
    def does(self) -> str: ...


Table = Mapping[tuple[Any, Any], Transition]


def diagram(transitions: Table) -> str:
    """A Mermaid state diagram of the transitions that change the state.

    The machine starts in the first state of its enumeration.
    """
    states: list[Enum] = list(type(next(iter(transitions))[0]))
    lines = ["stateDiagram-v2"]
    lines += [f'    state "{state.value}" as {state.name}' for state in states]
    lines.append(f"    [*] --> {states[0].name}")
    for (state, event), transition in transitions.items():
        lines += [
            f"    {state.name} --> {to.name}: {event.value} ({transition.rule})"
            for to in transition.to
            if to is not state
        ]
    return "\n".join(["```mermaid", *lines, "```"])


def grid(transitions: Table) -> str:
    """A Markdown table of all transitions, those that change nothing included."""
    rows = [("in", "on", "goes to", "does", "rule")]
    rows += [
        (
            state.value,
            event.value,
            " or ".join(to.value for to in transition.to),
            transition.does,
            transition.rule,
        )
        for (state, event), transition in transitions.items()
    ]
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "| --- | --- | --- | --- | --- |", *lines[1:]])


def section(transitions: Table) -> str:
    """Diagram and table, as they stand between the markers."""
    return f"\n{diagram(transitions)}\n\n{grid(transitions)}\n\n"


def fill(text: str, sections: Mapping[str, str]) -> str:
    """The page with every marked section replaced. A marker that pairs with nothing is an error."""
    names = [match["name"] for match in MARKED.finditer(text)]
    if unknown := [name for name in names if name not in sections]:
        raise ValueError(f"no drawing is called {unknown[0]}; there are {', '.join(sections)}")
    if len(MARKER.findall(text)) != 2 * len(names):
        raise ValueError("a generated section is not closed, or is closed without being opened")
    return MARKED.sub(lambda match: match["open"] + sections[match["name"]] + match["close"], text)


def drawings() -> dict[str, str]:
    """Every drawing that a page can ask for."""
    from domicile.core import lease, owner, sender

    return {
        "owner": section(owner.TRANSITIONS),
        "sender": section(sender.TRANSITIONS),
        "lease": section(lease.TRANSITIONS),
    }


def stale(docs: Path, sections: Mapping[str, str]) -> dict[Path, str]:
    """Pages that differ from what they should be, with what they should be."""
    pages: dict[Path, str] = {}
    for path in sorted(docs.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        try:
            wanted = fill(text, sections)
        except ValueError as problem:
            raise ValueError(f"{path.relative_to(docs)}: {problem}") from problem
        if wanted != text:
            pages[path] = wanted
    return pages


def main() -> int:
    """Rewrite the stale pages and name them."""
    for path, text in stale(DOCS, drawings()).items():
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"redrawn: {path.relative_to(DOCS.parent)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
