"""Draws in the docs what the source knows better: transition tables, errors, events, checkers, and
the timeline of a seed.

`make docs` runs it; `tests/docs/test_docs.py` fails while a page or a picture differs from what it
would write. A page asks for a drawing by a pair of markers, `<!-- generated:owner -->` and
`<!-- /generated:owner -->`; only what stands between them is ever replaced.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

DOCS = Path(__file__).parent

MARKED = re.compile(
    r"(?P<open><!-- generated:(?P<name>[\w-]+) -->\n).*?(?P<close><!-- /generated:(?P=name) -->)",
    re.DOTALL,
)
MARKER = re.compile(r"<!-- /?generated:[\w-]+ -->")
RULED = re.compile(r"^=+ +=+$", re.MULTILINE)


class Transition(Protocol):
    """What the drawings need to know of a row."""

    @property
    def to(self) -> tuple[Any, ...]: ...
    @property
    def rule(self) -> str: ...
    @property
    def does(self) -> Enum: ...


class Wished(Protocol):
    """What the table of wishes needs to know of a row."""

    @property
    def wish(self) -> Enum: ...
    @property
    def rule(self) -> str: ...


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
    return markdown(
        ("in", "on", "goes to", "does", "rule"),
        [
            (
                state.value,
                event.value,
                " or ".join(to.value for to in transition.to),
                transition.does.value,
                transition.rule,
            )
            for (state, event), transition in transitions.items()
        ],
    )


def wishes(table: Mapping[tuple[Enum, Enum], Wished]) -> str:
    """A Markdown table of what a server shall be, by the state and its place in it."""
    rows = [
        (phase.value, place.value, wished.wish.value, wished.rule)
        for (phase, place), wished in table.items()
    ]
    head = ("the state is", "which names the agent as", "its server shall", "rule")
    return f"\n{markdown(head, rows)}\n\n"


def markdown(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
    titles, ruler = " | ".join(head), " | ".join("---" for _ in head)
    return "\n".join([f"| {titles} |", f"| {ruler} |", *lines])


def section(transitions: Table) -> str:
    """Diagram and table, as they stand between the markers."""
    return f"\n{diagram(transitions)}\n\n{grid(transitions)}\n\n"


def errors(module: ModuleType) -> str:
    """The tree of errors as its module draws it, and what each class says of itself."""
    doc = module.__doc__ or ""
    tree = doc.partition("::\n\n")[2].partition("\n\n")[0]
    drawn = "\n".join(line.removeprefix("    ") for line in tree.splitlines())
    rows = [
        (f"`{name}`", summary(kind))
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    ]
    return f"\n```text\n{drawn}\n```\n\n{markdown(('error', 'meaning'), rows)}\n\n"


def events(doc: str) -> dict[str, dict[str, str]]:
    """The kinds of events that a ruled table names, with their fields, by group."""
    groups: dict[str, dict[str, str]] = {}
    kind, fields = "", {}
    for line in RULED.split(doc)[2].strip("\n").splitlines():
        if line.startswith("**"):
            fields = groups.setdefault(line.strip("*"), {})
        elif line.startswith(" "):
            fields[kind] += f" {line.strip()}"
        else:
            kind, _, text = line.partition(" ")
            fields[kind] = text.strip()
    return groups


def history(doc: str) -> str:
    """A table of events for each group."""
    parts = [
        f"### {group}\n\n"
        + markdown(("kind", "fields"), [(f"`{kind}`", text) for kind, text in kinds.items()])
        for group, kinds in events(doc).items()
    ]
    return "\n" + "\n\n".join(parts) + "\n\n"


def checkers(judges: Mapping[str, object]) -> str:
    """A table of checkers by the rule that they judge."""
    rows = [(rule, summary(judge).partition(": ")[2]) for rule, judge in judges.items()]
    return f"\n{markdown(('rule', 'what it demands'), rows)}\n\n"


def campaign(seed: ModuleType, coverage: ModuleType, profiles: ModuleType) -> str:
    """What a seed has and what a campaign must have met."""
    rows = [
        ("nodes", f"{seed.NODES}"),
        ("shards", f"{seed.SHARDS}"),
        ("virtual seconds", f"{seed.FAULTY_S:g} with faults, then {seed.CALM_S:g} without"),
        ("messages", f"at least {seed.LEAST_MESSAGES:,}"),
        ("faults", f"at least {seed.LEAST_FAULTS}"),
        ("completed moves", f"at least {profiles.spec.LEAST_MOVES}"),
    ]
    brings = [(f"`{name}`", spec.about) for name, spec in profiles.PROFILES.items()]
    return (
        f"\n{markdown(('in every seed', ''), rows)}\n\n"
        f"In at least {coverage.LEAST_MID_MOVE:.0%} of the seeds a fault strikes a hand-off with "
        f"mail in flight.\n\n"
        f"{markdown(('profile', 'what it brings'), brings)}\n\n"
        f"- Kinds of faults: {', '.join(coverage.FAULTS)}.\n"
        f"- Steps to be struck: {'; '.join(coverage.STEPS)}.\n\n"
    )


def summary(thing: object) -> str:
    """The first paragraph of what something says of itself."""
    doc = getattr(thing, "__doc__", None) or ""
    return " ".join(doc.strip().partition("\n\n")[0].split())


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
    import domicile.errors
    from domicile.core.handoff import owner, sender
    from domicile.core.lease import lease
    from domicile.failover import tables as group
    from domicile.testing import history as told
    from domicile.testing.checkers import CHECKERS
    from proving import coverage, profiles, seed_result

    return {
        "owner": section(owner.TRANSITIONS),
        "sender": section(sender.TRANSITIONS),
        "lease": section(lease.TRANSITIONS),
        "group": section(group.GROUP_TRANSITIONS),
        "group-wishes": wishes(group.WISHES),
        "errors": errors(domicile.errors),
        "history": history(told.__doc__ or ""),
        "checkers": checkers(CHECKERS),
        "campaign": campaign(seed_result, coverage, profiles),
    }


def pictures() -> dict[str, str]:
    """Every picture that is drawn from a run that repeats, by its path in the docs."""
    from proving import story

    return {"pictures/timeline.svg": story.picture()}


def stale(
    docs: Path, sections: Mapping[str, str], drawn: Mapping[str, str] | None = None
) -> dict[Path, str]:
    """Pages and pictures that differ from what they should be, with what they should be."""
    pages: dict[Path, str] = {
        docs / name: wanted
        for name, wanted in (drawn or {}).items()
        if not (docs / name).exists() or (docs / name).read_text(encoding="utf-8") != wanted
    }
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
    """Rewrite the stale pages and pictures and name them."""
    for path, text in stale(DOCS, drawings(), pictures()).items():
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"redrawn: {path.relative_to(DOCS.parent)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
