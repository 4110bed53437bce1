"""ZooKeeper stores under faults: dead servers, stalled networks, lost replies, and clients without credentials."""

from __future__ import annotations

import collections
import contextlib
import itertools
import random
import ssl
import subprocess
import sys
import threading
import time
import uuid

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError
from kazoo.protocol.serialization import Transaction
from kazoo.security import OPEN_ACL_UNSAFE

from stagecrew.errors import (
    ConfigurationError,
    PossiblyInconsistentError,
    SessionLost,
    StoreConflict,
    StoreRefused,
    StoreUnavailable,
    StoreUnsupported,
)
from stagecrew.recovery.stores import open_store
from stagecrew.recovery.stores.contract import FORMAT, Check, Create, Delete, Entry, Replace
from stagecrew.recovery.stores.zookeeper import ZooKeeperStore
from support.tcp_proxy import Proxy
from support.waiting import eventually
from support.zookeeper import ensemble, tls_zookeeper
from support.zookeeper import zookeeper as own_server

TIMEOUT = 4


@pytest.fixture
def chroot():
    return f"/test/{uuid.uuid4().hex}"


@pytest.fixture
def direct_store(zookeeper, chroot):
    """A store with a direct connection."""
    with contextlib.closing(ZooKeeperStore(zookeeper.hosts, chroot, timeout=TIMEOUT)) as store:
        yield store


@pytest.fixture
def proxy(zookeeper):
    with Proxy(zookeeper.port) as opened:
        yield opened


@pytest.fixture
def store(direct_store, proxy, chroot):
    """A store that is connected through a proxy, which can simulate network failures."""
    with contextlib.closing(ZooKeeperStore(proxy.hosts, chroot, timeout=TIMEOUT)) as store:
        store.ensure("a")
        yield store


@contextlib.contextmanager
def in_thread(work, *arguments):
    """Runs `work` in another thread. Yields a function that waits for the result of `work` or raises its error."""
    outcome = []

    def run():
        try:
            outcome.append((work(*arguments), None))
        except Exception as error:
            outcome.append((None, error))

    def get_result():
        thread.join(60)
        assert outcome, "the work has not ended"
        if outcome[0][1]:
            raise outcome[0][1]
        return outcome[0][0]

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield get_result
    finally:
        thread.join(60)


# -- Lost messages


def test_a_transaction_whose_reply_is_lost_returns_its_result(store, direct_store, proxy):
    proxy.hold("from")
    operations = [Create("a/e", b"1", ephemeral=True), Replace("a", b"1", 0), Check("a"), Create("a/d"), Delete("a/d")]
    with in_thread(store.transact, *operations) as get_result:
        eventually(lambda: direct_store.read("a") == Entry(b"1", 1))
        proxy.heal()
        proxy.cut()
        assert get_result() == [0, 1, 1, 0, None]
    assert direct_store.children("a") == ["e"]
    assert direct_store.read("a/e") == Entry(b"1", 0, store.session)
    assert store.transact(Replace("a", b"2", 1)) == [2]


def test_a_lost_transaction_is_done_once_the_network_heals(store, direct_store, proxy):
    proxy.hold("to")
    with in_thread(store.transact, Replace("a", b"1", 0), Create("a/b")) as get_result:
        time.sleep(0.2)
        assert direct_store.read("a") == Entry(b"", 0)
        proxy.cut()
        proxy.heal()
        assert get_result() == [1, 0]
    assert direct_store.read("a") == Entry(b"1", 1)


def test_a_conflict_after_a_lost_request_is_reported(store, direct_store, proxy):
    proxy.hold("to")
    with in_thread(store.transact, Replace("a", b"mine", 0)) as get_result:
        time.sleep(0.2)
        direct_store.transact(Replace("a", b"other", 0))
        proxy.cut()
        proxy.heal()
        with pytest.raises(StoreConflict, match="a different version"):
            get_result()
    assert direct_store.read("a") == Entry(b"other", 1)


def test_a_late_duplicate_is_not_done_again(store, direct_store, proxy):
    """A request that reaches the server late, after its repetition was applied and undone, is not applied again."""
    late = list(proxy._connections)
    proxy.hold("to", new=False)
    with in_thread(store.transact, Create("a/b", b"once")) as get_result:
        # kazoo detects the missing reply and reconnects.
        assert get_result() == [0]
    assert len(proxy._connections) > len(late)
    store.transact(Delete("a/b"))
    changed = direct_store.read("a").version
    proxy.heal()
    for _ in range(20):
        store.transact(Replace("a", b"", changed))
        changed += 1
        assert direct_store.children("a") == []
        time.sleep(0.02)
    assert not store.suspended


