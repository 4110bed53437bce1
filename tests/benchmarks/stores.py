"""Measures transactions of the coordination stores, compared with plain SQLite and plain kazoo.

The ratio is the median of the ratios of neighbouring rounds, which run under the same load. One thread runs the
transactions. Each transaction checks an entry (as leaders do), replaces a value of 200 bytes and creates an entry of
200 bytes. It is on the disk when the call returns.

* Plain SQLite: one table, the same pragmas (WAL, synchronous=FULL), the check and the compare-and-set in one
  BEGIN IMMEDIATE.
* Plain kazoo: one transaction of the same three operations. The store's transaction has a fourth operation, which
  makes sure that a session's transaction is applied at most once and never after the session's end. Plain kazoo
  guarantees neither.
  Both use one server, which forces each transaction to the disk.
"""

import contextlib
import pathlib
import sqlite3
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from support.zookeeper import zookeeper

VALUE = b"v" * 200


def _store(store):
    from stagecrew.recovery.stores.contract import Check, Create, Replace

    root = "bench"
    store.ensure(root, f"{root}/leader", f"{root}/job", f"{root}/all")

    def do(number):
        store.transact(
            Check(f"{root}/leader", 0), Replace(f"{root}/job", VALUE, number), Create(f"{root}/all/{number}", VALUE)
        )

    return do


def _sqlite(connection):
    for statement in (
        "PRAGMA journal_mode = WAL",
        "PRAGMA synchronous = FULL",
        "CREATE TABLE entries (key TEXT PRIMARY KEY, value BLOB, version INTEGER) WITHOUT ROWID",
        "INSERT INTO entries VALUES ('bench/leader', x'', 0), ('bench/job', x'', 0)",
    ):
        connection.execute(statement)

    def do(number):
        connection.execute("BEGIN IMMEDIATE")
        assert connection.execute("SELECT version FROM entries WHERE key = 'bench/leader'").fetchone() == (0,)
        changed = connection.execute(
            "UPDATE entries SET value = ?, version = version + 1 WHERE key = 'bench/job' AND version = ?",
            (VALUE, number),
        )
        assert changed.rowcount == 1
        connection.execute("INSERT INTO entries VALUES (?, ?, 0)", (f"bench/all/{number}", VALUE))
        connection.execute("COMMIT")

    return do


def _kazoo(client):
    for path in ("/raw", "/raw/leader", "/raw/job", "/raw/all"):
        client.create(path)

    def do(number):
        transaction = client.transaction()
        transaction.check("/raw/leader", 0)
        transaction.set_data("/raw/job", VALUE, number)
        transaction.create(f"/raw/all/{number}", VALUE)
        results = transaction.commit()
        assert not any(isinstance(result, Exception) for result in results), results

    return do


def _compare(raw, ours, rounds, count):
    """Runs alternating rounds. Both sides take turns in being the first.

    Returns the transactions per second of each side.
    """
    operations, done, seconds = {"raw": raw, "store": ours}, {"raw": 0, "store": 0}, {"raw": [], "store": []}
    for number in range(-1, rounds):  # the first round is a warm-up
        for name in ("raw", "store") if number % 2 else ("store", "raw"):
            begun = time.perf_counter()
            for one in range(done[name], done[name] + count):
                operations[name](one)
            done[name] += count
            if number >= 0:
                seconds[name].append(time.perf_counter() - begun)
    rates = {name: count / statistics.median(of) for name, of in seconds.items()}
    ratios = [raw / store for raw, store in zip(seconds["raw"], seconds["store"], strict=True)]
    return {**rates, "ratio": statistics.median(ratios), "count": count, "seconds": seconds}


def stores(rounds: int = 80, count: int = 25):
    """Returns the figures of both stores."""
    from kazoo.client import KazooClient

    from stagecrew.recovery.stores.sqlite import SQLiteStore
    from stagecrew.recovery.stores.zookeeper import ZooKeeperStore

    found = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as closing:
        raw = closing.enter_context(contextlib.closing(sqlite3.connect(f"{folder}/raw.db", isolation_level=None)))
        ours = closing.enter_context(contextlib.closing(SQLiteStore(f"{folder}/crew.db")))
        found["sqlite"] = _compare(_sqlite(raw), _store(ours), rounds, count)
        server = closing.enter_context(zookeeper(properties=()))
        client = KazooClient(server.hosts)
        client.start()
        closing.callback(client.close)
        closing.callback(client.stop)
        ours = closing.enter_context(contextlib.closing(ZooKeeperStore(server.hosts, "/bench")))
        found["zookeeper"] = _compare(_kazoo(client), _store(ours), rounds, count)
    return found


if __name__ == "__main__":
    for kind, figures in stores().items():
        print(f"{kind}: plain {figures['raw']:,.0f}/s, store {figures['store']:,.0f}/s, ratio {figures['ratio']:.3f}")
