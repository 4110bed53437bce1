"""What is told of coordinators: counts that are right, words that say whom they wait for, and nothing that breaks them."""

from __future__ import annotations

import datetime as dt
import json
from concurrent.futures import Future

import pytest

import stagecrew
from stagecrew.coordination import statistics_reporter
from stagecrew.errors import RequestFailed, RequestTimeout
from stagecrew.operators.alignment import AlignmentCoordinator
from stagecrew.operators.commit_operator import CommitCoordinator
from stagecrew.operators.reducers import reducer_call
from stagecrew.operators.splits import SplitCoordinator
from stagecrew.operators.superstep_coordinator import SuperstepCoordinator
from stagecrew.operators.superstep_messages import pickled
from stagecrew.testing import CoordinatorHarness
from stagecrew.wire.frames import decode

FROM_HARNESS = "operator/1"


def told(harness, looks=3):
    """What the driver's JVM knows after some seconds: the last word of each binding, and the sums."""
    known, sums = {}, {}
    for _ in range(looks):
        if (frame := harness._host.statistics()) is not None:
            taken(frame, known, sums)
        harness.run()
    return known.get(FROM_HARNESS, {}), sums


def taken(frame, known, sums):
    found = decode(frame[4:])
    assert found.kind == "STATISTICS"
    body = json.loads(found["body"])
    known.update(body["topologies"]["test"])
    sums.update(body["totals"])


def last(harness):
    known, sums = {}, {}
    taken(harness.operators.last_statistics(), known, sums)
    return known[FROM_HARNESS], sums


class Echo(stagecrew.Coordinator):
    """Answers what it is asked, or later; sends what it is told to."""

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


def test_every_count_of_what_happened():
    """Evaluations by their ends, events each way, requests with their times, resets and errors; the sums are the same."""
    with CoordinatorHarness(Echo) as harness:
        one, two, three, four = (harness.evaluation(subtask=n) for n in range(4))
        one.send(3)
        one.send(2)
        assert one.request("a") == "a"
        with pytest.raises(RequestFailed):
            two.request("no")
        with pytest.raises(RequestTimeout):
            two.request("later")
        harness.advance(2.0)
        harness.coordinator.later[0].set_result(1)
        one.finish()
        three.fail()
        four.abandon()
        found, sums = told(harness)
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
        assert (found["name"], found["kind"], found["state"]) == (FROM_HARNESS, "coordinator", "active")
        assert (found["replies"]["count"], found["replies"]["p50"], found["replies"]["max"]) == (3, 0, 2_000_000)
        assert found["lastError"] == "ValueError: not that"
        assert found["queued"] == 0
        harness.reset()
        found, _ = told(harness)
        assert (found["resets"], found["live"], found["failed"]) == (1, 0, 2)
        five = harness.evaluation(subtask=0)
        five.request("again")
        found, sums = told(harness)
        assert (found["live"], found["requests"], sums["requests"]) == (1, 4, 4)
    found, sums = last(harness)
    assert (found["state"], found["live"], found["failed"], found["requests"]) == ("closed", 0, 3, 4)
    assert {name: found[name] for name in ("failed", "eventsOut", "replies")} == {
        name: sums[name] for name in ("failed", "eventsOut", "replies")
    }
    assert harness._host.statistics() is None, "the last word was told"


def test_only_what_changed_is_told_and_a_repeat_changes_nothing():
    """While nothing happens no frame is made; messages that come twice are counted once."""
    with CoordinatorHarness(Echo) as harness:
        assert told(harness)[0]["requests"] == 0
        assert harness._host.statistics() is None
        task = harness.evaluation(subtask=0)
        task.request("a")
        task.say("REQUEST", sequence=1, payload=b"\0a")
        assert told(harness)[0]["requests"] == 1
        assert harness._host.statistics() is None, "nobody does anything"


def test_what_a_coordinator_has_not_handled_is_queued():
    """What evaluations have sent counts until it is handled, also when they are over and when nothing else happens."""
    known, seen = {}, []

    def queued():
        for _ in range(5):
            if (frame := harness._host.statistics()) is not None:
                taken(frame, known, {})
        return known[FROM_HARNESS]["queued"]

    class Slow(Echo):
        def handle_event(self, evaluation, event):
            if event == "first":  # these are enqueued behind it
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
    assert last(harness)[0]["queued"] == 0


def test_what_is_over_has_nothing_queued():
    """Also where the coordinator sat in a call to the end and never handled it: the sums count it no more."""
    ends = []

    class Stuck(Echo):
        def handle_event(self, evaluation, event):
            if event == "first":
                task.send("behind it")
                told(harness, 1)
                taken(harness._host.last_statistics("test", list(harness._host._bindings.values())), known, sums)
                ends.append((known[FROM_HARNESS]["state"], known[FROM_HARNESS]["queued"], sums["queued"]))

    known, sums = {}, {}
    with CoordinatorHarness(Stuck) as harness:
        task = harness.evaluation(subtask=0)
        task.send("first")
    assert ends == [("closed", 0, 0)]


