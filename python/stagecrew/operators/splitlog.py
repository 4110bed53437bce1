"""The split log records which splits each subtask received, which makes a dynamic source deterministic.

It needs no Spark session. It pickles splits with PySpark's cloudpickle.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark import cloudpickle

from stagecrew.errors import OperatorFailed
from stagecrew.observability.error_summary import error_text

if TYPE_CHECKING:
    from stagecrew.operators.watermarks import WatermarkGroup

__all__ = ["HELD", "SplitLog"]

#: The reply if no split may be assigned yet.
HELD: Final = b""

#: How many splits are read ahead if the enumerator has locations, so that the log can assign a split near the task.
_AHEAD: Final = 64


class _Split(NamedTuple):
    """A split that the enumerator has yielded. The digest recognizes it, also in another process."""

    packed: bytes
    digest: bytes


class SplitLog:
    """A log of splits for each subtask. An evaluation of a subtask reads the log from the beginning, then extends it.

    So two evaluations of a subtask see the same splits in the same order, and each split is in exactly one log. When
    all splits are in logs, the logs are sealed. Two splits are the same if their pickled bytes are equal, or if they
    are hashable and equal. The pickled bytes refer to the class of a split by its name.

    The enumerator is an `Enumerator` or an iterable. The first request begins to read it. `on_split` is called for each
    split that the enumerator yields, and returns whether there is time to read ahead.
    """

    def __init__(self, enumerator: Any, name: str, on_split: Callable[[], bool] = lambda: True) -> None:
        #: The name of the source in messages.
        self.name = name
        self._enumerator, self._on_split = enumerator, on_split
        self._has_time = True
        self._splits: Iterator[Any] | None = None
        self._event_time: Callable[[Any], Any] | None = getattr(enumerator, "event_time", None)
        self._locations: Callable[[Any], Iterable[str]] | None = getattr(enumerator, "locations", None)
        self._logs: dict[int, list[_Split]] = {}
        self._ahead: collections.deque[tuple[_Split, frozenset[str]]] = collections.deque()
        self._seen: set[Any] = set()
        #: Digests of the splits in restored logs that the enumerator has not yielded again yet.
        self._restored: set[bytes] = set()
        self._exhausted = False
        self._failure: BaseException | None = None

    def read(self, subtask: int, index: int, host: str, watermarks: WatermarkGroup[Any] | None = None) -> bytes | None:
        """Returns the pickled split at an index of the subtask's log. At the end of the log, assigns a new split.

        Returns None if the log is sealed and has no more splits. If splits have event times, `watermarks` decides
        whether a new split may be assigned now. If not, returns `HELD`. Raises `OperatorFailed` for an index beyond the
        end of the log. If the enumerator raises an error, this call and all later calls for a new split raise
        `OperatorFailed`.
        """
        log = self._logs.setdefault(subtask, [])
        if index < len(log):
            return log[index].packed
        if index > len(log):
            raise OperatorFailed(
                f"subtask {subtask} of {self.name} asked for split {index} of its log, which has {len(log)} splits: "
                f"another coordinator assigned the others"
            )
        if self._failure is not None:
            raise OperatorFailed(str(self._failure)) from self._failure
        split = self._take(host, watermarks)
        if split is None:
            return None if self.sealed else HELD
        log.append(split)
        return split.packed

    def event_time(self, split: bytes) -> Any:
        """The event time of a pickled split, or None if the enumerator has no event times."""
        return None if self._event_time is None else self._event_time(pickle.loads(split))

    @property
    def assigned(self) -> int:
        """The number of splits in all logs."""
        return sum(map(len, self._logs.values()))

    @property
    def sealed(self) -> bool:
        """Whether all splits are in logs."""
        return self._exhausted and not self._ahead

    def state(self) -> bytes:
        """Pickles the logs, for a checkpoint."""
        return pickle.dumps({subtask: list(map(tuple, log)) for subtask, log in self._logs.items()})

    def restore(self, state: bytes, subtasks: int | None = None) -> None:
        """Continues from a checkpoint.

        Splits that the enumerator yields again are recognized by their digests, and skipped. If there are fewer
        subtasks than at the checkpoint, they also read the logs of the others.
        """
        self._logs = {subtask: [_Split(*one) for one in log] for subtask, log in pickle.loads(state).items()}
        if subtasks is not None:
            for subtask in sorted(one for one in self._logs if one >= subtasks):
                self._logs.setdefault(subtask % subtasks, []).extend(self._logs.pop(subtask))
        self._restored = {split.digest for split in itertools.chain.from_iterable(self._logs.values())}

    def _take(self, host: str, watermarks: WatermarkGroup[Any] | None) -> _Split | None:
        """Returns a split that may be assigned now, or None. If the log is not sealed then, the request must wait."""
        wanted = 1 if self._locations is None else _AHEAD
        while len(self._ahead) < wanted and (found := self._next()) is not None:
            self._ahead.append(found)
            if not self._has_time:  # the task has waited long enough
                break
        if not self._ahead:
            return None
        first = None if watermarks is None else self.event_time(self._ahead[0][0].packed)
        if watermarks is not None and not watermarks.allows(first):
            return None

        def allowed(split: _Split) -> bool:
            return watermarks is None or watermarks.allows(self.event_time(split.packed), beside=first)

        near = (i for i, (split, hosts) in enumerate(self._ahead) if host in hosts and allowed(split))
        chosen = next(near, 0)
        split, _ = self._ahead[chosen]
        del self._ahead[chosen]
        return split

    def _next(self) -> tuple[_Split, frozenset[str]] | None:
        while not self._exhausted:
            try:
                if self._splits is None:
                    self._splits = iter(
                        self._enumerator.splits() if hasattr(self._enumerator, "splits") else self._enumerator
                    )
                split = next(self._splits, _END)
                if split is _END:
                    self._exhausted = True
                    if self._restored:
                        raise OperatorFailed(
                            f"{len(self._restored)} splits that tasks of {self.name} had read before the checkpoint "
                            "were not enumerated again: an enumerator must yield the same splits again"
                        )
                    return None
                packed: bytes = cloudpickle.dumps(split)  # type: ignore[no-untyped-call]
                hosts = frozenset(self._locations(split)) if self._locations is not None else frozenset()
                digest = _digest(split, packed)
                is_new = self._is_new(split, digest)
                self._has_time = self._on_split()
                if is_new:
                    return _Split(packed, digest), hosts
                if not self._has_time:  # the task asks again, and then the splits after this one are read
                    return None
            except BaseException as error:
                if isinstance(error, OperatorFailed):
                    self._failure = error
                else:
                    self._failure = OperatorFailed(f"the enumerator of {self.name} raised {error_text(error)}")
                    self._failure.__cause__ = error
                raise self._failure from error
        return None

    def _is_new(self, split: Any, digest: bytes) -> bool:
        if digest in self._restored:
            self._restored.discard(digest)
            self._seen.add(digest)
            return False
        keys = [digest]
        try:
            hash(split)
            keys.append(split)
        except TypeError:
            pass
        if any(key in self._seen for key in keys):
            raise OperatorFailed(
                f"the enumerator of {self.name} yielded one split twice: {_short(split)}. Its rows would be read "
                "twice: yield each split once, or make the two splits differ"
            )
        self._seen.update(keys)
        return True


_END: Final = object()


def _digest(split: Any, packed: bytes) -> bytes:
    # For a class of the job's script, the bytes of cloudpickle contain the class, with an id that differs in each
    # process. So they are used only for a split that nothing else can pickle, such as a lambda.
    with contextlib.suppress(Exception):
        packed = pickle.dumps(split, pickle.HIGHEST_PROTOCOL)
    return hashlib.blake2b(packed, digest_size=16).digest()


def _short(split: Any) -> str:
    text = repr(split)
    return text if len(text) <= 200 else text[:197] + "..."
