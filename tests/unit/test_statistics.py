"""Statistics of coordinators: counts are correct, `waitsFor` is precise, and faulty hooks break nothing."""

from __future__ import annotations

import datetime as dt
import json
import re
from concurrent.futures import Future

import pytest

import stagecrew
from stagecrew.coordination import statistics_reporter
from stagecrew.errors import CoordinationTimeout, RequestFailed
from stagecrew.operators.alignment import AlignmentCoordinator
from stagecrew.operators.commit_operator import CommitCoordinator
from stagecrew.operators.reducers import reducer_call
from stagecrew.operators.splits import SplitCoordinator
from stagecrew.operators.superstep_coordinator import SuperstepCoordinator
from stagecrew.operators.superstep_messages import pickled
from stagecrew.testing import CoordinatorHarness
from stagecrew.wire.frames import decode

#: The use that a CoordinatorHarness creates.
HARNESS_USE = "operator/1"


def statistics_after(harness, seconds=3):
    """The latest statistics of the harness's use after some rounds, as the driver's JVM has them, and the sums."""
    known, sums = {}, {}
    for _ in range(seconds):
        if (frame := harness._host.statistics()) is not None:
            merge(frame, known, sums)
        harness.run()
    return known.get(HARNESS_USE, {}), sums


def merge(frame, known, sums):
    found = decode(frame[4:])
    assert found.kind == "STATISTICS"
    body = json.loads(found["body"])
    known.update(body["topologies"]["test"])
    sums.update(body["totals"])


def final_statistics(harness):
    known, sums = {}, {}
    merge(harness.operators.last_statistics(), known, sums)
    return known[HARNESS_USE], sums


class Echo(stagecrew.Coordinator):
    """Echoes a request immediately or later, and sends as many events as the task's event says."""

    def __init__(self, context):
        super().__init__(context)
        self.gateways, self.later = {}, []

    def ready(self, evaluation, gateway):
        self.gateways[evaluation] = gateway

    def handle_event(self, evaluation, event):
        for _ in range(event):
            self.gateways[evaluation].send("x")

    def handle_request(self, evaluation, request):
        if request == "no":
            raise ValueError("not that")
        if request == "later":
            self.later.append(Future())
            return self.later[-1]
        return request


def test_all_counts():
    """Statistics count evaluations by how they ended, events in both directions, requests with their reply times, and
    resets. They contain the last error, and the sums over all uses agree."""
    with CoordinatorHarness(Echo) as harness:
        one, two, three, four = (harness.evaluation(subtask=n) for n in range(4))
        one.send(3)
        one.send(2)
        assert one.request("a") == "a"
        with pytest.raises(RequestFailed):
            two.request("no")
        with pytest.raises(CoordinationTimeout):
            two.request("later")
        harness.advance(2.0)
        harness.coordinator.later[0].set_result(1)
        one.finish()
        three.fail()
        four.abandon()
        found, sums = statistics_after(harness)
        counts = {
            "live": 1,
            "finished": 1,
            "failed": 1,
            "abandoned": 1,
            "resets": 0,
            "eventsIn": 2,
            "eventsOut": 5,
            "requests": 3,
        }
        assert {name: found[name] for name in counts} == counts == {name: sums[name] for name in counts}
        assert (found["name"], found["kind"], found["state"]) == (HARNESS_USE, "coordinator", "active")
        assert (found["replies"]["count"], found["replies"]["p50"], found["replies"]["max"]) == (3, 0, 2_000_000)
        assert found["lastError"] == "ValueError: not that"
        assert found["queued"] == 0
        harness.reset()
        found, _ = statistics_after(harness)
        assert (found["resets"], found["live"], found["failed"]) == (1, 0, 2)
        five = harness.evaluation(subtask=0)
        five.request("again")
        found, sums = statistics_after(harness)
        assert (found["live"], found["requests"], sums["requests"]) == (1, 4, 4)
    found, sums = final_statistics(harness)
    assert (found["state"], found["live"], found["failed"], found["requests"]) == ("closed", 0, 3, 4)
    assert {name: found[name] for name in ("failed", "eventsOut", "replies")} == {
        name: sums[name] for name in ("failed", "eventsOut", "replies")
    }
    assert harness._host.statistics() is None, "the final statistics were sent"