def test_an_unknown_outcome_is_resolved_by_the_next_transaction(zookeeper, proxy, direct_store, chroot):
    with contextlib.closing(ZooKeeperStore(proxy.hosts, chroot, timeout=TIMEOUT, call_timeout=2)) as store:
        store.ensure("a")
        proxy.hold("from")
        with pytest.raises(PossiblyInconsistentError, match="it is unknown"):
            store.transact(Create("a/done"))
        assert direct_store.children("a") == ["done"]
        with pytest.raises(StoreUnavailable, match="nothing was changed"):
            store.transact(Create("a/other"))
        with pytest.raises(StoreUnavailable):
            store.read("a")
        assert direct_store.children("a") == ["done"]
        proxy.heal()
        with pytest.raises(StoreConflict, match="already"):
            store.transact(Create("a/done"))
        proxy.hold("to")
        with pytest.raises(PossiblyInconsistentError):
            store.transact(Create("a/late"))
        assert direct_store.children("a") == ["done"]
        proxy.heal()
        with contextlib.suppress(StoreConflict):  # the request in transit may have arrived first
            store.transact(Create("a/late"))
        assert direct_store.children("a") == ["done", "late"]


def test_an_unreachable_server_is_reported_and_nothing_is_done(zookeeper, chroot):
    proxy = Proxy(zookeeper.port)
    with proxy, contextlib.closing(ZooKeeperStore(proxy.hosts, chroot, timeout=TIMEOUT, call_timeout=2)) as store:
        store.ensure("a")
        proxy.cut()
        proxy.close()
        eventually(lambda: store.suspended)
        for call in (store.read, store.children, lambda key: store.transact(Create(key))):
            with pytest.raises(StoreUnavailable, match="did not respond within 2 s .*nothing was changed"):
                call("b")


def test_an_unavailable_store_is_opened_by_the_first_call_that_reaches_it(zookeeper, chroot):
    with Proxy(zookeeper.port) as proxy:
        proxy.hold("to", "from")
        with contextlib.closing(ZooKeeperStore(proxy.hosts, chroot, timeout=TIMEOUT, call_timeout=0.3)) as store:
            assert store.suspended
            with pytest.raises(StoreUnavailable, match="did not respond"):
                _ = store.session
            with pytest.raises(StoreUnavailable, match="did not respond"):
                store.read("a")
            proxy.heal()

            def session_is_open():
                with contextlib.suppress(StoreUnavailable):
                    return store.session

            eventually(session_is_open)
            store.ensure("a")
            assert not store.suspended


def test_a_session_cut_off_past_its_timeout_is_lost_permanently(store, direct_store, proxy):
    store.transact(Create("a/e", ephemeral=True))
    proxy.hold("to", "from")
    eventually(lambda: store.suspended, TIMEOUT)
    assert direct_store.children("a") == ["e"], "the store detects the cut before the server ends the session"
    eventually(lambda: direct_store.children("a") == [], TIMEOUT + 2)
    name = store.session
    proxy.heal()
    proxy.cut()
    with pytest.raises(SessionLost, match="open the store again"):
        store.transact(Create("a/late", ephemeral=True))
    for _ in range(20):
        with pytest.raises(SessionLost):
            store.read("a")
        assert store.suspended
        time.sleep(0.02)
    assert direct_store.children("a") == []
    with contextlib.closing(ZooKeeperStore(proxy.hosts, store._root, timeout=TIMEOUT)) as another:
        assert another.transact(Create("a/e", ephemeral=True)) == [0]
        assert another.session != name


def test_kazoo_does_not_start_a_second_session(store, direct_store):
    """After its session has expired, kazoo would start a second session by itself, but the store prevents this.

    The test simulates the expiry through kazoo's own test hook.
    """
    from kazoo.protocol.connection import _SESSION_EXPIRED

    store.transact(Create("a/e", ephemeral=True))
    kazoo = store._session._kazoo
    kazoo._call(_SESSION_EXPIRED, kazoo.handler.async_result())
    eventually(lambda: store.suspended)
    for _ in range(10):
        with pytest.raises((SessionLost, PossiblyInconsistentError)):
            store.transact(Create("a/late", ephemeral=True))
        time.sleep(0.05)
    assert kazoo.client_id is None
    assert direct_store.children("a") == ["e"], "the entry exists until the session timeout"


