"""Direct connections of the driver's Python to executors on its host, when the driver's JVM or an executor is lost."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from pyspark import cloudpickle

import stagecrew
from stagecrew.coordination.direct import DirectConnection
from support.coordination import RecordingCoordinator, batch_of, executor_pid, wait_for_stop
from support.driver_scripts import driver_script, java_processes
from support.journal import Journal
from support.processes import is_alive, kill, stop
from support.sessions import LOCAL_CLUSTER, Sessions
from support.waiting import eventually

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCRIPT = """
import itertools
from concurrent.futures import Future
from stagecrew.coordination.direct import DirectConnection
class Echo(stagecrew.Coordinator):
    def __init__(self, context):
        super().__init__(context)
        self.waiting = []
    def ready(self, evaluation, gateway):
        journal.write(event="ready", direct=isinstance(gateway.route, DirectConnection))
    def handle_request(self, evaluation, request):
        if request == "both run":
            self.waiting.append(Future())
            if len(self.waiting) == 2:
                [one.set_result(None) for one in self.waiting]
            return self.waiting[-1]
        journal.write(event="request", partition=evaluation.partition, number=request)
        return request
    def failed(self, evaluation, reason):
        journal.write(event="failed", reason=reason)
def work(gateway, batches):
    gateway.request("both run")  # so each executor runs one of them
    journal.write(event="worker")
    for number in itertools.count():
        assert gateway.request(number) == number
    yield
spark = stagecrew.configure(session_builder("local-cluster[2,1,1024]")).getOrCreate()
try:
    with stagecrew.crew(spark).topology("t") as topology:
        operator = topology.coordinate("echo", Echo)
        operator.map(spark.range(0, 2, 1, 2), work, "n long").collect()
except BaseException as error:
    journal.write(event="raised", type=type(error).__name__, text=str(error), cause=str(error.__cause__))
"""


def test_a_lost_jvm_of_the_driver_ends_direct_connections(tmp_path: Path, journal: Journal) -> None:
    """When the driver's JVM is killed, the topology fails, workers and executors end, and no request is handled twice.

    Without the driver's JVM, the driver's Python cannot know which executors still belong to the application.
    """
    with driver_script(tmp_path, journal, "", SCRIPT) as driver:
        for partition in range(2):
            eventually(
                lambda partition=partition: len(journal.read(event="request", partition=partition)) > 100, 90,
                "both tasks send requests",
            )  # fmt: skip
        jvm, *executors = java_processes(driver.pid)
        workers = [psutil.Process(entry["pid"]) for entry in journal.read(event="worker")]
        assert len(executors) == len(workers) == 2
        jvm.kill()
        killed = time.monotonic()
        eventually(lambda: journal.read(event="raised"), 30, "the driver's action raises")
        assert time.monotonic() - killed < 15
        for process in (*executors, *workers):
            eventually(lambda process=process: not is_alive(process.pid), 30, f"{process} ends")
        eventually(lambda: driver.poll() is not None, 30, "the driver ends")
    assert [entry["direct"] for entry in journal.read(event="ready")[-2:]] == [True, True]
    for partition in range(2):
        numbers = [entry["number"] for entry in journal.read(event="request", partition=partition)]
        assert numbers == list(range(len(numbers)))


@pytest.mark.long
def test_a_lost_executor_that_continues_is_fenced(sessions: Sessions) -> None:
    """After Spark has lost an executor, no event of it is handled, although it runs and can reach the driver's Python.

    Spark loses the executor because SIGSTOP stops it for longer than the network timeout. Its attempts fail once, and
    run again elsewhere.
    """
    spark = sessions.get(
        LOCAL_CLUSTER,
        **{
            "spark.executor.heartbeatInterval": "1s",
            "spark.network.timeout": "8s",
            "spark.network.timeoutInterval": "1s",
            "spark.task.maxFailures": "30",
        },
    )

    def work(gateway, batches):
        gateway.send(executor_pid())
        sender = threading.Thread(target=send_all, args=(gateway,), daemon=True)
        sender.start()
        wait_for_stop(gateway)
        yield batch_of(gateway.subtask)

    def send_all(gateway):
        for number in range(60_000):
            gateway.send(number)
            time.sleep(0.001)  # so that it still sends when the executor continues

    coordinators: list[RecordingCoordinator] = []
    outcome = []
    with stagecrew.crew(spark).topology("t") as topology:
        operator = topology.coordinate("o", lambda context: RecordingCoordinator(context, coordinators))
        dataset = operator.map(spark.range(0, 4, 1, 4), work, "a long")
        thread = threading.Thread(target=topology.wrap(lambda: outcome.append(dataset.collect())))
        thread.start()
        eventually(lambda: coordinators and len(coordinators[0].events) == 4, 60, "all tasks are running")
        (coordinator,) = coordinators
        assert all(isinstance(gateway.route, DirectConnection) for gateway in coordinator.gateways.values())
        evaluation, (pid, *_) = next(iter(coordinator.events.items()))
        on_lost_executor = {other for other, (its_pid, *_) in coordinator.events.items() if its_pid == pid}
        worker = psutil.Process(pid).children(recursive=True)
        stop(pid)
        try:
            eventually(
                lambda: {call[1] for call in coordinator.calls_named("failed")} == on_lost_executor,
                40,
                "Spark has lost the executor, and its attempts have failed",
            )
            handled = {lost: len(coordinator.events[lost]) for lost in on_lost_executor}
        finally:
            kill(pid, signal.SIGCONT)
        eventually(lambda: not is_alive(pid), 60, "the lost executor ends")
        assert {lost: len(coordinator.events[lost]) for lost in on_lost_executor} == handled
        for process in worker:
            eventually(lambda process=process: not is_alive(process.pid), 30, f"{process} ends")
        eventually(lambda: len(coordinator.gateways) == 4, 60, "the attempts run again")
        assert len(coordinator.calls_named("failed")) == len(on_lost_executor)
        assert evaluation.executor not in {other.executor for other in coordinator.gateways}
        for gateway in tuple(coordinator.gateways.values()):
            gateway.send("stop")
        thread.join(60)
    assert sorted(row.a for row in outcome[0]) == [0, 1, 2, 3]
