"""Kills a process at a kill point. Python imports this module at startup if its folder is on the PYTHONPATH.

`STAGECREW_TEST_POINT` (JSON, from `kill_point`) names a role (`submit`, `driver`, or `run` for the process of a run),
an operation, and the victim: the process that performs the operation, or the driver that started it. At most one victim
is killed, because the file `marker` is created first. If `STAGECREW_TEST_RUN_STORE` is set, runs use this URL of the
store instead of their driver's.
"""

import json
import os
import re
import signal
import sys


def _role():
    command = sys.orig_argv
    if any(word.endswith("/recovery/run/main.py") for word in command):
        return "run"
    return next((word for word in command if word in ("driver", "submit")), None)


class _KillPoint:
    def __init__(self, operation, moment, number, victim, marker):
        self.operation, self.moment, self.victim, self.marker = re.compile(operation), moment, victim, marker
        self.remaining = number

    def reached(self, moment, text):
        if moment != self.moment or not self.operation.search(text):
            return
        self.remaining -= 1
        if self.remaining:
            return
        try:
            os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        pid = int(os.environ["STAGECREW_TEST_DRIVER"]) if self.victim == "driver" else os.getpid()
        os.kill(pid, signal.SIGKILL)

    def instrument(self, owner, name, describe):
        real = getattr(owner, name)

        def called(instance, *arguments, **named):
            text = describe(*arguments)
            self.reached("before", text)
            result = real(instance, *arguments, **named)
            self.reached("after", text)
            return result

        setattr(owner, name, called)


def _instrument(point):
    from stagecrew.recovery.driver.launcher import Launcher
    from stagecrew.recovery.state.storage import StateStorage
    from stagecrew.recovery.stores.sqlite import SQLiteStore
    from stagecrew.recovery.stores.zookeeper import ZooKeeperStore

    def transaction(*operations):
        return " ".join(["transact", *(f"{type(one).__name__}:{one.key}" for one in operations)])

    for store in (SQLiteStore, ZooKeeperStore):
        point.instrument(store, "transact", transaction)
    point.instrument(StateStorage, "write", lambda hint, data, folder="": f"write {folder}/{hint}")
    point.instrument(StateStorage, "discard", lambda state: f"discard {state.name}")
    point.instrument(Launcher, "start", lambda folder, run, *_: f"start {run.job}")


if (role := _role()) is not None:
    if role == "driver":
        os.environ["STAGECREW_TEST_DRIVER"] = str(os.getpid())
    if role == "run" and "STAGECREW_TEST_RUN_STORE" in os.environ:
        os.environ["STAGECREW_STORE"] = os.environ["STAGECREW_TEST_RUN_STORE"]
    if "STAGECREW_TEST_POINT" in os.environ:
        given = json.loads(os.environ["STAGECREW_TEST_POINT"])
        if given.pop("role") == role and not os.path.exists(given["marker"]):
            _instrument(_KillPoint(**given))
