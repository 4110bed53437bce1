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
    """Starts the process and reads its journal. Leaving the `with` block kills the process."""

    def __init__(self, url: str, folder: Path, name: str) -> None:
        from support.journal import Journal

        self._journal = Journal(str(folder / name))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-W", "error", __file__, url, self._journal.path], stdin=subprocess.PIPE, text=True
        )
        self.name, self.pid = name, self._process.pid

    def events(self, event: str, **fields):
        """Returns the events of this kind that have these fields, from the process's journal."""
        with contextlib.suppress(FileNotFoundError):
            return self._journal.read(event=event, **fields)
        return []

    def signal(self, number: int) -> float:
        """Sends a signal, and returns the time just before it was sent. After SIGKILL, waits for the process to end."""
        now = time.time()
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait(20)
        return now

    def close(self) -> int:
        """Makes the process close its candidate, and returns the exit code of the process."""
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

    def record(event, **fields):
        journal.write(event=event, at=time.time(), **fields)

    def write_until_refused(who, term, store):
        """Writes numbered entries without checking whether this process still leads, until the store refuses them.

        All writers, also those of other processes, use the same sequence of numbers.
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
                record("refused", who=who, term=term, error=type(error).__name__)
                if isinstance(error, LeadershipLost) or who == "leader":
                    return
                store = open_store(url)  # the job continues with a new session
            except StoreError:
                pass  # the store may be reachable again later
            time.sleep(0.02)

    def on_grant(leadership):
        record("grant", term=leadership.term)
        # `leadership.store` itself refuses writes after the leadership has ended. So that only fencing can refuse them,
        # the writers bypass it.
        for who, store in (("leader", leadership.store._store), ("job", open_store(url))):
            threading.Thread(target=write_until_refused, args=(who, leadership.term, store), daemon=True).start()

    candidate = Candidate(
        lambda: open_store(url),
        on_grant,
        lambda term, reason: record("revoke", term=term, reason=reason),
        callback_timeout=5,
    )
    record("begins")
    sys.stdin.read()
    record("closed", ended=candidate.close())


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root / "python"), str(root / "tests")]
    main(*sys.argv[1:])
    os._exit(0)  # the writer threads are still running
