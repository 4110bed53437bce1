"""Who learns that an event is in its task's mailbox."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from typing import Any, Final, NoReturn

__all__ = ["Acknowledgement"]

_log = logging.getLogger("stagecrew")

#: Between the first look at one and its settlement. Nothing is called while it is held.
_guard = threading.Lock()
_NOT_YET: Final = object()


class Acknowledgement(Future[None]):
    """A `concurrent.futures.Future` that comes into being when somebody looks at it.

    Making a Future with its condition costs more than all else of a send, and most senders never look. It cannot be
    cancelled: what was sent is sent.
    """

    def __init__(self) -> None:
        """Not that of a Future: what that sets is missing, and `__getattr__` finds it."""

    def __getattr__(self, name: str) -> Any:
        mine = self.__dict__
        with _guard:
            if "_looked_at" not in mine:
                future: Future[None] = Future()
                outcome = mine.get("_outcome", _NOT_YET)
                if isinstance(outcome, BaseException):
                    future.set_exception(outcome)
                elif outcome is None:
                    future.set_result(None)
                mine.update(future.__dict__, _looked_at=True)
        try:
            return mine[name]
        except KeyError:
            raise AttributeError(f"a future of an acknowledgement has no {name!r}", name=name, obj=self) from None

    def settle(self, error: BaseException | None = None) -> None:
        """The event is in the mailbox, or never will be, for that reason. Once; a callback that fails is logged."""
        with _guard:
            if "_looked_at" not in self.__dict__:
                self.__dict__["_outcome"] = error
                return
        try:
            if error is None:
                self.set_result(None)
            else:
                self.set_exception(error)
        except KeyboardInterrupt:
            raise
        except BaseException:  # of a callback; or it was settled by whoever got it. Others wait behind it
            _log.exception("the future of an event could not be settled")

    def cancel(self) -> bool:
        """Does nothing, and says so."""
        return False

    def __reduce__(self) -> NoReturn:
        """No future travels: what came out would never be done."""
        raise TypeError("the future of an event cannot be pickled")
