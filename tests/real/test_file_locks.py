"""File locks as proof of death (L6)."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from domicile.core.ids import Incarnation
from domicile.errors import StoreUnavailable
from domicile.ports.health import Health, Verdict
from domicile.stores.file_locks import LISTED_AT_ONCE, SWEPT_AT_ONCE, FileLocks

ONE, TWO = Incarnation("1" * 32), Incarnation("2" * 32)

HOLDER = """
import os, subprocess, sys
from pathlib import Path
from domicile.stores.file_locks import FileLocks
locks = FileLocks(Path(sys.argv[1]))
locks.hold(sys.argv[2])
children = []
if sys.argv[3] == "fork":
    child = os.fork()
    if child == 0:
        os.read(0, 1)
        os._exit(0)
elif sys.argv[3] == "exec":
    subprocess.Popen(["sh", "-c", "read x"])
print("held", flush=True)
os.read(0, 1)
"""


@contextmanager
def holder(
    directory: Path, incarnation: Incarnation, how: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory), incarnation, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
    finally:
        process.kill()
        # Ends what the holder started, too: it reads the same pipe.
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        assert process.stdout is not None
        process.stdout.read()
        process.stdout.close()


def test_it_is_a_health_port(tmp_path: Path) -> None:
    health: Health = FileLocks(tmp_path)
    assert health.verdict(ONE) is Verdict.UNKNOWN


def test_another_process_is_alive_until_it_is_killed(tmp_path: Path) -> None:
    locks = FileLocks(tmp_path / "new" / "store.db.d")
    with holder(tmp_path / "new" / "store.db.d", ONE) as process:
        assert locks.verdict(ONE) is Verdict.ALIVE
        process.send_signal(signal.SIGSTOP)
        assert locks.verdict(ONE) is Verdict.ALIVE
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert locks.verdict(ONE) is Verdict.DEAD
        assert locks.verdict(ONE) is Verdict.DEAD
        assert f"process {process.pid}, which held it, has ended" in locks.evidence(ONE)


@pytest.mark.parametrize("how", ["fork", "exec"])
def test_children_of_the_holder_do_not_keep_it_alive(tmp_path: Path, how: str) -> None:
    locks = FileLocks(tmp_path)
    with holder(tmp_path, ONE, how) as process:
        assert locks.verdict(ONE) is Verdict.ALIVE
        process.kill()
        process.wait()
        # A child that has not run yet still has the lock, which errs on the safe side.
        deadline = time.monotonic() + 60
        while locks.verdict(ONE) is Verdict.ALIVE and time.monotonic() < deadline:
            time.sleep(0.002)
        assert locks.verdict(ONE) is Verdict.DEAD


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_take_the_lock_along(tmp_path: Path) -> None:
    locks = FileLocks(tmp_path)
    locks.hold(ONE)
    child = os.fork()
    if child == 0:
        os._exit(0 if locks.verdict(ONE) is Verdict.ALIVE else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert judged_by_another_process(tmp_path, ONE) == "alive"
    locks.let_go(ONE)


def judged_by_another_process(directory: Path, incarnation: Incarnation) -> str:
    code = (
        "import sys; from pathlib import Path; from domicile.stores.file_locks import FileLocks;"
        "print(FileLocks(Path(sys.argv[1])).verdict(sys.argv[2]).value)"
    )
    command = [sys.executable, "-c", code, str(directory), incarnation]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


def test_the_own_ones_are_alive_and_gone_after_letting_go(tmp_path: Path) -> None:
    locks, others = FileLocks(tmp_path), FileLocks(tmp_path)
    for _ in range(2):
        locks.hold(ONE)
    locks.hold(TWO)
    for judge in (locks, others):
        assert judge.verdict(ONE) is Verdict.ALIVE
    assert judged_by_another_process(tmp_path, ONE) == "alive"
    for _ in range(2):
        locks.let_go(ONE)
    assert locks.verdict(ONE) is Verdict.UNKNOWN
    assert judged_by_another_process(tmp_path, TWO) == "alive"
    locks.let_go(TWO)
    assert list(tmp_path.iterdir()) == []


def test_a_probe_never_disturbs_a_holder_nor_another_probe(tmp_path: Path) -> None:
    """A probe that holds its lock at the worst moment."""
    import fcntl

    (tmp_path / "gone").write_text("")
    with holder(tmp_path, ONE) as process:
        process.kill()
        process.wait()
        with (tmp_path / ONE).open() as probe:
            fcntl.flock(probe, fcntl.LOCK_SH | fcntl.LOCK_NB)
            locks = FileLocks(tmp_path)
            assert locks.verdict(ONE) is Verdict.DEAD
            locks.hold(TWO)
            locks.let_go(TWO)


def test_a_copy_of_a_lock_file_proves_nothing(tmp_path: Path) -> None:
    locks = FileLocks(tmp_path / "there")
    with holder(tmp_path / "there", ONE):
        shutil.copytree(tmp_path / "there", tmp_path / "copy")
        assert FileLocks(tmp_path / "copy").verdict(ONE) is Verdict.UNKNOWN
        (tmp_path / "copy" / ONE).rename(tmp_path / "there" / ONE)
        assert locks.verdict(ONE) is Verdict.UNKNOWN


def test_what_can_not_be_locked_is_an_error_and_what_can_not_be_read_unknown(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    locks = FileLocks(tmp_path / "file")
    with pytest.raises(StoreUnavailable, match=rf"directory {tmp_path / 'file'} can't be made"):
        locks.hold(ONE)
    assert locks.verdict(ONE) is Verdict.UNKNOWN
    (tmp_path / TWO).mkdir()
    assert FileLocks(tmp_path).verdict(TWO) is Verdict.UNKNOWN
    with pytest.raises(StoreUnavailable, match=rf"{tmp_path / TWO} can't be locked"):
        FileLocks(tmp_path).hold(TWO)
    assert sorted(path.name for path in tmp_path.iterdir()) == [TWO, "file"]


def test_a_directory_that_can_not_be_written_to_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patched:
        patched.setattr("domicile.stores.file_locks.os.open", refuse)
        with pytest.raises(StoreUnavailable) as caught:
            FileLocks(tmp_path).hold(ONE)
    said = str(caught.value)
    assert f"the directory {tmp_path} can't be written to (Permission denied)" in said
    assert "name another path for the store" in said
    assert ONE not in said


def test_a_sweep_removes_the_long_dead_alone(tmp_path: Path) -> None:
    locks = FileLocks(tmp_path)
    assert FileLocks(tmp_path / "missing").sweep() == 0
    locks.hold(TWO)
    with holder(tmp_path, ONE) as process:
        assert locks.sweep(older_than_s=-60.0) == 0
        process.kill()
        process.wait()
        assert locks.sweep() == 0
        assert locks.sweep(older_than_s=-60.0) == 1
    assert [path.name for path in tmp_path.iterdir()] == [TWO]
    locks.let_go(TWO)


def dead(directory: Path, count: int) -> list[Path]:
    """Lock files that nobody holds, as killed processes leave them."""
    made: list[Path] = []
    for number in range(count):
        path = directory / f"{number * (16**32 // count):032x}"
        path.touch()
        path.write_text(f"{path.stat().st_ino} 1\n", encoding="ascii")
        made.append(path)
    return made


def test_a_sweep_looks_at_few_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[str] = []
    probe = FileLocks._probe  # pyright: ignore[reportPrivateUsage]

    def counted(self: FileLocks, path: str) -> Verdict:
        probed.append(path)
        return probe(self, path)

    monkeypatch.setattr(FileLocks, "_probe", counted)
    dead(tmp_path, LISTED_AT_ONCE + 500)
    locks = FileLocks(tmp_path)
    for held in (ONE, TWO):
        probed.clear()
        locks.hold(held)
        assert len(probed) <= SWEPT_AT_ONCE
        assert all(Path(path).name > held for path in probed), "those behind the own name"
        locks.let_go(held)


def test_in_time_all_that_died_long_ago_are_swept(tmp_path: Path) -> None:
    count = 5 * SWEPT_AT_ONCE
    long_dead = dead(tmp_path, count)
    first, locks = FileLocks(tmp_path), FileLocks(tmp_path)
    fresh = Incarnation("8" * 32)
    first.hold(fresh)
    for number in range(2 * count):
        after = f"{number * (16**32 // (2 * count)):032x}"
        assert locks.sweep(after=after) == 0, "not before a day has passed since they were found"
    assert not [path for path in long_dead if path.stat().st_mode & 0o200], "all were found"
    yesterday = time.time() - 90_000
    for path in long_dead:
        os.utime(path, (yesterday, yesterday))
    swept = 0
    for number in range(count):
        swept += locks.sweep(after=f"{number * (16**32 // count):032x}")
    assert swept == count
    assert [path.name for path in tmp_path.iterdir()] == [fresh]
    first.let_go(fresh)


def test_the_proof_of_a_dead_one_that_left_no_record_is_removed_and_no_other(
    tmp_path: Path,
) -> None:
    locks = FileLocks(tmp_path)
    with holder(tmp_path, ONE) as process:
        locks.let_go(ONE)
        assert locks.verdict(ONE) is Verdict.ALIVE, "nobody can let go for one that lives"
        process.kill()
        process.wait()
        locks.let_go(ONE, gone=False)
        assert locks.verdict(ONE) is Verdict.DEAD
        locks.let_go(ONE)
        assert list(tmp_path.iterdir()) == []


def test_one_sweep_goes_on_where_the_last_one_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("domicile.stores.file_locks.SWEPT_AT_ONCE", 0)
    for name in "abc":
        dying = FileLocks(tmp_path)
        dying.hold(Incarnation(name * 32))
        dying.let_go(Incarnation(name * 32), gone=False)
    monkeypatch.setattr("domicile.stores.file_locks.SWEPT_AT_ONCE", 1)
    locks = FileLocks(tmp_path)
    for seen in (1, 2, 3):
        assert locks.sweep() == 0
        found = [path for path in tmp_path.iterdir() if not path.stat().st_mode & 0o200]
        assert len(found) == seen, "each sweep looks at another file"
