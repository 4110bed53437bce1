"""For tests of coordination with real Spark: a coordinator that records its calls, and functions for tasks."""

from __future__ import annotations

import collections
import os
import sys
from typing import Any

import psutil
import pyarrow as pa
from pyspark import cloudpickle

import stagecrew

# Executors cannot import the tests, so the definitions of this module are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class RecordingCoordinator(stagecrew.Coordinator):
    """Records its lifecycle calls in order, the events of each evaluation, and the gateways of live evaluations."""

    def __init__(self, context: stagecrew.CoordinatorContext, instances: list[Any]) -> None:
        super().__init__(context)
        self.calls: list[tuple[Any, ...]] = []
        self.events: dict[stagecrew.Evaluation, list[Any]] = collections.defaultdict(list)
        self.gateways: dict[stagecrew.Evaluation, stagecrew.Gateway] = {}
        instances.append(self)

    def ready(self, evaluation: stagecrew.Evaluation, gateway: stagecrew.Gateway) -> None:
        self.calls.append(("ready", evaluation))
        self.gateways[evaluation] = gateway

    def failed(self, evaluation: stagecrew.Evaluation, reason: str) -> None:
        self.calls.append(("failed", evaluation, reason))
        self.gateways.pop(evaluation)

    def finished(self, evaluation: stagecrew.Evaluation) -> None:
        self.calls.append(("finished", evaluation))
        self.gateways.pop(evaluation)

    def abandoned(self, evaluation: stagecrew.Evaluation) -> None:
        self.calls.append(("abandoned", evaluation))
        self.gateways.pop(evaluation)

    def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        self.calls.append(("reset", subtask))

    def handle_event(self, evaluation: stagecrew.Evaluation, event: Any) -> None:
        self.events[evaluation].append(event)

    def close(self) -> None:
        self.calls.append(("close",))

    def calls_named(self, name: str) -> list[tuple[Any, ...]]:
        """Returns the recorded calls with this name."""
        return [call for call in self.calls if call[0] == name]

    def all_events(self) -> list[Any]:
        """Returns the events of all evaluations, one evaluation after the other."""
        return [event for events in tuple(self.events.values()) for event in events]


def batch_of(*values: Any) -> pa.RecordBatch:
    """Returns a batch with one column `a`."""
    return pa.record_batch({"a": pa.array(values, pa.int64())})


def wait_for_stop(gateway: Any) -> None:
    """Reads events in a task until the event "stop" arrives."""
    for event in gateway.events(timeout=60):
        if event == "stop":
            break


def executor_pid() -> int:
    """Returns the process id of the executor's JVM: its Python daemon is the parent of this worker."""
    return psutil.Process(os.getppid()).ppid()