def test_a_session_whose_entry_is_deleted_writes_nothing_more(store, direct_store, zookeeper):
    other = KazooClient(zookeeper.hosts)
    other.start()
    other.delete(store._session_entry)
    other.stop()
    other.close()
    for _ in range(2):
        with pytest.raises(SessionLost):
            store.transact(Create("a/late"))
    assert store.suspended
    assert direct_store.children("a") == []


def test_close_is_bounded_when_the_server_does_not_respond(store, direct_store, proxy):
    store.transact(Create("a/e", ephemeral=True))
    proxy.hold("to", "from")
    started = time.monotonic()
    store.close()
    store.close()
    assert time.monotonic() - started < 7
    with pytest.raises(SessionLost, match="closed"):
        store.read("a")
    eventually(lambda: not direct_store.children("a"), TIMEOUT + 2)


def test_close_leaves_no_thread_and_no_socket(direct_store, zookeeper, chroot):
    direct_store.ensure("a")
    threads_before = set(threading.enumerate())
    store = ZooKeeperStore(zookeeper.hosts, chroot, timeout=TIMEOUT)
    store.ensure("b")
    connection = store._session._handler._socket
    assert set(threading.enumerate()) > threads_before
    store.close()
    assert set(threading.enumerate()) <= threads_before
    assert connection.fileno() == -1


def test_the_session_timeout_is_the_negotiated_one(zookeeper, chroot):
    """Once a session is open, a store has the timeout that the server has agreed to, which is between 1 and 10 s."""
    for requested, agreed in ((4, 4), (60, 10), (0.5, 1)):
        with contextlib.closing(ZooKeeperStore(zookeeper.hosts, chroot, timeout=requested)) as store:
            assert store.timeout == requested
            _ = store.session
            assert store.timeout == pytest.approx(agreed, abs=0.01)


# -- Access


def test_nothing_can_be_read_or_written_without_the_credentials(zookeeper, chroot):
    hosts = zookeeper.hosts
    with contextlib.closing(ZooKeeperStore(hosts, chroot, timeout=TIMEOUT, credentials="crew:s3cret")) as store:
        store.ensure("a/b")
        store.transact(Create("a/e", b"1", ephemeral=True))
        for credentials in (None, "crew:wrong"):
            with contextlib.closing(ZooKeeperStore(hosts, chroot, timeout=TIMEOUT, credentials=credentials)) as other:
                for call in (other.read, other.children, lambda key, other=other: other.transact(Create(key))):
                    with pytest.raises(StoreRefused, match="STAGECREW_STORE_CREDENTIALS") as refused:
                        call("a")
                    assert "s3cret" not in str(refused.value)
                    assert "wrong" not in str(refused.value)
        plain = KazooClient(hosts)
        plain.start()
        try:
            paths = [chroot]
            for path in paths:
                store_kazoo = store._session._kazoo
                paths.extend(f"{path}/{name}" for name in store_kazoo.get_children(path))
            assert len(paths) == 7, paths
            for path in paths:
                for attempt in (lambda p: plain.get(p), lambda p: plain.set(p, b"x"), lambda p: plain.create(f"{p}/x"),
                                lambda p: plain.get_children(p), lambda p: plain.set_acls(p, OPEN_ACL_UNSAFE)):  # fmt: skip
                    with pytest.raises(NoAuthError):
                        attempt(path)
            for path in paths[1:]:
                with pytest.raises(NoAuthError):
                    plain.delete(path)
        finally:
            plain.stop()
            plain.close()
        with contextlib.closing(ZooKeeperStore(hosts, chroot, timeout=TIMEOUT, credentials="crew:s3cret")) as same_user:
            assert same_user.read("a/e") == Entry(b"1", 0, store.session)


def test_a_chroot_that_is_open_to_all_is_refused_with_credentials(direct_store, zookeeper, chroot):
    direct_store.ensure("a")
    store = ZooKeeperStore(zookeeper.hosts, chroot, timeout=TIMEOUT, credentials="a:b")
    with contextlib.closing(store), pytest.raises(StoreRefused, match="does not match these credentials"):
        store.read("a")


