"""The thread pool that coordinators share: call order, growth when calls block, and no threads without work."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time

import pytest

from stagecrew.coordination import pool as pool_module
from stagecrew.coordination.async_calls import AsyncCalls
from stagecrew.coordination.loop import Loop
from stagecrew.coordination.pool import Pool, Timers
from support.waiting import eventually


@pytest.fixture
def timers():
    return Timers()


@pytest.fixture
def pool(timers, request):
    return Pool(f"pool-{id(request)}", timers, prompt=2)


def threads_of(name):
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def test_each_loop_runs_calls_in_order_one_at_a_time(pool):
    """Each loop runs one call at a time, and keeps the order in which each thread submitted its calls.

    In this test, 5 threads submit calls to 20 loops on 2 threads.
    """
    found = {number: [] for number in range(20)}
    inside = dict.fromkeys(found, 0)
    overlaps, done = [], []

    def call(number, name, count):
        inside[number] += 1
        if inside[number] > 1:
            overlaps.append(number)
        found[number].append((name, count))
        inside[number] -= 1

    loops = [Loop(str(number), done.append, lambda: None, pool=pool) for number in found]

    def caller(name):
        for count in range(100):
            for number, loop in enumerate(loops):
                loop.call(call, number, name, count)

    callers = [threading.Thread(target=caller, args=(name,)) for name in range(5)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(30)
    for loop in loops:
        assert loop.end(30)
    assert (overlaps, done) == ([], [])
    for calls in found.values():
        assert len(calls) == 500
        for name in range(5):
            assert [count for caller, count in calls if caller == name] == list(range(100))


def test_errors_of_calls_are_passed_to_failed(pool):
    """An error raised by a call is passed to `failed`. Neither this error nor one raised by `failed` stops the loop or
    its thread."""
    failures, made = [], []

    def failed(error):
        failures.append(error)
        raise RuntimeError

    loop = Loop("o", failed, lambda: None, pool=pool)
    loop.call(lambda: 1 // 0)
    loop.call(made.append, 1)
    assert loop.end(10)
    loop.call(made.append, 2)  # the loop has ended, so this call never runs
    assert ([type(one) for one in failures], made) == ([ZeroDivisionError], [1])


def test_ending_a_loop_waits_no_longer_than_the_timeout(pool):
    """`end` of a blocked loop returns after its timeout. If a call of the same loop calls `end`, it returns
    immediately."""
    go, found = threading.Event(), []
    loop = Loop("o", found.append, lambda: None, pool=pool)
    loop.call(lambda: (found.append(loop.is_current), go.wait(30), found.append(loop.end(30))))
    assert not loop.end(0.05)
    assert not loop.is_current
    go.set()
    assert loop.end(10)
    assert found == [True, False]


def test_blocking_tasks_do_not_stop_others(pool):
    """Later tasks still run while 20 tasks of the pool are blocked."""
    go, ran = threading.Event(), threading.Event()
    for _ in range(20):
        pool.submit(lambda: go.wait(60))
    pool.submit(ran.set)
    try:
        assert ran.wait(20)
    finally:
        go.set()


def test_idle_threads_end(pool, timers, monkeypatch):
    """1,000 loops share a few threads, and an idle pool has no threads and no timers."""
    monkeypatch.setattr(pool_module, "_IDLE", 0.05)
    monkeypatch.setattr(pool_module, "_GROWTH_DELAY", 2.0)  # on a busy machine, threads look blocked for 20 ms
    name, earlier_timer_threads = pool._name, set(threads_of("stagecrew-timers"))
    loops = [Loop("o", pytest.fail, lambda: None, pool=pool) for _ in range(1000)]
    called = threading.Event()
    timers.later(0.01, called.set)
    for loop in loops:
        loop.call(lambda: None)
    assert pool._threads <= 2  # a thread that ends is alive for a moment after it is no longer counted
    for loop in loops:
        assert loop.end(10)
    assert called.wait(10)
    eventually(lambda: not threads_of(name) and set(threads_of("stagecrew-timers")) <= earlier_timer_threads, 10)
    again = threading.Event()
    pool.submit(again.set)
    assert again.wait(10)
    timers.later(0, again.clear)
    eventually(lambda: not again.is_set(), 10)


class FakeReader:
    """A reader that submits a task to the pool for each frame that it reads."""

    def __init__(self, pool):
        self.pool, self.frames = pool, []
        self.changed = threading.Condition()
        self.readers, self.handlers = [], []

    def read(self, until):
        while not until():
            with self.changed:
                self.changed.wait_for(lambda: self.frames or until(), 10)
                frames, self.frames = self.frames, []
            for _ in frames:
                self.readers.append(threading.current_thread().name)
                self.pool.submit(lambda: self.handlers.append(threading.current_thread().name))
        return True

    def wake(self):
        with self.changed:
            self.changed.notify()

    def arrive(self):
        with self.changed:
            self.frames.append(1)
            self.changed.notify()


def test_the_reading_thread_runs_the_tasks_that_it_read(pool):
    """The idle thread that reads a frame also runs the frame's task. Any other new task interrupts its reading."""
    reader = FakeReader(pool)
    pool.set_reader(reader)
    for number in range(5):
        reader.arrive()
        eventually(lambda: len(reader.handlers) > number, 10)  # noqa: B023 (called at once)
    assert reader.readers == reader.handlers
    done = threading.Event()
    pool.submit(done.set)
    assert done.wait(10)
    pool.remove_reader(reader)
    reader.wake()


