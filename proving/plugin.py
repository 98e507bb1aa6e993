"""The pytest plugin: `@pytest.mark.scenario("RG-01", "SM-05", partial=False)` and its table.

Loaded by pytest through the package's entry point; nothing else calls it. At the end of a run
in which a collected test carries the marker it prints which scenarios are proved, partial,
failed and open. It must never change the outcome of a test, only refuse marks it cannot read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Literal

import pytest

from proving.scenarios import SCENARIOS

MARKER = "scenario"
WIDTH = 100

Verdict = Literal["proved", "partial", "failed", "open"]


class BadMark(ValueError):
    """A scenario mark that cannot be read. Says which test carries it and what to write."""


@dataclass(slots=True)
class Carrier:
    """A test that carries ids; `claims` maps each to whether the test proves only part of it."""

    claims: dict[str, bool] = field(default_factory=dict[str, bool])
    passed: bool = False
    failed: bool = False


def read_marks(nodeid: str, marks: Iterable[pytest.Mark]) -> dict[str, bool]:
    """The ids that a test claims, each with its `partial`. A full claim outweighs a partial one."""
    claims: dict[str, bool] = {}
    for mark in marks:
        options = dict(mark.kwargs)
        partial = options.pop("partial", False)
        if options or not isinstance(partial, bool) or not mark.args:
            raise BadMark(
                f"{nodeid}: a scenario mark takes ids and partial=True or False, "
                f'as in @pytest.mark.scenario("RG-01", partial=True)'
            )
        for scenario in mark.args:
            if not isinstance(scenario, str) or scenario not in SCENARIOS:
                raise BadMark(
                    f"{nodeid}: unknown scenario id {scenario!r}; "
                    f"proving.scenarios lists the known ones"
                )
            claims[scenario] = claims.get(scenario, True) and partial
    return claims


def judge(carriers: Iterable[Carrier]) -> dict[str, Verdict]:
    """A verdict for every known id.

    Proved: at least one test claims all of it, and each that does passed. Failed: a test that
    carries it failed. Partial: some test that carries it passed. Open: the rest.
    """
    by_id: dict[str, list[Carrier]] = {scenario: [] for scenario in SCENARIOS}
    for carrier in carriers:
        for scenario in carrier.claims:
            by_id[scenario].append(carrier)
    return {scenario: _verdict(scenario, found) for scenario, found in by_id.items()}


def _verdict(scenario: str, carriers: list[Carrier]) -> Verdict:
    if any(carrier.failed for carrier in carriers):
        return "failed"
    full = [carrier for carrier in carriers if not carrier.claims[scenario]]
    if full and all(carrier.passed for carrier in full):
        return "proved"
    return "partial" if any(carrier.passed for carrier in carriers) else "open"


def table(verdicts: Mapping[str, Verdict], *, titles: bool = False) -> list[str]:
    """The lines of the end-of-run table: one row a verdict, or with titles one line an id."""
    lines: list[str] = []
    order: tuple[Verdict, ...] = ("proved", "partial", "failed", "open")
    for verdict in order:
        ids = [scenario for scenario in SCENARIOS if verdicts[scenario] == verdict]
        head = f"{verdict:<8}{len(ids):>3}  "
        if titles:
            lines.append(head.rstrip())
            lines.extend(f"  {scenario}  {SCENARIOS[scenario]}" for scenario in ids)
        elif ids:
            indent = " " * len(head)
            lines.extend(
                wrap(
                    " ".join(ids),
                    WIDTH,
                    initial_indent=head,
                    subsequent_indent=indent,
                    break_on_hyphens=False,
                )
            )
        else:
            lines.append(head.rstrip())
    return lines


class ScenarioTable:
    """Follows one run. The claims travel in the reports, so runs spread over processes count."""

    def __init__(self) -> None:
        self.carriers: dict[str, Carrier] = {}
        self.others_failed: dict[str, None] = {}
        """Tests that failed and carry no id: the table must not look as if nothing had."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Read the marks of the tests that will run; refuse those that cannot be read."""
        problems: list[str] = []
        for item in items:
            try:
                claims = read_marks(item.nodeid, item.iter_markers(MARKER))
            except BadMark as problem:
                problems.append(str(problem))
                continue
            if claims:
                self.carriers[item.nodeid] = Carrier(claims)
            for scenario, partial in claims.items():
                item.user_properties.append(
                    (MARKER, f"{scenario} partial" if partial else scenario)
                )
        if problems:
            raise pytest.UsageError(*problems)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how each phase of a carrying test ended."""
        claims = [str(value) for name, value in report.user_properties if name == MARKER]
        if not claims:
            if report.failed:
                self.others_failed[report.nodeid] = None
            return
        carrier = self.carriers.setdefault(report.nodeid, Carrier())
        for claim in claims:
            scenario, _, partial = claim.partition(" ")
            carrier.claims[scenario] = bool(partial)
        carrier.failed = carrier.failed or report.failed
        carrier.passed = carrier.passed or (report.when == "call" and report.passed)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table, if any test carries a scenario."""
        if not self.carriers or terminalreporter.config.option.collectonly:
            return
        verdicts = judge(self.carriers.values())
        terminalreporter.section("scenarios")
        for line in table(verdicts, titles=terminalreporter.config.get_verbosity() > 0):
            terminalreporter.line(line)
        if self.others_failed:
            count = len(self.others_failed)
            terminalreporter.line(f"and {count} failed that carry no id: see above", red=True)


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known and follow this run."""
    config.addinivalue_line(
        "markers",
        "scenario(*ids, partial=False): this test proves the scenarios with these ids, "
        "or with partial=True only a part of each",
    )
    config.pluginmanager.register(ScenarioTable(), "domicile-scenarios")
