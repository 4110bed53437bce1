"""Which splits each subtask was given: what makes a dynamic source deterministic. No Spark, no thread."""

from __future__ import annotations

import collections
import hashlib
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from pyspark import cloudpickle

from stagecrew.errors import SplitsFailed

if TYPE_CHECKING:
    from stagecrew.operators.watermarks import WatermarkGroup

__all__ = ["HELD", "SplitLog"]

#: There is a split, which may not be given yet.
HELD: Final = b""

#: How many splits are read ahead where the enumerator knows locations, so that there is something to choose from.
_AHEAD: Final = 64


class SplitLog:
    """A log of splits per subtask. Whoever evaluates a subtask reads its log from the beginning, and then lengthens it.

    So two evaluations of a subtask see the same splits in the same order, and each split is in exactly one log. When the
    enumerator has no more, all logs are sealed. Splits are pickled once, and known again by those bytes, and by equality
    where they can be hashed.

    The enumerator (see `Enumerator`), or the iterable that stands for it, is begun when the first split is taken. `came` is
    called for each split that it gives, and says whether there is time to read ahead.
    """

    def __init__(self, enumerator: Any, name: str, came: Callable[[], bool] = lambda: True) -> None:
        #: For messages.
        self.name = name
        self._enumerator, self._came = enumerator, came
        self._has_time = True
        self._splits: Iterator[Any] | None = None
        self._event_time: Callable[[Any], Any] | None = getattr(enumerator, "event_time", None)
        self._locations: Callable[[Any], Iterable[str]] | None = getattr(enumerator, "locations", None)
        self._logs: dict[int, list[bytes]] = {}
        self._ahead: collections.deque[tuple[bytes, frozenset[str]]] = collections.deque()
        self._seen: set[Any] = set()
        #: Digests of what is in restored logs, and was not enumerated again yet.
        self._restored: set[bytes] = set()
        self._exhausted = False
        self._failure: BaseException | None = None

    def at(self, subtask: int, index: int, host: str, reading: WatermarkGroup[Any] | None = None) -> bytes | None:
        """The split at this place of the subtask's log, pickled; None at its end, when there are no more.

        Where splits have event times, `reading` says whether one that was given to nobody may be given now: `HELD` when not.
        Raises `SplitsFailed` from what the enumerator raised, and ever after, and for a place beyond the log's end.
        """
        log = self._logs.setdefault(subtask, [])
        if index < len(log):
            return log[index]
        if index > len(log):
            raise SplitsFailed(
                f"subtask {subtask} of {self.name} asked for split {index} of its log, which has {len(log)}: another coordinator "
                f"gave it the others"
            )
        if self._failure is not None:
            raise SplitsFailed(str(self._failure)) from self._failure
        split = self._take(host, reading)
        if split is not None and split is not HELD:
            log.append(split)
        return split

    def event_time(self, split: bytes) -> Any:
        """The event time of a pickled split, where the enumerator knows it."""
        return None if self._event_time is None else self._event_time(pickle.loads(split))

    @property
    def given(self) -> int:
        """How many splits are in logs."""
        return sum(map(len, self._logs.values()))

    @property
    def sealed(self) -> bool:
        """Whether there are no more."""
        return self._exhausted and not self._ahead

    def state(self) -> bytes:
        """The logs, for a checkpoint."""
        return pickle.dumps({"logs": self._logs})

    def restore(self, state: bytes) -> None:
        """Goes on as of a checkpoint. What the enumerator gives again is known by its bytes, and skipped."""
        self._logs = pickle.loads(state)["logs"]
        self._restored = {_digest(split) for split in itertools.chain.from_iterable(self._logs.values())}

    def _take(self, host: str, reading: WatermarkGroup[Any] | None) -> bytes | None:
        wanted = 1 if self._locations is None else _AHEAD
        while len(self._ahead) < wanted and (found := self._next()) is not None:
            self._ahead.append(found)
            if not self._has_time:  # a task waits
                break
        if not self._ahead:
            return None
        first = None if reading is None else self.event_time(self._ahead[0][0])
        if reading is not None and not reading.allows(first):
            return HELD

        def allowed(split: bytes) -> bool:
            return reading is None or reading.allows(self.event_time(split), beside=first)

        near = (i for i, (split, hosts) in enumerate(self._ahead) if host in hosts and allowed(split))
        chosen = next(near, 0)
        split, _ = self._ahead[chosen]
        del self._ahead[chosen]
        return split

    def _next(self) -> tuple[bytes, frozenset[str]] | None:
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
                        raise SplitsFailed(
                            f"{len(self._restored)} splits that tasks of {self.name} had read before the checkpoint were not "
                            f"enumerated again; an enumerator has to give the same splits again"
                        )
                    return None
                packed: bytes = cloudpickle.dumps(split)  # type: ignore[no-untyped-call]
                hosts = frozenset(self._locations(split)) if self._locations is not None else frozenset()
                if self._is_new(split, packed):
                    self._has_time = self._came()
                    return packed, hosts
            except BaseException as error:
                if isinstance(error, SplitsFailed):
                    self._failure = error
                else:
                    self._failure = SplitsFailed(
                        f"the enumerator of {self.name} raised {type(error).__name__}: {error}"
                    )
                    self._failure.__cause__ = error
                raise self._failure from error
        return None

    def _is_new(self, split: Any, packed: bytes) -> bool:
        digest = _digest(packed)
        if digest in self._restored:
            self._restored.discard(digest)
            self._seen.add(digest)
            return False
        marks = [digest]
        try:
            hash(split)
            marks.append(split)
        except TypeError:
            pass
        if any(mark in self._seen for mark in marks):
            raise SplitsFailed(
                f"the enumerator of {self.name} gave one split twice: {_short(split)}. Its rows would be read twice; give each once, "
                f"or make them differ"
            )
        self._seen.update(marks)
        return True


_END: Final = object()


def _digest(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=16).digest()


def _short(split: Any) -> str:
    text = repr(split)
    return text if len(text) <= 200 else text[:197] + "..."