def test_acknowledgements_take_their_time_and_late_ones_are_waited_for():
    """An acknowledgement counts from the oldest event's sending; while it is out, its executor is named, with the time since."""
    with CoordinatorHarness(Echo) as harness:
        task = harness.evaluation(subtask=0, executor="7")
        task.acknowledges = False
        task.send(1)
        harness.advance(5.0)
        task.send(1)
        found, _ = told(harness)
        assert found["waitsFor"].startswith("executor 7 to say that it has an event, since ")
        assert found["waitsFor"].endswith(" UTC")
        harness.advance(1.0)
        task.say("ACCEPTED", sequence=2)
        task.say("ACCEPTED", sequence=2)
        found, _ = told(harness)
        assert found["acknowledgements"]["count"] == 1
        assert found["acknowledgements"]["max"] == 6_000_000
        assert found["waitsFor"] == ""


def test_hooks_that_raise_break_nothing(caplog):
    """A coordinator whose kind, waits_for and progress are nonsense works as ever; that it cannot be shown is logged once."""

    class Nonsense(Echo):
        kind = 5
        progress = "no method"

        def waits_for(self):
            raise SystemExit("really")

    with CoordinatorHarness(Nonsense) as harness:
        task = harness.evaluation(subtask=0)
        assert task.request("a") == "a"
        found, _ = told(harness, 5)
        assert (found["requests"], found["waitsFor"], found["progress"], found["kind"]) == (1, "", {}, "5")
        assert harness.failure is None
    assert [record.message for record in caplog.records].count(
        "operator 'operator': its coordinator cannot say how far it is"
    ) == 1


def test_a_coordinator_that_fails_has_failed():
    """Its error is told, also when the topology closes behind it; long ones are cut."""

    class Bad(Echo):
        def handle_event(self, evaluation, event):
            raise RuntimeError("x" * 5000)

    with CoordinatorHarness(Bad) as harness:
        harness.evaluation(subtask=0).send(1)
        found, _ = told(harness)
        assert found["state"] == "failed"
        assert found["lastError"].startswith("RuntimeError: xxx")
        assert len(found["lastError"]) == 1000
    assert last(harness)[0]["state"] == "failed"


def test_what_is_reported_is_bounded():
    """Of many and long entries some travel."""

    class Wordy(Echo):
        def progress(self):
            return {f"{n:03}" * 100: "y" * 10_000 for n in range(100)}

    with CoordinatorHarness(Wordy) as harness:
        found, _ = told(harness)
        assert len(found["progress"]) == 20
        assert max(map(len, found["progress"].values())) == 300


def test_a_checkpoint_that_is_not_complete_is_waited_for():
    """First for the coordinator's state, then for the acknowledgement of what it had sent."""

    class Slow(Echo):
        def checkpoint(self, checkpoint_id):
            self.state = Future()
            return self.state

    with CoordinatorHarness(Slow) as harness:
        task = harness.evaluation(subtask=0)
        task.acknowledges = False
        task.send(1)
        seen = []

        def look():
            seen.append(told(harness)[0]["waitsFor"])
            harness.coordinator.state.set_result(b"s")
            harness.run()
            seen.append(told(harness)[0]["waitsFor"])
            task.say("ACCEPTED", sequence=1)

        harness.checkpoint(meanwhile=look)
        assert seen[0].startswith("the coordinator's state, for checkpoint 1, since ")
        assert seen[1].startswith("the acknowledgement of what it had sent, for checkpoint 1, since ")
        assert told(harness)[0]["waitsFor"] == ""


def test_splits_say_what_is_done_and_left():
    """Done are those after which the next was asked for; a list says how many are left, an iterator only when it has no more."""
    for splits, known in (([1, 2, 3], True), (iter([1, 2, 3]), False)):
        with CoordinatorHarness(lambda context, splits=splits: SplitCoordinator(context, splits, 10)) as harness:
            one, two = harness.evaluation(subtask=0), harness.evaluation(subtask=1)
            one.request((0, "h"))
            two.request((0, "h"))
            one.request((1, "h"))
            left = {"splits left": "0"} if known else {}
            found = told(harness)[0]["progress"]
            assert found == {"splits done": "1", "splits in work": "2", **left}
            assert as_texts(harness.operators.progress()["operator/1"]) == found
            one.request((2, "h"))
            two.request((1, "h"))
            assert told(harness)[0]["progress"] == {"splits done": "3", "splits in work": "0", "splits left": "0"}
            assert told(harness)[0].get("kind", "splits") == "splits"


def as_texts(progress):
    """Progress as a report has it."""
    return {name: str(value) for name, value in progress.items()}