def test_credentials_and_values_are_in_no_log_and_no_error(zookeeper, chroot, caplog):
    caplog.set_level(1)
    with contextlib.closing(
        ZooKeeperStore(zookeeper.hosts, chroot, timeout=TIMEOUT, credentials="crew:s3cret")
    ) as store:
        store.transact(Create("a", b"val-ue"))
        store.read("a")
        with pytest.raises(StoreConflict) as raised:
            store.transact(Create("a", b"val-ue"))
        assert zookeeper.hosts in repr(store)
        texts = caplog.text + repr(store) + str(raised.value) + repr(raised.value)
        assert "s3cret" not in texts
        assert "val-ue" not in texts
        assert any(record.name == "stagecrew.zookeeper" for record in caplog.records)


def test_credentials_come_from_the_environment_or_a_file(zookeeper, chroot, tmp_path):
    url = f"zookeeper://{zookeeper.hosts}{chroot}?timeout=4"
    (tmp_path / "secret").write_text("crew:s3cret\n")
    with contextlib.closing(open_store(url, {"STAGECREW_STORE_CREDENTIALS": "crew:s3cret"})) as store:
        store.ensure("a")
    with contextlib.closing(open_store(url, {"STAGECREW_STORE_CREDENTIALS_FILE": str(tmp_path / "secret")})) as store:
        assert store.read("a") == Entry(b"", 0)
    with contextlib.closing(open_store(url, {})) as store, pytest.raises(StoreRefused):
        store.read("a")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        open_store(url, {"STAGECREW_STORE_CREDENTIALS_FILE": str(tmp_path / "none")})


# -- Refused formats and URLs


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            b"stagecrew store %d" % (FORMAT + 1),
            rf"has format {FORMAT + 1}, but this .* supports only format {FORMAT}\. A newer",
        ),
        (
            b"stagecrew store 1",
            rf"has format 1, but this .* supports only format {FORMAT}\. An older .*Finish its jobs",
        ),
        (b"stagecrew store ", rf"has format 0, but this .* supports only format {FORMAT}\. An older .*another store"),
        (b"something", "belongs to another program"),
    ],
)
def test_another_format_is_refused_and_unchanged(direct_store, zookeeper, chroot, value, message):
    """A store of an older or newer format is refused with an error that names the format. No node is changed."""
    direct_store.ensure("a", "jobs/one")
    kazoo = direct_store._session._kazoo

    def nodes(path):
        found = {path: (*kazoo.get(path), kazoo.get_acls(path))}
        for name in kazoo.get_children(path):
            found |= nodes(f"{path}/{name}")
        return found

    kazoo.set(f"{chroot}/entries", value)
    nodes_before = nodes(chroot)
    for protected in (None, "crew:s3cret"):
        store = ZooKeeperStore(zookeeper.hosts, chroot, timeout=TIMEOUT, credentials=protected)
        with contextlib.closing(store), pytest.raises(StoreUnsupported, match=message):
            store.read("a")
    assert nodes(chroot) == nodes_before


@pytest.mark.parametrize(
    "url",
    ["", "crew.db", "sqlite:/crew.db", "sqlite://", "sqlite:///", "sqlite://crew.db", "sqlite:///folder/", "sqlite:///a?x=1",
     "zookeeper://", "zookeeper://host", "zookeeper://host/", "zookeeper:///chroot", "etcd://host/a", "postgresql://u:p@h/db"],
)  # fmt: skip
def test_an_invalid_store_url_is_refused_with_both_valid_forms(url):
    with pytest.raises(
        ConfigurationError, match="sqlite:///path, or zookeeper://host:port,host2:port/chroot"
    ) as raised:
        open_store(url)
    assert "u:p" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("zookeeper://crew:s3cret@host/a", "set STAGECREW_STORE_CREDENTIALS instead"),
        ("zookeeper://host:port/a", "host:port,host2:port"),
        ("zookeeper://ho st/a", "host:port,host2:port"),
        ("zookeeper://host/a?timeout=soon", "number of seconds"),
        ("zookeeper://host/a?timeout=0", "must be positive"),
        ("zookeeper://host/a?password=s3cret", "options of the ZooKeeper URL are invalid"),
        ("zookeeper://host/a?verify=no", "options of the ZooKeeper URL are invalid"),
        ("zookeeper://host/a?ca=/none", "certificates for ZooKeeper cannot be read"),
        ("zookeeper://host/a//b", "is not a valid key"),
    ],
)
def test_the_error_names_the_invalid_part_of_a_url(url, message):
    with pytest.raises(ConfigurationError, match=message) as raised:
        open_store(url, {})
    assert "s3cret" not in str(raised.value)