def test_the_slowest_request_is_named():
    """A request that has waited for its reply for a second is in the progress, with its task, until it has the reply."""
    with CoordinatorHarness(Echo) as harness:
        one, two = harness.evaluation(subtask=1, executor="5"), harness.evaluation(subtask=2)
        with pytest.raises(CoordinationTimeout):
            one.request("later")
        harness.advance(0.5)
        with pytest.raises(CoordinationTimeout):
            two.request("later")
        assert "slowest request" not in statistics_after(harness)[0]["progress"]
        harness.advance(2.0)
        slowest = statistics_after(harness)[0]["progress"]["slowest request"]
        assert re.fullmatch(r"subtask 1 on executor 5 \(attempt \d+\), for 2 s", slowest)
        harness.coordinator.later[0].set_result(1)
        assert statistics_after(harness)[0]["progress"]["slowest request"].startswith("subtask 2 ")
        harness.coordinator.later[1].set_result(1)
        assert "slowest request" not in statistics_after(harness)[0]["progress"]


def test_only_changes_are_sent_and_repeats_change_nothing():
    """No frame is created while nothing changes. A message that arrives twice is counted once."""
    with CoordinatorHarness(Echo) as harness:
        assert statistics_after(harness)[0]["requests"] == 0
        assert harness._host.statistics() is None
        task = harness.evaluation(subtask=0)
        task.request("a")
        task.send_frame("REQUEST", sequence=1, payload=b"\0a")
        assert statistics_after(harness)[0]["requests"] == 1
        assert harness._host.statistics() is None, "nothing has changed"


def test_unhandled_messages_are_queued():
    """Messages count as queued until they are handled, even if their evaluations have ended."""
    known, seen = {}, []

    def queued():
        for _ in range(5):
            if (frame := harness._host.statistics()) is not None:
                merge(frame, known, {})
        return known[HARNESS_USE]["queued"]

    class Slow(Echo):
        def handle_event(self, evaluation, event):
            if event == "first":  # the messages below are queued while this one is being handled
                for task in (one, one, two):
                    task.send("more")
                one.finish()
                two.fail()
            seen.append(queued())

    with CoordinatorHarness(Slow) as harness:
        one, two = harness.evaluation(subtask=0), harness.evaluation(subtask=1)
        one.send("first")
        assert seen == [4, 3, 2, 1]
        assert queued() == 0
        seen.clear()
        one, two = harness.evaluation(subtask=0), harness.evaluation(subtask=1)
        harness.coordinator.handle_event = lambda *_: (one.send("dropped"), harness.reset())
        one.send("first")
        assert queued() == 0
    assert final_statistics(harness)[0]["queued"] == 0


def test_ended_bindings_have_no_queued_messages():
    """The sums include no queued messages of an ended binding, even if a blocked call never handled them."""
    ends = []

    class Stuck(Echo):
        def handle_event(self, evaluation, event):
            if event == "first":
                task.send("behind it")
                statistics_after(harness, 1)
                merge(
                    harness._host.last_statistics("test", list(harness._host._liveness.bindings.values())), known, sums
                )
                ends.append((known[HARNESS_USE]["state"], known[HARNESS_USE]["queued"], sums["queued"]))

    known, sums = {}, {}
    with CoordinatorHarness(Stuck) as harness:
        task = harness.evaluation(subtask=0)
        task.send("first")
    assert ends == [("closed", 0, 0)]


def test_times_of_acknowledgements_and_waits_for_late_ones():
    """The time of an acknowledgement is measured from the oldest unacknowledged event. While an acknowledgement is
    late, `waitsFor` names the executor and since when."""
    with CoordinatorHarness(Echo) as harness:
        task = harness.evaluation(subtask=0, executor="7")
        task.acknowledges = False
        task.send(1)
        harness.advance(5.0)
        task.send(1)
        found, _ = statistics_after(harness)
        assert found["waitsFor"].startswith("executor 7 to acknowledge an event, since ")
        assert found["waitsFor"].endswith(" UTC")
        harness.advance(1.0)
        task.send_frame("ACCEPTED", sequence=2)
        task.send_frame("ACCEPTED", sequence=2)
        found, _ = statistics_after(harness)
        assert found["acknowledgements"]["count"] == 1
        assert found["acknowledgements"]["max"] == 6_000_000
        assert found["waitsFor"] == ""


