"""Processes that find this on their PYTHONPATH are killed at one point of what they write. See `haprocesses.point`.

`STAGECREW_TEST_POINT` says who (`submit`, `driver`, or `run`: the process of a run), at which write, and who dies of it: the one that
writes, or the driver that started it. It happens once in all: the file `mark` is made then. With `STAGECREW_TEST_RUN_STORE` runs reach
the store by another way than their driver.
"""

import json
import os
import re
import signal
import sys


def _role():
    words = sys.orig_argv
    if any(word.endswith("/recovery/run/main.py") for word in words):
        return "run"
    return next((word for word in words if word in ("driver", "submit")), None)


class _Point:
    def __init__(self, what, moment, number, whom, mark):
        self.what, self.moment, self.left, self.whom, self.mark = re.compile(what), moment, number, whom, mark

    def reached(self, moment, text):
        if moment != self.moment or not self.what.search(text):
            return
        self.left -= 1
        if self.left:
            return
        try:
            os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        pid = int(os.environ["STAGECREW_TEST_DRIVER"]) if self.whom == "driver" else os.getpid()
        os.kill(pid, signal.SIGKILL)

    def watch(self, owner, name, words):
        real = getattr(owner, name)

        def called(self_, *arguments, **named):
            text = words(*arguments)
            self.reached("before", text)
            answer = real(self_, *arguments, **named)
            self.reached("after", text)
            return answer

        setattr(owner, name, called)


def _watched(point):
    from stagecrew.recovery.driver.launcher import Launcher
    from stagecrew.recovery.state.storage import StateStorage
    from stagecrew.recovery.stores.sqlite import SQLiteStore
    from stagecrew.recovery.stores.zookeeper import ZooKeeperStore

    def transaction(*operations):
        return " ".join(["transact", *(f"{type(one).__name__}:{one.key}" for one in operations)])

    for store in (SQLiteStore, ZooKeeperStore):
        point.watch(store, "transact", transaction)
    point.watch(StateStorage, "write", lambda hint, data, folder="": f"write {folder}/{hint}")
    point.watch(StateStorage, "discard", lambda state: f"discard {state.name}")
    point.watch(Launcher, "start", lambda folder, run, *_: f"start {run.job}")


if (role := _role()) is not None:
    if role == "driver":
        os.environ["STAGECREW_TEST_DRIVER"] = str(os.getpid())
    if role == "run" and "STAGECREW_TEST_RUN_STORE" in os.environ:
        os.environ["STAGECREW_STORE"] = os.environ["STAGECREW_TEST_RUN_STORE"]
    if "STAGECREW_TEST_POINT" in os.environ:
        given = json.loads(os.environ["STAGECREW_TEST_POINT"])
        if given.pop("role") == role and not os.path.exists(given["mark"]):
            _watched(_Point(**given))
