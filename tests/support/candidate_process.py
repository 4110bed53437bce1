"""A process that campaigns for leadership, and writes continuously while it leads.

Tests kill, stop and disconnect it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

__all__ = ["CandidateProcess"]


class CandidateProcess:
    """Starts the process, and reads the journal to which it writes. Leaving the `with` block kills it."""

    def __init__(self, url: str, folder: Path, name: str) -> None:
        from support.journal import Journal

        self._journal = Journal(str(folder / name))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-W", "error", __file__, url, self._journal.path], stdin=subprocess.PIPE, text=True
        )
        self.name, self.pid = name, self._process.pid

    def events(self, event: str, **fields):
        """Returns the events of this kind with these fields from the process's journal."""
        with contextlib.suppress(FileNotFoundError):
            return self._journal.read(event=event, **fields)
        return []

    def signal(self, number: int) -> float:
        """Sends a signal, and returns the time of sending."""
        now = time.time()
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait(20)
        return now

    def close(self) -> int:
        """Closes the process's candidate, and returns the exit code of the process."""
        self._process.stdin.close()
        return self._process.wait(30)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(20)
        with contextlib.suppress(OSError):
            self._process.stdin.close()


def main(url: str, path: str) -> None:
    from stagecrew.errors import LeadershipLost, SessionLost, StoreConflict, StoreError
    from stagecrew.recovery.leadership.candidate import Candidate
    from stagecrew.recovery.leadership.fencing import FencedStore, fence
    from stagecrew.recovery.stores import open_store
    from stagecrew.recovery.stores.contract import Create, Replace
    from support.journal import Journal

    journal = Journal(path)

    def say(event, **fields):
        journal.write(event=event, at=time.time(), **fields)

    def write(who, term, store):
        """Writes numbered entries without checking whether this process still leads.

        Other writers use the same numbers.
        """
        while True:
            try:
                fenced = FencedStore(store, fence(term))
                fenced.ensure("count", "work")
                version = fenced.read("count").version
                fenced.transact(Replace("count", b"", version), Create(f"work/{version:08d}", f"{term} {who}".encode()))
            except StoreConflict:
                continue  # another writer was first
            except (LeadershipLost, SessionLost) as error:
                say("refused", who=who, term=term, error=type(error).__name__)
                if isinstance(error, LeadershipLost) or who == "leader":
                    return
                store = open_store(url)  # a job continues with another session
            except StoreError:
                pass  # the store may be reachable again later
            time.sleep(0.02)

    def on_grant(leadership):
        say("grant", term=leadership.term)
        # The leadership's own store would refuse late writes by itself, so the writers use the store below it.
        for who, store in (("leader", leadership.store._store), ("job", open_store(url))):
            threading.Thread(target=write, args=(who, leadership.term, store), daemon=True).start()

    candidate = Candidate(
        lambda: open_store(url),
        on_grant,
        lambda term, reason: say("revoke", term=term, reason=reason),
        callback_timeout=5,
    )
    say("begins")
    sys.stdin.read()
    say("closed", ended=candidate.close())


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root / "python"), str(root / "tests")]
    main(*sys.argv[1:])
    os._exit(0)  # the writer threads are still running