def test_faulty_hooks_break_nothing(caplog):
    """A coordinator with faulty `kind`, `waits_for` and `progress` works as usual, and the fault is logged once."""

    class Nonsense(Echo):
        kind = 5
        progress = "no method"

        def waits_for(self):
            raise SystemExit("really")

    with CoordinatorHarness(Nonsense) as harness:
        task = harness.evaluation(subtask=0)
        assert task.request("a") == "a"
        found, _ = statistics_after(harness, 5)
        assert (found["requests"], found["waitsFor"], found["progress"], found["kind"]) == (1, "", {}, "5")
        assert harness.failure is None
    assert [record.message for record in caplog.records].count(
        "operator 'operator': kind, waits_for() or progress() of its coordinator failed; the UI shows older values"
    ) == 1


def test_the_error_of_a_failed_coordinator():
    """The error of a failed coordinator is reported and truncated, and its state stays "failed" after the topology has
    closed."""

    class Bad(Echo):
        def handle_event(self, evaluation, event):
            raise RuntimeError("x" * 5000)

    with CoordinatorHarness(Bad) as harness:
        harness.evaluation(subtask=0).send(1)
        found, _ = statistics_after(harness)
        assert found["state"] == "failed"
        assert found["lastError"].startswith("RuntimeError: xxx")
        assert len(found["lastError"]) == 1000
    assert final_statistics(harness)[0]["state"] == "failed"


def test_reports_are_bounded():
    """At most 20 entries of a coordinator's progress are sent, and each value is truncated to 300 characters."""

    class Wordy(Echo):
        def progress(self):
            return {f"{n:03}" * 100: "y" * 10_000 for n in range(100)}

    with CoordinatorHarness(Wordy) as harness:
        found, _ = statistics_after(harness)
        assert len(found["progress"]) == 20
        assert max(map(len, found["progress"].values())) == 300


def test_waits_for_an_incomplete_checkpoint():
    """During a checkpoint, `waitsFor` names first the coordinator's state, and then the acknowledgement of the events
    that it sent before."""

    class Slow(Echo):
        def checkpoint(self, checkpoint_id):
            self.state = Future()
            return self.state

    with CoordinatorHarness(Slow) as harness:
        task = harness.evaluation(subtask=0)
        task.acknowledges = False
        task.send(1)
        seen = []

        def check_waits():
            seen.append(statistics_after(harness)[0]["waitsFor"])
            harness.coordinator.state.set_result(b"s")
            harness.run()
            seen.append(statistics_after(harness)[0]["waitsFor"])
            task.send_frame("ACCEPTED", sequence=1)

        harness.checkpoint(meanwhile=check_waits)
        assert seen[0].startswith("the coordinator's state, for checkpoint 1, since ")
        assert seen[1].startswith("the acknowledgement of events that it sent, for checkpoint 1, since ")
        assert statistics_after(harness)[0]["waitsFor"] == ""


def test_splits_report_done_and_left():
    """A split is done when its task has requested the next one. If the splits come from an iterator, the number of
    splits left is reported only at the iterator's end."""
    for splits, known in (([1, 2, 3], True), (iter([1, 2, 3]), False)):
        with CoordinatorHarness(lambda context, splits=splits: SplitCoordinator(context, splits, 10)) as harness:
            one, two = harness.evaluation(subtask=0), harness.evaluation(subtask=1)
            one.request((0, "h"))
            two.request((0, "h"))
            one.request((1, "h"))
            left = {"splits left": "0"} if known else {}
            found = statistics_after(harness)[0]["progress"]
            assert found == {"splits done": "1", "splits in progress": "2", **left}
            assert as_texts(harness.operators.progress()["operator/1"]) == found
            one.request((2, "h"))
            two.request((1, "h"))
            assert statistics_after(harness)[0]["progress"] == {
                "splits done": "3",
                "splits in progress": "0",
                "splits left": "0",
            }
            assert statistics_after(harness)[0].get("kind", "splits") == "splits"


def as_texts(progress):
    """Converts progress to the texts in a report."""
    return {name: str(value) for name, value in progress.items()}


class Reporting(stagecrew.Coordinator):
    """Reports values, one of which `progress` replaces by its own."""

    done = 0

    def handle_event(self, evaluation, event):
        self.done = event
        self.context.report(seen=event, both="reported")

    def progress(self):
        if self.done == 3:
            raise ValueError
        return {"done": self.done, "both": "own"}