def test_the_error_for_malformed_credentials_does_not_contain_them():
    with pytest.raises(ConfigurationError, match="user:password") as raised:
        open_store("zookeeper://host/a", {"STAGECREW_STORE_CREDENTIALS": "s3cret"})
    assert "s3cret" not in str(raised.value)


def test_without_kazoo_the_error_names_what_to_install():
    program = """if True:
        import sys
        sys.modules["kazoo"] = None
        from stagecrew.recovery.stores import open_store
        open_store("sqlite://" + sys.argv[1]).close()
        try:
            open_store("zookeeper://host/a")
        except Exception as error:
            print(type(error).__name__, error)
    """
    done = subprocess.run(
        [sys.executable, "-c", program, f"/tmp/{uuid.uuid4().hex}/none"], capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert "ConfigurationError" in done.stderr
    program = program.replace('open_store("sqlite://" + sys.argv[1]).close()', "")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(ConfigurationError.__name__)
    assert "pip install 'stagecrew[zookeeper]'" in done.stdout


# -- Servers


def test_a_session_survives_a_restart_of_the_server_within_its_timeout(chroot):
    with (
        own_server(properties=()) as server,
        contextlib.closing(ZooKeeperStore(server.hosts, chroot, timeout=10)) as store,
    ):
        store.transact(Create("n"), Create("e", ephemeral=True))
        server.kill()
        eventually(lambda: store.suspended)
        server.start()
        with in_thread(store.transact, Replace("n", b"1", 0)) as get_result:
            assert get_result() == [1], "a call that waits long enough succeeds"
        assert store.read("e") == Entry(b"", 0, store.session)
        assert not store.suspended


def test_tls_requires_the_right_certificates(chroot, tmp_path):
    with tls_zookeeper(tmp_path) as port:
        url = f"zookeeper://127.0.0.1:{port}{chroot}?timeout=4&"
        with contextlib.closing(
            open_store(f"{url}ca={tmp_path}/ca.pem&certfile={tmp_path}/ca.pem&keyfile={tmp_path}/key.pem", {})
        ) as store:
            store.ensure("a")
            assert store.transact(Replace("a", b"1", 0)) == [1]
        with (
            contextlib.closing(
                ZooKeeperStore(f"127.0.0.1:{port}", chroot, call_timeout=1, tls=ssl.create_default_context())
            ) as store,
            pytest.raises(StoreUnavailable, match="certificate"),
        ):
            store.read("a")
        # The server requires a client certificate.
        with (
            contextlib.closing(
                ZooKeeperStore(
                    f"127.0.0.1:{port}",
                    chroot,
                    call_timeout=1,
                    tls=ssl.create_default_context(cafile=str(tmp_path / "ca.pem")),
                )
            ) as store,
            pytest.raises(StoreUnavailable),
        ):
            store.read("a")


@pytest.mark.long
def test_transactions_are_done_at_most_once_when_ensemble_leaders_die(chroot):
    with ensemble() as servers:
        hosts = ",".join(server.hosts for server in servers)
        stores = [ZooKeeperStore(hosts, chroot, timeout=10, call_timeout=20) for _ in range(2)]
        with contextlib.ExitStack() as stack:
            for store in stores:
                stack.enter_context(contextlib.closing(store))
            one, other = stores
            one.ensure("n")
            one.transact(Create("e", ephemeral=True))
            numbers = itertools.count()
            stop = threading.Event()
            done, unknown = [], []

            def work():
                while not stop.is_set():
                    number = next(numbers)
                    try:
                        one.transact(Create(f"n/{number}"))
                        done.append(number)
                    except PossiblyInconsistentError:
                        unknown.append(number)

            with in_thread(work) as wait_for_work:
                for _ in range(3):
                    (leader,) = [server for server in servers if "Mode: leader" in server.status()]
                    before = len(done)
                    eventually(lambda before=before: len(done) > before + 20, 60)
                    leader.kill()
                    before = len(done)
                    eventually(lambda before=before: len(done) > before + 20, 60)
                    leader.start()
                    leader.wait()
                    eventually(lambda: sum("Mode:" in server.status() for server in servers) == 3, 60)
                stop.set()
                wait_for_work()
            stored = {int(name) for name in other.children("n")}
            assert set(done) <= stored <= {*done, *unknown}
            assert other.read("e") == Entry(b"", 0, one.session)


@pytest.mark.long
def test_a_session_at_a_lagging_server_is_current_after_a_transaction(chroot):
    """A session at a lagging server can read old entries until its first transaction, but not after it.

    Therefore, a new leader must read only after the transaction that made it the leader.
    """
    network = []
    with ensemble(network) as servers, contextlib.ExitStack() as stack:
        near, far = (
            stack.enter_context(contextlib.closing(ZooKeeperStore(server.hosts, chroot, timeout=10, call_timeout=20)))
            for server in (servers[1], servers[0])
        )
        near.ensure("jobs", "leader")
        far.transact(Check("jobs"))
        assert far.children("jobs") == []
        for proxy in network:
            proxy.hold("from")
        near.transact(Create("jobs/one"))
        near.transact(Replace("leader", b"gone", 0))
        assert (far.children("jobs"), far.read("leader")) == ([], Entry(b"", 0, None))
        with in_thread(far.transact, Create("granted", ephemeral=True)) as wait_for_grant:
            eventually(lambda: near.read("granted"), 10, "a majority has the entry")
            for proxy in network:
                proxy.heal()
            wait_for_grant()
            assert (far.children("jobs"), far.read("leader")) == (["one"], Entry(b"gone", 1, None))
        # The lagging server returns an old version for the check. The store reads the version again instead of
        # reporting a conflict.
        for proxy in network:
            proxy.hold("from")
        near.transact(Replace("leader", b"another", 1))
        assert far.read("leader").version == 1
        with in_thread(far.transact, Check("leader"), Create("jobs/two")) as wait_for_check:
            sent = far._session._kazoo._pending
            eventually(
                lambda: any(isinstance(one, Transaction) for one, *_ in tuple(sent)),
                10,
                "the transaction is in transit",
            )
            for proxy in network:
                proxy.heal()
            assert wait_for_check() == [2, 0]


def replace_over_a_bad_network(seed, seconds, zookeeper, direct_store, chroot):
    """Replaces one entry repeatedly, and returns how often each outcome occurred.

    The assertions detect a replacement that is applied twice or late.
    """
    rng = random.Random(seed)
    direct_store.ensure("n")
    stop = threading.Event()
    with Proxy(zookeeper.port) as proxy, contextlib.ExitStack() as stack:

        def new_store():
            return stack.enter_context(
                contextlib.closing(ZooKeeperStore(proxy.hosts, chroot, timeout=TIMEOUT, call_timeout=1))
            )

        def disturb():
            while not stop.wait(rng.random() / 5):
                directions = rng.choice([("to",), ("from",), ("to", "from")])
                proxy.hold(*directions, new=rng.random() < 0.5)
                stop.wait(rng.random() * 1.5)
                if rng.random() < 0.5:
                    proxy.cut()
                proxy.heal()

        def wait_until_known(store, session):
            """Waits until the session knows the outcome, or until the session no longer exists."""

            def check_transaction():
                with contextlib.suppress(StoreUnavailable, PossiblyInconsistentError):
                    return store.transact(Check("n"))

            try:
                eventually(check_transaction, 60)
            except SessionLost:
                eventually(lambda: session not in direct_store._session._kazoo.get_children(f"{chroot}/sessions"))

        store, version, outcomes = new_store(), 0, collections.Counter()
        with in_thread(disturb) as wait_for_disturber:
            due = time.monotonic() + seconds
            while time.monotonic() < due:
                session = store._session and store._session.name
                try:
                    (version,) = store.transact(Replace("n", b"%d" % version, version))
                    outcomes["done"] += 1
                    continue
                except (StoreUnavailable, SessionLost) as error:
                    outcomes[type(error).__name__] += 1
                    assert direct_store.read("n").version == version, "the error says that nothing was done"
                except PossiblyInconsistentError:
                    wait_until_known(store, session)
                    found = direct_store.read("n").version
                    assert found in (version, version + 1)
                    outcomes[f"unknown, {'done' if found > version else 'not done'}"] += 1
                    version = found
                if store.suspended and store._session is not None and store._session.ended:
                    store = new_store()
            stop.set()
            wait_for_disturber()
        assert direct_store.read("n").version == version
        return outcomes


def test_transactions_are_done_at_most_once_over_a_failing_network(zookeeper, direct_store, chroot):
    assert replace_over_a_bad_network(1, 4, zookeeper, direct_store, chroot)["done"] > 3


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_no_transaction_is_done_twice_over_a_failing_network(seed, zookeeper, direct_store, chroot):
    outcomes = replace_over_a_bad_network(seed, 60, zookeeper, direct_store, chroot)
    print(outcomes)
    assert outcomes["done"] > 50
