"""Measures transactions of the coordination stores, compared with plain SQLite and plain kazoo.

One thread runs the transactions. Each transaction checks an entry (as leaders do), replaces a value of 200 bytes and creates an entry of
200 bytes. It is on the disk when the call returns.

* Plain SQLite: one table, the same pragmas (WAL, synchronous=FULL), the check and the compare-and-set in one
  BEGIN IMMEDIATE.
* Plain kazoo: one transaction of the same three operations. The store's transaction has a fourth operation, which
  makes sure that a session's transaction is applied at most once and never after the session's end. Plain kazoo
  guarantees neither.
  Both use one server, which forces each transaction to the disk.
"""

import contextlib
import sqlite3
import tempfile
import time

from measurements import Measurement, ratio_at_least
from processes import Run

from support.zookeeper import zookeeper

VALUE = b"v" * 200
#: The transactions in a round of one side.
COUNT = 25


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


def _compare(run, name, peer, raw, ours):
    """Measures alternating rounds. Both sides take turns in being the first."""
    operations, done, rates = {"raw": raw, "store": ours}, {"raw": 0, "store": 0}, {"raw": [], "store": []}

    def measure(side):
        begun = time.perf_counter()
        for one in range(done[side], done[side] + COUNT):
            operations[side](one)
        done[side] += COUNT
        return COUNT / (time.perf_counter() - begun)

    for side in operations:  # warm-up
        measure(side)
    for round_ in run.rounds(80):
        for side in ("raw", "store") if round_ % 2 else ("store", "raw"):
            rates[side].append(measure(side))
    words = f"transactions of three operations, {name}"
    return Measurement(words, "a second", rates["store"], f"plain {peer}", rates["raw"], ratio_at_least(0.8))


def stores(run: Run):
    """Transactions of the coordination stores, compared with plain SQLite and plain kazoo."""
    from kazoo.client import KazooClient

    from stagecrew.recovery.stores.sqlite import SQLiteStore
    from stagecrew.recovery.stores.zookeeper import ZooKeeperStore

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as closing:
        raw = closing.enter_context(contextlib.closing(sqlite3.connect(f"{folder}/raw.db", isolation_level=None)))
        ours = closing.enter_context(contextlib.closing(SQLiteStore(f"{folder}/crew.db")))
        yield _compare(run, "SQLite", "SQLite", _sqlite(raw), _store(ours))
        server = closing.enter_context(zookeeper(properties=()))
        client = KazooClient(server.hosts)
        client.start()
        closing.callback(client.close)
        closing.callback(client.stop)
        ours = closing.enter_context(contextlib.closing(ZooKeeperStore(server.hosts, "/bench")))
        yield _compare(run, "ZooKeeper", "kazoo", _kazoo(client), _store(ours))
