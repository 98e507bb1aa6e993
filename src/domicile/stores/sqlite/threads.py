"""The embedded store's threads: SQLite may wait for a lock or a disk, the event loop must not.

A `JobThread` does one job after another. It waits with a `FileNotifier`, which ends the wait for a
job, after a time, or when another process writes to a file. Only `domicile.stores.sqlite` uses it.
Nothing here knows SQL.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from domicile.errors import StoreUnavailable

T = TypeVar("T")
P = TypeVar("P", bound="Part")

log = logging.getLogger("domicile")

MOST_JOBS = 1024
"""I6: most jobs that may wait for a thread; above this, new jobs are refused."""

FEW_JOBS = 64
"""Waiting jobs from which cancelled jobs are searched for and removed."""

SIFT_S = 0.01
"""Seconds without another search, after a search removed too few jobs."""

STUMBLE_S = 0.1
"""Seconds that a thread pauses after an unexpected error, because it may repeat at once."""

_IN_MODIFY = 0x2


class FileNotifier:
    """A wait that other threads and writes to a file can end. Only the waiting thread may call it,
    except for `ring`."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe()
        os.set_blocking(self._out, False)
        os.set_blocking(self._in, False)
        self._poll = select.poll()
        self._poll.register(self._out, select.POLLIN)
        self._inotify = -1
        self._listens_to: tuple[int, int] | None = None

    def ring(self) -> None:
        """End the present wait, or the next one."""
        with suppress(BlockingIOError):  # a wake-up is pending already
            os.write(self._in, b"\0")

    def wait(self, seconds: float | None) -> bool:
        """Wait until `ring`, a write to the watched file (then True), or that many seconds."""
        events = self._poll.poll(None if seconds is None else seconds * 1000)
        modified = False
        for descriptor, _ in events:
            modified = modified or descriptor == self._inotify
            with suppress(BlockingIOError):
                os.read(descriptor, 65536)
        return modified

    def hush(self) -> None:
        """Forget the writes to the watched file so far."""
        if self._inotify >= 0:
            with suppress(BlockingIOError):
                os.read(self._inotify, 65536)

    def listen(self, path: Path | None) -> bool:
        """Wait for writes to this file from now on; False if this system cannot report them."""
        # First, so that `hears` later notices if another file takes its place meanwhile.
        self._listens_to = None if path is None else _identity(path)
        if self._inotify >= 0:
            self._poll.unregister(self._inotify)
            os.close(self._inotify)
        self._inotify = -1 if path is None else _inotify(path)
        if self._inotify >= 0:
            self._poll.register(self._inotify, select.POLLIN)
        return self._inotify >= 0

    def hears(self, path: Path) -> bool:
        """Whether the watched file is the file that is at this path now."""
        return self._inotify >= 0 and _identity(path) == self._listens_to

    def close(self) -> None:
        """Close all descriptors."""
        self.listen(None)
        os.close(self._out)
        os.close(self._in)


