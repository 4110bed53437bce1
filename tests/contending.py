"""A process that campaigns, and writes all the time while it leads: to be killed, stopped and cut off."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

__all__ = ["Contending"]


class Contending:
    """What it says goes to a journal of its own. It ends with its `with`, however the test ends."""

    def __init__(self, url: str, folder: Path, name: str) -> None:
        from crewtools import Journal

        self._journal = Journal(str(folder / name))
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", __file__, url, self._journal.path], stdin=subprocess.PIPE, text=True
        )
        self.name, self.pid = name, self._process.pid

    def said(self, event: str, **fields):
        """All that it said of this event, with these fields."""
        with contextlib.suppress(FileNotFoundError):
            return self._journal.read(event=event, **fields)
        return []

    def signal(self, number: int) -> float:
        """Answers when."""
        now = time.time()
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait(20)
        return now

    def leave(self) -> int:
        """Has it close its contender and end."""
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
    from crewtools import Journal
    from stagecrew.errors import LeadershipLost, SessionLost, StoreConflict, StoreError
    from stagecrew.recovery.leadership.candidate import Candidate
    from stagecrew.recovery.leadership.fencing import FencedStore, fence
    from stagecrew.recovery.stores import open_store
    from stagecrew.recovery.stores.contract import Create, Replace

    journal = Journal(path)

    def say(event, **fields):
        journal.write(event=event, at=time.time(), **fields)

    def write(who, term, store):
        """Numbers writes, of whomever, as the store does them; without asking whether this process still leads."""
        while True:
            try:
                fenced = FencedStore(store, fence(term))
                fenced.ensure("count", "work")
                version = fenced.read("count").version
                fenced.transact(Replace("count", b"", version), Create(f"work/{version:08d}", f"{term} {who}".encode()))
            except StoreConflict:
                continue  # the other was quicker
            except (LeadershipLost, SessionLost) as error:
                say("refused", who=who, term=term, error=type(error).__name__)
                if isinstance(error, LeadershipLost) or who == "leader":
                    return
                store = open_store(url)  # a job goes on with another session
            except StoreError:
                pass  # it may be there again
            time.sleep(0.02)

    def on_grant(leadership):
        say("grant", term=leadership.term)
        # Not through the leadership's store, which would refuse by itself what comes too late.
        for who, store in (("leader", leadership.store._store), ("job", open_store(url))):
            threading.Thread(target=write, args=(who, leadership.term, store), daemon=True).start()

    contender = Candidate(
        lambda: open_store(url), on_grant, lambda term, reason: say("revoke", term=term, reason=reason), ending=5
    )
    say("begins")
    sys.stdin.read()
    say("closed", ended=contender.close())


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "python")]
    main(*sys.argv[1:])
    os._exit(0)  # its writers go on
