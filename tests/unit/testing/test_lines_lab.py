"""A test that reads what processes append must not stumble over a line that is not whole yet."""

from __future__ import annotations

from pathlib import Path

from lines_lab import whole_lines


def test_a_line_that_is_being_written_does_not_count_yet(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_text("a\t1\nb\t", encoding="utf-8")
    assert whole_lines(path) == ["a\t1"]
    path.write_text("a", encoding="utf-8")
    assert whole_lines(path) == []
    path.write_text("a\nb\n", encoding="utf-8")
    assert whole_lines(path) == ["a", "b"]