def test_progress_has_what_the_report_has():
    """The topology's progress contains the values that a coordinator returned from `progress` and those that it passed
    to `report`, with their types."""
    with CoordinatorHarness(Reporting) as harness:
        task = harness.evaluation()
        task.send(1)
        found = statistics_after(harness)[0]["progress"]
        assert harness.operators.progress() == {"operator/1": {"seen": 1, "both": "own", "done": 1}}
        assert as_texts(harness.operators.progress()["operator/1"]) == found
        task.send(2)
        # Reported values appear immediately, and values returned by `progress` after its next call.
        assert harness.operators.progress()["operator/1"]["seen"] == 2
        task.send(3)
        statistics_after(harness)
        assert harness.operators.progress()["operator/1"] == {"seen": 3, "both": "own", "done": 1}  # `progress` raised
    assert harness.operators.progress()["operator/1"]["seen"] == 3


def test_progress_that_becomes_empty_is_removed():
    """When a coordinator's `progress` returns no values any more, its earlier values are removed."""

    class Working(stagecrew.Coordinator):
        left = 1

        def handle_event(self, evaluation, event):
            self.left = event

        def progress(self):
            return {"left": self.left} if self.left else {}

    with CoordinatorHarness(Working) as harness:
        task = harness.evaluation()
        assert statistics_after(harness)[0]["progress"] == {"left": "1"}
        task.send(0)
        assert statistics_after(harness)[0]["progress"] == {}
        assert harness.operators.progress() == {"operator/1": {}}


def test_supersteps_name_the_missing_subtasks():
    """`waitsFor` of a superstep names the step, how many subtasks are waiting, and the missing subtasks."""
    with CoordinatorHarness(lambda context: SuperstepCoordinator(context, None, 600)) as harness:
        tasks = [harness.evaluation(subtask=n, partitions=3) for n in range(3)]

        def reach_step(n, step):
            with pytest.raises(CoordinationTimeout):
                tasks[n].request(pickled(("reduce", step, 3, tuple(reducer_call("sum")), 1)))

        reach_step(0, 0)
        found, _ = statistics_after(harness)
        assert found["kind"] == "supersteps"
        assert found["waitsFor"].startswith("subtask 1, 2, which 1 of 3 wait for in step 0, since ")
        reach_step(2, 0)
        tasks[1].request(pickled(("reduce", 0, 3, tuple(reducer_call("sum")), 1)))
        found, _ = statistics_after(harness)
        assert (found["waitsFor"], found["progress"]) == ("", {"step": "1"})


def test_alignment_names_the_slowest_source():
    """`waitsFor` of an alignment names the slowest source, its event time, and the number of sources that wait for
    it."""
    drift = dt.timedelta(seconds=10)
    with CoordinatorHarness(lambda context: AlignmentCoordinator(context, drift, None)) as harness:
        slow, quick = harness.evaluation(subtask=3), harness.evaluation(subtask=4)
        slow.request((None, dt.datetime(2026, 1, 1, tzinfo=dt.UTC)))
        with pytest.raises(CoordinationTimeout):
            quick.request(("b", dt.datetime(2026, 1, 2, tzinfo=dt.UTC)))
        found, _ = statistics_after(harness)
        assert found["kind"] == "alignment"
        assert found["waitsFor"].startswith(
            "the source of subtask 3, which is at 2026-01-01 00:00:00+00:00: 1 other source must wait for it, since "
        )
        assert found["progress"] == {"slowest": "2026-01-01 00:00:00+00:00", "waiting": "1"}
        slow.finish()
        assert statistics_after(harness)[0]["waitsFor"] == ""


def test_commits_count_staging_tasks():
    """`waitsFor` of a commit names the number of tasks that are still staging their rows."""
    with CoordinatorHarness(CommitCoordinator) as harness:
        one, two = harness.evaluation(subtask=0), harness.evaluation(subtask=1)
        one.send(1)
        one.finish()
        found, _ = statistics_after(harness)
        assert found["kind"] == "commit"
        assert found["waitsFor"].startswith("1 task to stage their rows, since ")
        assert found["progress"] == {"staging": "1", "staged": "1"}
        two.finish()


def test_final_statistics_include_unsent_counts_of_earlier_uses(monkeypatch):
    """The final statistics include each earlier use whose counts have changed, even beyond the limit on uses. So the
    driver's sums cover all uses."""
    monkeypatch.setattr(statistics_reporter, "_MAX_FINAL", 2)
    known, sums = {}, {}
    with CoordinatorHarness(Echo) as harness:
        for _ in range(4):
            harness.operators.add("operator", Echo, harness._host)
        statistics_after(harness)
        harness.evaluation(subtask=0).finish()
    merge(harness.operators.last_statistics(), known, sums)
    assert set(known) == {HARNESS_USE, "operator/4", "operator/5"}
    assert known[HARNESS_USE]["finished"] == sums["finished"] == 1
