"""The scenario marker and its table, in runs of pytest inside pytest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import proving
from proving.plugin import Carrier, judge, table
from proving.scenarios import FAMILIES, SCENARIOS


@pytest.fixture(autouse=True)
def _plugin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs inside this one load the plugin as the project's own conftest does."""
    if "pytester" in request.fixturenames:
        root = Path(proving.__file__).resolve().parents[1]
        monkeypatch.setenv("PYTHONPATH", str(root))
        pytester: pytest.Pytester = request.getfixturevalue("pytester")
        pytester.makeconftest("pytest_plugins = ['proving.plugin']")


def rows(result: pytest.RunResult) -> dict[str, list[str]]:
    """The table of a run: verdict to ids."""
    found: dict[str, list[str]] = {}
    inside, verdict = False, ""
    for line in result.outlines:
        if "scenarios" in line and line.startswith("="):
            inside = True
        elif inside and line.startswith("="):
            break
        elif inside:
            head = re.match(r"(proved|partial|failed|open) +\d+", line)
            verdict = head.group(1) if head else verdict
            found.setdefault(verdict, []).extend(re.findall(r"[A-Z]{2}-\d\d", line))
    return found


def test_a_failed_test_without_an_id_is_told_of_beside_the_table(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.scenario("SM-01")
        def test_full(): pass

        def test_fails(): assert False
        """
    )
    result = pytester.runpytest("-q")
    assert rows(result)["failed"] == []
    result.stdout.fnmatch_lines(["and 1 failed that carry no id: see above"])


def test_ids_are_numbered_without_gaps_in_their_families() -> None:
    expected = [
        f"{family}-{number:02}"
        for family in FAMILIES
        for number in range(1, 1 + sum(id.startswith(family) for id in SCENARIOS))
    ]
    assert list(SCENARIOS) == expected
    assert all(title and title == title.strip(" .") for title in SCENARIOS.values())


def test_a_run_sorts_ids_by_what_their_tests_did(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.scenario("SM-01", "RG-01")
        def test_full(): pass

        @pytest.mark.scenario("RG-01")
        @pytest.mark.scenario("SM-02", partial=True)
        def test_mixed(): pass

        @pytest.mark.scenario("SM-05")
        def test_fails(): assert False

        @pytest.mark.scenario("SM-05")
        def test_does_not_fail(): pass

        @pytest.mark.scenario("SM-06")
        def test_skipped(): pytest.skip("not here")

        @pytest.mark.scenario("SM-07", partial=True)
        def test_part_fails(): assert False

        @pytest.mark.scenario("SM-07")
        def test_whole_passes(): pass

        @pytest.mark.scenario("SM-12")
        class TestAll:
            def test_one(self): pass
            @pytest.mark.skip
            def test_other(self): pass
        """
    )
    result = pytester.runpytest("-q")
    found = rows(result)
    assert found["proved"] == ["SM-01", "RG-01"]
    assert found["partial"] == ["SM-02", "SM-12"]
    assert found["failed"] == ["SM-05", "SM-07"]
    assert "SM-06" in found["open"]
    assert sum(map(len, found.values())) == len(SCENARIOS)


def test_a_failing_teardown_fails_the_scenario(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.fixture
        def broken():
            yield
            raise RuntimeError

        @pytest.mark.scenario("SM-01")
        def test_it(broken): pass
        """
    )
    assert rows(pytester.runpytest("-q"))["failed"] == ["SM-01"]


def test_no_table_without_the_marker(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_plain(): pass")
    result = pytester.runpytest()
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*scenarios*")


def test_deselected_tests_do_not_count(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.scenario("SM-01")
        def test_marked(): pass

        def test_plain(): pass
        """
    )
    result = pytester.runpytest("-q", "-k", "plain")
    result.stdout.no_fnmatch_line("*scenarios*")


@pytest.mark.parametrize(
    ("mark", "complaint"),
    [
        ('"SM-99"', "unknown scenario id 'SM-99'"),
        ('["SM-01"]', "unknown scenario id"),
        ("", "takes ids"),
        ('"SM-01", part=True', "takes ids"),
        ('"SM-01", partial="yes"', "takes ids"),
    ],
)
def test_a_mark_that_cannot_be_read_stops_the_run(
    pytester: pytest.Pytester, mark: str, complaint: str
) -> None:
    pytester.makepyfile(
        test_it=f"""
        import pytest

        @pytest.mark.scenario({mark})
        def test_marked(): pass
        """
    )
    result = pytester.runpytest("-q")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: *test_it.py::test_marked: *{complaint}*"])


def test_the_marker_is_registered(pytester: pytest.Pytester) -> None:
    pytester.runpytest("--markers").stdout.fnmatch_lines(["@pytest.mark.scenario(*partial=False)*"])


def test_verbose_runs_name_each_scenario(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.scenario("SM-01")
        def test_marked(): pass
        """
    )
    result = pytester.runpytest("-v")
    result.stdout.fnmatch_lines(["proved*1", f"*SM-01  {SCENARIOS['SM-01']}"])


def test_the_table_is_compact() -> None:
    lines = table(judge([Carrier({"SM-01": False}, passed=True)]))
    assert lines[0].split() == ["proved", "1", "SM-01"]
    assert len(lines) <= 14
    assert max(map(len, lines)) <= 100
