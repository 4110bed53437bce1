"""A session on Linux and, with `--hide-proc`, on a system without /proc, such as macOS.

`make test` runs this module with and without the option, and `make test-long` runs all contract tests with it.
"""

from __future__ import annotations

import os
import sys

import pytest
from pyspark import cloudpickle

import stagecrew
from stagecrew import operating_system
from support.hidden_proc import is_proc_hidden
from support.journal import Recorder, rendezvous
from support.sessions import LOCAL
from support.spark_versions import HAS_IDLE_WORKER_LIMIT
from support.waiting import eventually

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # executors do not have this module

contract_where_supported = (
    pytest.mark.contract if HAS_IDLE_WORKER_LIMIT else pytest.mark.skip("Spark has no such limit")
)


def reads_proc() -> bool:
    """Returns whether this process can read its start time, and the users of its peers."""
    can_read = operating_system.start_time(os.getpid()) is not None
    assert can_read == operating_system.knows_peer_user()
    return can_read


@pytest.mark.contract
def test_the_option_hides_proc_from_every_process(sessions):
    """With the option, neither the driver nor a worker nor the agent can read /proc. Without it, all of them can."""

    @stagecrew.resource(scope=stagecrew.Scope.EXECUTOR)
    def agent(context):
        yield reads_proc()

    agents = agent()
    spark = sessions.get(LOCAL)
    with stagecrew.crew(spark).topology("asks", listeners=[agents]):
        seen = spark.sparkContext.parallelize([0], 1).map(lambda _: (reads_proc(), agents.get())).first()
    assert {reads_proc(), *seen} == {not is_proc_hidden()}
    assert operating_system.find_process(os.getpid()) is not None  # psutil needs /proc on Linux only


class SlowToClose(Recorder):
    """Its `close` takes until the file `released` exists."""

    def close(self, context):
        self.journal.write(event="closing")
        eventually(lambda: os.path.exists(self.released), 20, f"{self.released} exists")
        super().close(context)


@contract_where_supported
def test_an_idle_worker_that_spark_terminates(sessions, journal, tmp_path):
    """A worker closes its listeners before Spark terminates it. Without /proc it is killed, and reported as lost.

    Spark terminates workers beyond `spark.python.factory.idleWorkerMaxPoolSize` as soon as they are idle.
    """
    released = tmp_path / "released"
    spark = sessions.get("local[2,4]", spark__python__factory__idleWorkerMaxPoolSize="1")
    listener = SlowToClose(journal, released=str(released))
    topology = stagecrew.crew(spark).topology("idle", listeners=[listener])
    with topology:
        spark.sparkContext.parallelize(range(2), 2).mapPartitions(rendezvous(journal.path, "body", 2)).collect()
        if is_proc_hidden():
            eventually(lambda: topology.report.lost == 1, 20, "one of the two workers is killed")
            released.touch()
        else:
            eventually(lambda: journal.read(event="closing"), 20, "one of the two workers closes its listener")
            released.touch()
            eventually(lambda: topology.report.closes == 1, 20, "it has closed its listener")
    report = topology.report
    assert (report.opens, report.failures) == (2, 0)
    assert (report.closes, report.lost) == ((1, 1) if is_proc_hidden() else (2, 0))
