"""Threads that all coordinators share: a pool that grows when its threads block, and one thread for timers."""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from stagecrew.wire.channel import LONGEST_WAIT

__all__ = ["ASYNC_CALLS", "COORDINATORS", "TIMERS", "Pool", "Reader", "Timer", "Timers"]

_log = logging.getLogger("stagecrew")

#: A thread without work ends after this many seconds.
_IDLE: Final = 5.0
#: Beyond `prompt` threads, the pool starts another thread if a task waits and no task has begun for this many seconds.
_GROWTH_DELAY: Final = 0.02


class Reader(Protocol):
    """A source of frames for idle threads of the pool. The thread that reads a request also handles it."""

    def read(self, until: Callable[[], bool]) -> bool:
        """Reads on the calling thread until the condition holds. Returns False at once if another thread is reading."""

    def wake(self) -> None:
        """Makes the reading thread check its condition."""


class Timers:
    """Calls short functions later, on one daemon thread. The thread ends soon after the last timer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._is_running = False

    def later(self, seconds: float, f: Callable[[], None]) -> Timer:
        """Calls a function after this time, unless the timer is cancelled."""
        timer = Timer(f)
        with self._changed:
            is_new = not self._is_running
            if is_new:  # if no thread can start, this raises, and the next call tries again
                threading.Thread(target=self._run, name="stagecrew-timers", daemon=True).start()
                self._is_running = True
            heapq.heappush(self._due, (self._clock() + seconds, next(self._numbers), timer))
            if not is_new and self._due[0][2] is timer:
                self._changed.notify()
        return timer

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._due and self._due[0][2].f is None:
                    heapq.heappop(self._due)
                if not self._due and not self._changed.wait_for(lambda: self._due, _IDLE):
                    self._is_running = False
                    return
                if self._due[0][2].f is not None and (pause := self._due[0][0] - self._clock()) > 0:
                    self._changed.wait(min(pause, LONGEST_WAIT))
                    continue
                _, _, timer = heapq.heappop(self._due)
            f, timer.f = timer.f, None
            if f is not None:
                try:
                    f()
                except Exception:
                    _log.exception("an internal timer of stagecrew failed; please report it")


class Timer:
    """A function that will be called later."""

    __slots__ = ("f",)

    def __init__(self, f: Callable[[], None]) -> None:
        self.f: Callable[[], None] | None = f

    def cancel(self) -> None:
        """Prevents the call, unless it has begun."""
        self.f = None


class Pool:
    """Daemon threads that begin tasks in the order in which they were submitted, and run several at a time.

    While there are fewer than `prompt` threads, a task without an idle thread gets a new thread immediately. More
    threads are started only while a task waits and no thread begins one. So a task that never returns delays other
    tasks a little, but never stops them. Idle threads end. No task keeps the process alive.
    """

    def __init__(self, name: str, timers: Timers, prompt: float = math.inf) -> None:
        self._name, self._timers, self._prompt = name, timers, prompt
        self._lock = threading.Lock()
        self._ready: collections.deque[Callable[[], None]] = collections.deque()
        #: For each idle thread, the lock that it waits to acquire. The thread that became idle last is woken first.
        self._gates: list[threading.Lock] = []
        self._threads = 0
        self._numbers = itertools.count(1)
        self._is_growing = False
        #: Whether the last thread could not start.
        self._is_full = False
        #: The number of tasks that have begun.
        self._begun = 0
        self._reader: Reader | None = None
        #: The thread that is reading, and whether it was woken.
        self._reading_thread: int | None = None
        self._is_woken = False

    def submit(self, task: Callable[[], None]) -> None:
        """Runs a task on one of the pool's threads. An exception that it raises is logged. Thread-safe.

        If no other thread can start, the task waits until one can. Raises `RuntimeError` if the pool has no thread at
        all.
        """
        gate: threading.Lock | None = None
        reader: Reader | None = None
        is_new = False
        with self._lock:
            self._ready.append(task)
            me = threading.get_ident()
            if self._reading_thread == me and len(self._ready) == 1:
                return  # the calling thread is the reader, and will run the task itself
            if self._gates:
                gate = self._gates.pop()
            elif self._reading_thread not in (None, me) and not self._is_woken:
                self._is_woken = True
                reader = self._reader
            else:
                is_new = self._reserve_thread()
        if gate is not None:
            gate.release()
        elif reader is not None:
            reader.wake()
        elif is_new and not self._add_thread():
            with self._lock, contextlib.suppress(ValueError):
                self._ready.remove(task)
            raise RuntimeError(f"thread pool {self._name} has no thread, and cannot start one")

    def set_reader(self, reader: Reader | None) -> None:
        """Makes an idle thread read this reader instead of the previous one."""
        with self._lock:
            before, self._reader = self._reader, reader
        if before is not None:
            before.wake()
        if reader is not None:
            self.submit(_nothing)  # wakes or starts a thread, which then reads

    def remove_reader(self, reader: Reader) -> None:
        """Stops reading this reader, if it is still the current one."""
        with self._lock:
            if self._reader is reader:
                self._reader = None

    def _reserve_thread(self) -> bool:
        """Returns whether the caller must start a thread for a waiting task, and counts this thread.

        Otherwise, makes sure that the pool grows later if all threads are blocked. The caller holds the lock.
        """
        if self._threads < self._prompt:
            self._threads += 1
            return True
        self._grow_later()
        return False

    def _grow_later(self) -> None:
        """Makes sure that the pool grows later. If no thread can start, the next task tries again."""
        if not self._is_growing:
            with contextlib.suppress(RuntimeError):  # the timers have no thread
                self._check_later()
                self._is_growing = True

    def _check_later(self) -> None:
        begun = self._begun
        self._timers.later(_GROWTH_DELAY, lambda: self._grow(begun))

    def _grow(self, begun: int) -> None:
        """Starts another thread if no task has begun in the meantime, because then all threads are blocked or busy."""
        with self._lock:
            if not self._ready or self._gates:
                self._is_growing = False
                return
            is_blocked = self._begun == begun
            self._threads += is_blocked
            self._check_later()
        if is_blocked:
            self._add_thread()

    def _add_thread(self) -> bool:
        """Starts a thread that was counted. If the process can have no more threads, tries again later.

        Returns whether the pool has a thread, or tries again.
        """
        try:
            threading.Thread(target=self._work, name=f"{self._name}-{next(self._numbers)}", daemon=True).start()
        except RuntimeError as error:
            with self._lock:
                self._threads -= 1
                self._grow_later()
                goes_on = self._threads > 0 or self._is_growing
            if not self._is_full:
                _log.warning("thread pool %s cannot start a thread, and will try again: %s", self._name, error)
            self._is_full = True
            return goes_on
        self._is_full = False
        return True

    def _has_work(self) -> bool:
        return bool(self._ready)

    def _work(self) -> None:
        gate = threading.Lock()
        gate.acquire()
        while True:
            task, reader = None, None
            with self._lock:
                if self._ready:
                    task = self._ready.popleft()
                    self._begun += 1
                elif self._reader is not None and self._reading_thread is None:
                    self._reading_thread, self._is_woken = threading.get_ident(), False
                    reader = self._reader
                else:
                    self._gates.append(gate)
            if task is not None:
                _run_logged(task)
            elif (reader is None or not self._read(reader, gate)) and not self._wait(gate):
                return

    def _read(self, reader: Reader, gate: threading.Lock) -> bool:
        """Reads until there is a task. Returns False if the calling thread must wait at its gate instead."""
        has_read = False
        try:
            has_read = reader.read(self._has_work)
        except Exception:
            _log.exception("thread pool %s could not read frames", self._name)
        with self._lock:
            self._reading_thread = None
            if not has_read and not self._ready:
                self._gates.append(gate)
                return False
        return True

    def _wait(self, gate: threading.Lock) -> bool:
        """Waits for a task. Returns False if no task arrived for a while, so that the thread must end."""
        if gate.acquire(timeout=_IDLE):
            return True
        with self._lock:
            if gate in self._gates:
                self._gates.remove(gate)
                self._threads -= 1
                return False
        gate.acquire()  # a task was submitted at the last moment, and its submitter releases the gate
        return True


def _run_logged(task: Callable[[], None]) -> None:
    try:
        task()
    except BaseException:
        _log.exception("an internal task of stagecrew failed; please report it")


def _nothing() -> None:
    """Does nothing. Submitted to wake a thread."""


TIMERS: Final = Timers()
#: Runs coordinators, on up to four threads, or on more while coordinators are blocking.
COORDINATORS: Final = Pool("stagecrew-coordinator", TIMERS, prompt=4)
#: Runs the functions of `call_async`.
ASYNC_CALLS: Final = Pool("stagecrew-async", TIMERS)