def test_timers_run_in_order_unless_cancelled(timers):
    """Timers run at their times, in whatever order they were set. A timer that raises does not stop the others."""
    called, done = [], threading.Event()
    timers.later(0.15, done.set)
    for seconds in (0.1, 0.02, 0.06):
        timers.later(seconds, lambda seconds=seconds: called.append(seconds))
    timers.later(0.04, lambda: 1 // 0)
    timers.later(0.08, lambda: called.append("cancelled")).cancel()
    assert done.wait(10)
    assert called == [0.02, 0.06, 0.1]


@pytest.mark.parametrize("seconds", [math.inf, 1e12])
def test_a_timer_that_is_never_due_does_not_stop_others(timers, monkeypatch, seconds):
    """A timer of an infinite time, or of millennia, is not called, and a later timer is."""
    called, waits, done, wait = [], threading.Event(), threading.Event(), timers._changed.wait
    monkeypatch.setattr(timers._changed, "wait", lambda seconds: waits.set() or wait(seconds))
    timers.later(seconds, lambda: called.append("never"))
    assert waits.wait(10)
    timers.later(0.01, done.set)
    assert done.wait(10)
    assert called == []


def test_async_calls_are_bounded_and_dropped_at_close(timers):
    """At most four async calls of one coordinator run at a time. Calls that are waiting when it closes never begin."""
    background = AsyncCalls(Pool("async", timers), timers)
    go, begun = threading.Event(), []
    for number in range(10):
        background.submit(lambda number=number: (begun.append(number), go.wait(30)))
    background.later(0.01, lambda: begun.append("timer"))
    eventually(lambda: len(begun) == 5, 10)
    background.close()
    go.set()
    time.sleep(0.05)  # a call that was not dropped would begin now
    assert sorted(begun, key=str) == [0, 1, 2, 3, "timer"]


def test_a_hanging_call_does_not_keep_the_process_alive():
    """A process with an async call that never returns exits when its main thread ends."""
    code = (
        "import threading\n"
        "from stagecrew.coordination.async_calls import AsyncCalls\n"
        "begun = threading.Event()\n"
        "AsyncCalls().submit(lambda: (begun.set(), threading.Event().wait()))\n"
        "assert begun.wait(30)\n"
        "print('ends')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ends\n", "")


@pytest.fixture
def full(monkeypatch):
    """A list. While it is not empty, the process can start no thread."""
    start, full = threading.Thread.start, []

    def start_unless_full(thread):
        if full:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_unless_full)
    return full


def test_a_timer_for_which_no_thread_can_start_is_refused(timers, full):
    """A timer is refused if its thread cannot start. Later timers work as soon as a thread can start."""
    full.append(True)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        timers.later(0.0, lambda: None)
    full.clear()
    due = threading.Event()
    timers.later(0.0, due.set)
    assert due.wait(10)


def test_tasks_wait_while_the_process_can_start_no_thread(pool, timers, full, caplog):
    """While no thread can start, `submit` raises no error, and tasks wait. They run as soon as one can start."""
    due = threading.Event()
    timers.later(0.0, due.set)
    assert due.wait(10)
    full.append(True)
    done = []
    for number in range(5):
        pool.submit(lambda number=number: done.append(number))
    assert (done, pool._threads) == ([], 0)
    assert caplog.text.count("cannot start a thread, and will try again: can't start new thread") == 1
    full.clear()
    eventually(lambda: done == [0, 1, 2, 3, 4], 10)


def test_a_pool_without_any_thread_refuses_tasks(pool, full):
    """If neither the pool nor the timers have a thread, `submit` raises an error, and the task never runs.

    A loop keeps such a call, and makes it together with its next one.
    """
    loop, done = Loop("loop", done_with_error, lambda: None, pool=pool), []
    full.append(True)
    with pytest.raises(RuntimeError, match="has no thread, and cannot start one"):
        pool.submit(lambda: done.append("never"))
    loop.call(done.append, 1)
    assert (done, pool._threads) == ([], 0)
    full.clear()
    loop.call(done.append, 2)
    eventually(lambda: done == [1, 2], 10)
    assert loop.end(10)


@pytest.mark.parametrize("can_start_again", [True, False])
def test_a_loop_that_had_no_thread_makes_its_calls_at_its_end(pool, full, can_start_again):
    """`end` makes the calls for which no thread could start. If none can start yet, it returns False."""
    loop, done = Loop("loop", done_with_error, lambda: None, pool=pool), []
    full.append(True)
    loop.call(done.append, 1)
    if can_start_again:
        full.clear()
    assert loop.end(10) is can_start_again
    assert done == ([1] if can_start_again else [])
    full.clear()
    assert loop.end(10)
    assert done == [1]


def test_async_calls_for_which_no_thread_can_start_use_none_of_the_four_places(timers, full):
    """Each async call for which no thread can start is refused. Afterwards, four calls can run at the same time."""
    background = AsyncCalls(Pool("async", timers), timers)
    full.append(True)
    for _ in range(5):
        with pytest.raises(RuntimeError, match="cannot start one"):
            background.submit(lambda: None)
    full.clear()
    together = threading.Barrier(5)
    for _ in range(4):
        background.submit(lambda: together.wait(10))
    together.wait(10)


def done_with_error(error):
    raise error


@pytest.mark.parametrize("has_timers", [True, False])
def test_tasks_wait_for_busy_threads_while_no_other_can_start(pool, timers, full, has_timers):
    """If all threads are busy and no other can start, `submit` raises no error, and the busy threads run the tasks."""
    release, busy = threading.Event(), threading.Barrier(3)
    for _ in range(2):
        pool.submit(lambda: (busy.wait(10), release.wait(10)))
    busy.wait(10)
    if has_timers:
        timers.later(0.0, lambda: None)
    full.append(True)
    done = []
    for number in range(5):
        pool.submit(lambda number=number: done.append(number))
    release.set()
    eventually(lambda: sorted(done) == [0, 1, 2, 3, 4], 10)
