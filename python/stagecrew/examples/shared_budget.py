"""A coordinator that limits how many calls per second all tasks of a job together make to a service.

Run it: `python shared_budget.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

import stagecrew


class Budget(stagecrew.Coordinator):
    """Allows `per_second` calls per second in all tasks together. Replies to each request when its call is allowed."""

    def __init__(self, context: stagecrew.CoordinatorContext, per_second: int) -> None:
        super().__init__(context)
        self.per_second = per_second
        self.waiting: list[tuple[stagecrew.Evaluation, Future[int]]] = []
        self.granted = 0

    def start(self) -> None:
        # A timer, because a sleep would block the coordinator and delay other messages.
        self.context.call_async(time.monotonic, self.grant, period=1 / self.per_second)

    def handle_request(self, evaluation: stagecrew.Evaluation, request: Any) -> Future[int]:
        reply: Future[int] = Future()
        self.waiting.append((evaluation, reply))
        return reply

    def failed(self, evaluation: stagecrew.Evaluation, reason: str) -> None:
        self.waiting = [(requester, reply) for requester, reply in self.waiting if requester != evaluation]

    def grant(self, _now: float | None, _error: BaseException | None) -> None:
        if self.waiting:
            _, reply = self.waiting.pop(0)
            self.granted += 1
            reply.set_result(self.granted)


def call_service(gateway: stagecrew.TaskGateway, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        numbers = [gateway.request("one call") for _ in range(batch.num_rows)]  # a real job now calls the service
        yield pa.record_batch({"call": pa.array(numbers, pa.int64())})


def main() -> None:
    spark = stagecrew.configure(SparkSession.builder.master("local[2]").appName("shared budget")).getOrCreate()
    with stagecrew.crew(spark).topology("calls") as topology:
        budget = topology.coordinate("budget", lambda context: Budget(context, per_second=50))
        calls = budget.map(spark.range(0, 40, 1, 4), call_service, "call long")
        started = time.monotonic()
        granted = sorted(row.call for row in calls.collect())
        seconds = time.monotonic() - started
    assert granted == list(range(1, 41))
    print(f"{len(granted)} calls in {seconds:.1f} s, at most 50 per second by all tasks together")
    spark.stop()


if __name__ == "__main__":
    main()