class Reporting(stagecrew.Coordinator):
    """Has values of its own, beside those that it reports and over one of them."""

    done = 0

    def handle_event(self, evaluation, event):
        self.done = event
        self.context.report(seen=event, both="reported")

    def progress(self):
        if self.done == 3:
            raise ValueError
        return {"done": self.done, "both": "own"}


def test_progress_has_what_the_report_has():
    """`topology.progress` has the values that a coordinator returns from `progress`, beside those that it reported, as they are."""
    with CoordinatorHarness(Reporting) as harness:
        task = harness.evaluation()
        task.send(1)
        found = told(harness)[0]["progress"]
        assert harness.operators.progress() == {"operator/1": {"seen": 1, "both": "own", "done": 1}}
        assert as_texts(harness.operators.progress()["operator/1"]) == found
        task.send(2)
        assert (
            harness.operators.progress()["operator/1"]["seen"] == 2
        )  # at once; what it returns, when it is asked next
        task.send(3)
        told(harness)
        assert harness.operators.progress()["operator/1"] == {"seen": 3, "both": "own", "done": 1}  # it raised
    assert harness.operators.progress()["operator/1"]["seen"] == 3


def test_progress_that_becomes_empty_is_shown_no_longer():
    """A coordinator that returns values from `progress`, and later none, is shown without them."""

    class Working(stagecrew.Coordinator):
        left = 1

        def handle_event(self, evaluation, event):
            self.left = event

        def progress(self):
            return {"left": self.left} if self.left else {}

    with CoordinatorHarness(Working) as harness:
        task = harness.evaluation()
        assert told(harness)[0]["progress"] == {"left": "1"}
        task.send(0)
        assert told(harness)[0]["progress"] == {}
        assert harness.operators.progress() == {"operator/1": {}}


def test_supersteps_say_whom_they_wait_for():
    """The step, who waits, and for whom."""
    with CoordinatorHarness(lambda context: SuperstepCoordinator(context, None, 600)) as harness:
        tasks = [harness.evaluation(subtask=n, partitions=3) for n in range(3)]

        def comes(n, step):
            with pytest.raises(RequestTimeout):
                tasks[n].request(pickled(("reduce", step, 3, tuple(reducer_call("sum")), 1)))

        comes(0, 0)
        found, _ = told(harness)
        assert found["kind"] == "supersteps"
        assert found["waitsFor"].startswith("subtask 1, 2, which 1 of 3 wait for in step 0, since ")
        comes(2, 0)
        tasks[1].request(pickled(("reduce", 0, 3, tuple(reducer_call("sum")), 1)))
        found, _ = told(harness)
        assert (found["waitsFor"], found["progress"]) == ("", {"step": "1"})


def test_alignment_says_who_is_slowest():
    """The source that holds the others, where it is, and how many wait."""
    drift = dt.timedelta(seconds=10)
    with CoordinatorHarness(lambda context: AlignmentCoordinator(context, drift, None)) as harness:
        slow, quick = harness.evaluation(subtask=3), harness.evaluation(subtask=4)
        slow.request((None, dt.datetime(2026, 1, 1, tzinfo=dt.UTC)))
        with pytest.raises(RequestTimeout):
            quick.request(("b", dt.datetime(2026, 1, 2, tzinfo=dt.UTC)))
        found, _ = told(harness)
        assert found["kind"] == "alignment"
        assert found["waitsFor"].startswith(
            "its source of subtask 3, which is at 2026-01-01 00:00:00+00:00: 1 other may not go on before, since "
        )
        assert found["progress"] == {"slowest": "2026-01-01 00:00:00+00:00", "waiting": "1"}
        slow.finish()
        assert told(harness)[0]["waitsFor"] == ""


def test_commits_say_who_stages():
    """Tasks that stage are waited for, and counted."""
    with CoordinatorHarness(CommitCoordinator) as harness:
        one, two = harness.evaluation(subtask=0), harness.evaluation(subtask=1)
        one.send(1)
        one.finish()
        found, _ = told(harness)
        assert found["kind"] == "commit"
        assert found["waitsFor"].startswith("1 task to stage their rows, since ")
        assert found["progress"] == {"staging": "1", "staged": "1"}
        two.finish()


def test_the_last_word_has_the_last_uses_and_of_those_before_them_what_was_not_told(monkeypatch):
    """However many uses there were: what of them is counted is told, that the driver's sums are of all."""
    monkeypatch.setattr(statistics_reporter, "_MOST", 2)
    known, sums = {}, {}
    with CoordinatorHarness(Echo) as harness:
        for _ in range(4):
            harness.operators.add("operator", Echo, harness._host)
        told(harness)
        harness.evaluation(subtask=0).finish()
    taken(harness.operators.last_statistics(), known, sums)
    assert set(known) == {FROM_HARNESS, "operator/4", "operator/5"}
    assert known[FROM_HARNESS]["finished"] == sums["finished"] == 1
