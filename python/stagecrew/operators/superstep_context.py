"""The task's side of supersteps: the object with which a task reduces values."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from stagecrew.errors import CoordinationTimeout, OperatorFailed, RequestFailed
from stagecrew.operators.reducers import Reducer, reducer_call
from stagecrew.operators.superstep_messages import IN_PIECES, PIECE, WHOLE, pickled, split_into_pieces

if TYPE_CHECKING:
    from stagecrew.worker.task_gateway import TaskGateway

__all__ = ["SuperstepContext"]


class SuperstepContext:
    """The task's side of supersteps. Every task gets the same result from each `reduce`.

    `Topology.supersteps` passes this object to the user's function. Only the thread that runs the function may use it.

    Args:
        gateway: The task's connection to the coordinator.
        members: The number of tasks.
        timeout: How many seconds to wait for a reply from the driver.
        piece: The maximum number of bytes in one message. Larger values are sent in several messages.

    Attributes:
        subtask: The number of this task, from 0.
        subtasks: The number of tasks.
        step: The number of times that this task has called `reduce`.
        stopped: Whether the driver's `stop_when` has returned True. It has the same value in all tasks.

    Examples:
        >>> def mean(steps, batches):
        ...     values = [value for batch in batches for value in batch.column("id").to_pylist()]
        ...     total, count = steps.reduce(sum(values)), steps.reduce(len(values))
        ...     yield pa.record_batch({"mean": [total / count]})
        >>> with crew.topology("statistics") as topology:  # doctest: +SKIP
        ...     topology.supersteps(spark.range(100).repartition(2), mean, "mean double").show()
    """

    def __init__(self, gateway: TaskGateway, members: int, timeout: float, piece: int = PIECE) -> None:
        self._gateway, self._timeout, self._piece = gateway, timeout, piece
        assert gateway.subtask is not None
        self.subtask, self.subtasks = gateway.subtask, members
        self.step = 0
        self.stopped = False

    def __repr__(self) -> str:
        return f"<superstep {self.step} of subtask {self.subtask} of {self.subtasks}>"

    def reduce(self, value: Any, op: Reducer = "sum", name: str | None = None) -> Any:
        """Combines the values of all tasks into one value, and returns it in every task. Waits for the other tasks.

        The driver reduces the values in the order of subtasks, so a sum of floating point numbers is the same each
        time. The driver holds the values of all tasks at once; this is tested with 64 MB from each task. None is
        ignored.

        All tasks must use the same reducer in a step. Reducers are compared by name. The name of a ready-made reducer
        is `op` itself. A function that can be imported from a module is named by its qualified name, such as
        `operator.mul`. Any other function, such as a lambda, a nested function, a partial or a function in `__main__`,
        needs `name`.

        Args:
            value: This task's value. Any picklable object.
            op: `"sum"`, `"min"` or `"max"` (of numbers; of numpy and Arrow arrays, element by element; a sum counts
                True as 1), `"concat"` (of arrays, tables, lists, tuples, text and bytes), or a function of two values.
            name: The name of the function `op`, which must be the same in all tasks.

        Returns:
            The reduced value, or None if all values are None.

        Raises:
            OperatorFailed: If another task uses a different reducer or has ended, the values cannot be reduced
                together, or the result does not arrive in time.
            OperatorMisused: If there is no such reducer, a function needs `name` and has none, `name` is that of a
                ready-made reducer, or the function cannot be pickled.

        Examples:
            >>> def longest(steps, batches):
            ...     texts = [text for batch in batches for text in batch.column("text").to_pylist()]
            ...     mine = max(texts, key=len, default=None)
            ...     found = steps.reduce(mine, lambda a, b: max(a, b, key=len), name="longest")
            ...     yield pa.record_batch({"text": [found]})

        Not promised: that functions with the same name are compared. The driver uses the function of the task that
        arrives last. So the function must not hold a value that differs between tasks, such as `steps.subtask`, and all
        executors must have the same modules.
        """
        request = pickled(("reduce", self.step, self.subtasks, tuple(reducer_call(op, name)), value))
        if len(request) > self._piece:
            *pieces, last = split_into_pieces(request, self._piece)
            for piece in pieces:
                self._gateway.send(bytes(piece))
            request = bytes(last)
        reply = self._ask(request)
        if reply.startswith(IN_PIECES[:1]):
            reply = b"".join([WHOLE, *(self._ask(pickled(("piece", n))) for n in range(int(reply[1:])))])
        self.step += 1
        self.stopped, result = pickle.loads(memoryview(reply)[1:])
        return result

    def _ask(self, request: bytes) -> bytes:
        try:
            reply: bytes = self._gateway.request(request, timeout=self._timeout)
        except RequestFailed as error:
            if not isinstance(error.__cause__, OperatorFailed):
                raise
            raise OperatorFailed(str(error.__cause__)) from error
        except CoordinationTimeout as error:
            raise OperatorFailed(
                f"step {self.step} of subtask {self.subtask} got no result from the driver in time: {error}. Raise "
                "timeout= if steps take longer"
            ) from error
        return reply