def ring_file(path: Path) -> None:
    """End the waits of all processes that listen to this file. Processes that cannot listen look
    for changes regularly."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
        try:
            os.pwrite(descriptor, b"\0", 0)
        finally:
            os.close(descriptor)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _inotify(path: Path) -> int:
    """A descriptor that becomes readable when a file is written to; -1 if there is none."""
    if sys.platform != "linux":
        return -1
    libc = ctypes.CDLL(None)
    descriptor = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if descriptor < 0:
        return -1
    if libc.inotify_add_watch(descriptor, os.fsencode(path), _IN_MODIFY) < 0:
        os.close(descriptor)
        return -1
    return descriptor


class Part(Protocol):
    """A piece of work that may be done together with others of its kind."""

    def joins(self, others: Sequence[Any]) -> bool:
        """Whether it may be done together with these, which come before it."""
        ...


class Joint(NamedTuple):
    """A job that may become part of a larger one, if others wait directly behind it."""

    part: Part
    run: Callable[[Sequence[Any]], Sequence[object]]
    """Does parts in order; returns one result for each."""


ThreadJob = tuple[Future[Any], Callable[[], object] | Joint]


class JobThread:
    """A thread that does jobs in order. `between` runs before each wait and returns its length.

    The second argument of `between`: was the watched file written to? `end` runs last. While the
    thread is blocked, up to `MOST_JOBS` jobs wait for it, without those that were cancelled.
    """

    def __init__(
        self,
        name: str,
        end: Callable[[], None],
        between: Callable[[FileNotifier, bool], float | None] = lambda bell, modified: None,
    ) -> None:
        self.bell = FileNotifier()
        self._between = between
        self._end = end
        self._jobs: deque[ThreadJob] = deque()
        self._sift_at = FEW_JOBS
        self._sift_after = 0.0
        self._ended = False
        self.gone: Future[None] = Future()
        """Done after the thread's last action."""
        self.gone.set_running_or_notify_cancel()  # so that a waiting caller cannot cancel it
        self._lock = threading.Lock()
        # A daemon: a program that forgot to close its store can still exit.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self.bell.close()
            raise

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job; its future can be cancelled until the job begins."""
        future: Future[T] = Future()
        self._put(future, job)
        return future

    def join_in(self, part: P, run: Callable[[Sequence[P]], Sequence[T]]) -> Future[T]:
        """As `submit`, together with the parts that wait directly before and behind it."""
        future: Future[T] = Future()
        self._put(future, Joint(part, run))
        return future

    def _put(self, future: Future[Any], job: Callable[[], object] | Joint) -> None:
        with self._lock:
            if self._ended:
                raise StoreUnavailable("the store is closed; make another one")
            if len(self._jobs) >= self._sift_at:
                self._sift()
            if len(self._jobs) >= MOST_JOBS:
                raise StoreUnavailable(
                    f"this call did not begin: {MOST_JOBS} others wait for the thread "
                    f"{self._thread.name!r} already; look at the load and the health of the "
                    "store's disk, then try again"
                )
            self._jobs.append((future, job))
            self.bell.ring()

    def _sift(self) -> None:
        """Remove cancelled jobs, which a blocked thread would keep (I6). The caller holds the
        lock."""
        now = time.monotonic()
        if len(self._jobs) >= MOST_JOBS and now < self._sift_after:
            return
        self._jobs = deque([job for job in self._jobs if not job[0].cancelled()])
        if len(self._jobs) >= MOST_JOBS:
            self._sift_after = now + SIFT_S
        # Next at twice as many jobs: so each job is checked about once, however many wait.
        self._sift_at = min(max(FEW_JOBS, 2 * len(self._jobs)), MOST_JOBS)

    def nudge(self) -> None:
        """Make `between` run soon."""
        with self._lock:
            if not self._ended:
                self.bell.ring()

    def stop(self) -> None:
        """Take no more jobs and drop those that did not begin."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self.bell.ring()

    def join(self) -> None:
        """Wait until the thread has ended. Call it after `gone`, so that it takes no time."""
        self._thread.join()

    def _run(self) -> None:
        modified = False
        try:
            while not self._ended:
                try:
                    modified = self._turn(modified)
                except Exception:
                    # Without this thread no job would be answered.
                    log.exception("the thread %s failed and continues", self._thread.name)
                    time.sleep(STUMBLE_S)
            while self._jobs:
                _do(self._jobs.popleft()[0], _refuse)
            self._end()
        finally:
            with self._lock:
                self._ended = True
                self.bell.close()
            self.gone.set_result(None)

    def _turn(self, modified: bool) -> bool:
        taken = self._take()
        if taken is not None:
            future, job = taken
            if isinstance(job, Joint):
                self._do_with_others(future, job)
            else:
                _do(future, job)
        wait_s = self._between(self.bell, modified)
        return self.bell.wait(0 if self._jobs else wait_s)

    def _take(self) -> ThreadJob | None:
        with self._lock:
            return self._jobs.popleft() if self._jobs else None

    def _take_joint(self, parts: Sequence[Part]) -> tuple[Future[object], Joint] | None:
        """The next job, if it may be done together with these."""
        with self._lock:
            if not self._jobs:
                return None
            future, job = self._jobs[0]
            if not isinstance(job, Joint) or (parts and not job.part.joins(parts)):
                return None
            self._jobs.popleft()
            return future, job

    def _do_with_others(self, future: Future[object], job: Joint) -> None:
        futures: list[Future[object]] = []
        parts: list[Part] = []
        following: tuple[Future[object], Joint] | None = (future, job)
        while following is not None:
            future, job = following
            if future.set_running_or_notify_cancel():
                futures.append(future)
                parts.append(job.part)
            following = self._take_joint(parts)
        if not parts:
            return
        try:
            results = job.run(parts)
        except BaseException as error:
            futures[0].set_exception(error)
            for each in futures[1:]:
                # A copy: an error that is raised twice would chain its tracebacks.
                each.set_exception(copy(error))
        else:
            for each, result in zip(futures, results, strict=True):
                each.set_result(result)


def _refuse() -> object:
    raise StoreUnavailable("the store was closed before it came to this; make another one")


def _do(future: Future[object], job: Callable[[], object]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = job()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
