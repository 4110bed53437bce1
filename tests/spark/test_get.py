"""`get()` in tasks, for functions and listeners of any origin."""

from __future__ import annotations

import sys
import threading
import types

import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession

import stagecrew
from support.journal import Recorder

cloudpickle.register_pickle_by_value(sys.modules[__name__])

POOLS = """
import stagecrew

@stagecrew.resource()
def pool(context, dsn):
    yield f"{dsn} in {context.topology}"

class Plain(stagecrew.Listener):
    def __init__(self, dsn):
        self.dsn = dsn

    def open(self, context):
        self.opened = f"{self.dsn} in {context.topology}"

orders = pool("orders")
planes = pool("planes")
plain = Plain("plain")

def words(rows):
    for _ in rows:
        yield orders.get(), planes.get(), plain.get().opened
"""


@pytest.fixture
def pools(spark, tmp_path, monkeypatch):
    """A module that the workers import themselves, so that each worker creates the module's listeners again."""
    name = f"pools_{abs(hash(str(tmp_path)))}"
    path = tmp_path / f"{name}.py"
    path.write_text(POOLS)
    monkeypatch.syspath_prepend(str(tmp_path))
    spark.sparkContext.addPyFile(str(path))
    import importlib

    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def collect(spark: SparkSession, f, partitions: int = 2):
    return spark.sparkContext.parallelize(range(partitions), partitions).mapPartitions(f).collect()


def test_a_function_of_an_imported_module_finds_two_pools_of_one_factory(spark, crew, pools):
    """A function of a module that workers import distinguishes two pools of one factory by their arguments."""
    with crew.topology("t", listeners=[pools.orders, pools.planes, pools.plain]):
        found = collect(spark, pools.words)
    assert found == [("orders in t", "planes in t", "plain in t")] * 2


def test_functions_and_listeners_of_main_find_each_other(spark, crew):
    """A function and a listener of `__main__` are pickled by value and find each other."""
    main = types.ModuleType("__main__")
    exec(POOLS, main.__dict__)
    with crew.topology("t", listeners=[main.orders, main.planes, main.plain]):
        found = collect(spark, main.words)
    assert found == [("orders in t", "planes in t", "plain in t")] * 2


def test_a_rerun_notebook_cell_finds_the_open_listener(spark, crew):
    """After a notebook cell is run again, functions of the second run find the listeners opened by the first run."""
    first, second = types.ModuleType("__main__"), types.ModuleType("__main__")
    exec(POOLS, first.__dict__)
    exec(POOLS, second.__dict__)
    with crew.topology("t", listeners=[first.orders, first.planes, first.plain]):
        found = collect(spark, second.words)
    assert found == [("orders in t", "planes in t", "plain in t")] * 2


def resource_not_open(f, *args) -> str:
    """Runs an action that must raise ResourceNotOpen. Returns the message."""
    with pytest.raises(Exception, match="ResourceNotOpen") as caught:
        f(*args)
    return str(caught.value).partition("ResourceNotOpen: ")[2].partition("\n")[0]


def test_a_rerun_cell_with_other_code_raises_until_the_topology_restarts(spark, crew):
    """`get()` raises instead of returning the value of the earlier definition, until the topology is started again."""
    first, second = types.ModuleType("__main__"), types.ModuleType("__main__")
    exec(POOLS, first.__dict__)
    exec(POOLS.replace("{dsn} in", "{dsn}, changed, in"), second.__dict__)
    crew.topology("t", listeners=[first.orders, first.planes, first.plain]).start()
    assert "'pool' is not open here: its definition was run again with different code" in resource_not_open(
        collect, spark, second.words
    )
    crew.close_all()
    assert crew.active == ()
    topology = crew.topology("t", listeners=[second.orders, second.planes, second.plain]).start()
    try:
        assert collect(spark, second.words) == [("orders, changed, in t", "planes, changed, in t", "plain in t")] * 2
    finally:
        topology.close()


def test_an_unregistered_listener_error_lists_the_registered_ones(spark, crew, pools):
    """The error lists the listeners of the topology, or says that the task belongs to no topology."""
    with crew.topology("outer", listeners=[pools.orders]), crew.topology("inner", listeners=[pools.plain]):
        text = resource_not_open(collect, spark, pools.words)
    assert text.startswith(
        "listener 'pool' is not open here: this task runs in topology 'inner' inside 'outer', which does not have it"
    )
    assert "(it has: 'Plain', 'pool')" in text
    assert "Register it there: `crew.topology('inner', listeners=[pool])`" in text

    def unregistered(rows):
        yield pools.pool("never").get()

    text = resource_not_open(collect, spark, unregistered)
    assert "this task belongs to no topology" in text
    assert "topology.wrap(f)" in text


def test_a_dataset_run_after_its_topology_raises(spark, crew, pools):
    """`get()` in a task that runs after the listener's topology raises ResourceNotOpen and names the topology."""
    orders = pools.pool("orders")
    with crew.topology("gone", listeners=[orders]):
        planned = spark.range(0, 2, 1, 2).mapInArrow(task_with_get(orders), "a string")
        assert planned.count() == 2
    for text in (resource_not_open(planned.count), resource_not_open(collect, spark, task_with_get(orders))):
        assert "it was registered for topology 'gone', and the action ran after this topology had closed" in text
    with crew.topology("next", listeners=[pools.planes]):
        text = resource_not_open(planned.count)
        assert "it was registered for topology 'gone', and the action ran after this topology had closed" in text


def task_with_get(listener):
    """Returns a task function that calls the listener's `get()` and yields one row."""

    def task(batches):
        import pyarrow as pa

        for _ in batches:
            pass
        yield pa.record_batch({"a": [listener.get()]})

    return task


def test_a_lazy_dataset_of_a_closed_topology_names_the_remedy(spark, crew, pools):
    """If a lazy dataset first runs after its topology, the error names the topology and says what to do."""
    orders = pools.pool("orders")
    with crew.topology("gone", listeners=[orders]):
        dataset = spark.sparkContext.parallelize(range(2), 2).map(lambda _: orders.get())
        assert dataset.collect() == ["orders in gone"] * 2
        lazy = spark.sparkContext.parallelize(range(2), 2).map(lambda _: orders.get())
    with pytest.raises(Exception, match="ResourceNotOpen") as caught:
        lazy.collect()
    text = str(caught.value)
    assert "topology 'gone'" in text
    assert "Run the action inside `with crew.topology" in text


def test_a_threads_jobs_belong_to_the_topology_only_if_wrapped(spark, crew, pools):
    """A thread's jobs belong to the topology only if its function was wrapped."""
    results: dict[str, object] = {}
    listeners = [pools.orders, pools.planes, pools.plain]

    def words(rows):  # not from a module, so the listeners are pickled with it, including their registration
        orders, planes, plain = listeners
        for _ in rows:
            yield orders.get(), planes.get(), plain.get().opened

    def job(name: str) -> None:
        try:
            results[name] = collect(spark, words, 1)
        except Exception as error:
            results[name] = str(error)

    with crew.topology("t", listeners=listeners) as topology:
        wrapped = threading.Thread(target=topology.wrap(job), args=("wrapped",))
        plain = threading.Thread(target=job, args=("plain",))
        for thread in (wrapped, plain):
            thread.start()
            thread.join(60)
    assert results["wrapped"] == [("orders in t", "planes in t", "plain in t")]
    assert "it was registered for topology 't', and the action ran in a thread outside of this topology" in str(
        results["plain"]
    )
    assert "`topology.wrap(f)`" in str(results["plain"])


def test_a_closed_topology_cannot_be_used_again(spark, crew, journal):
    """`start`, `with` and wrapped functions of a closed topology raise TopologyError. `close` does nothing."""
    topology = crew.topology("t", listeners=[Recorder(journal)])
    with topology:
        wrapped = topology.wrap(lambda: 1)
        assert wrapped() == 1
    for use, remedy in (
        (topology.start, "create another"),
        (topology.__enter__, "create another"),
        (wrapped, "call it inside"),
    ):
        with pytest.raises(stagecrew.errors.TopologyError, match=f"'t'.*{remedy}"):
            use()
    topology.close()
    assert topology.report.state == "closed"


def test_functions_find_listeners_of_the_configuration(sessions, spark, pools, tmp_path, master):
    """A listener named in the configuration is found by functions of its module and by functions pickled by value."""
    name = pools.__name__
    spark = sessions.get(
        master,
        spark__stagecrew__listeners=f"{name}:orders,{name}:planes,{name}:plain",
        spark__executorEnv__PYTHONPATH=str(tmp_path),
    )
    expected = [("orders in application", "planes in application", "plain in application")] * 2
    assert collect(spark, pools.words) == expected
    orders, planes, plain = pools.orders, pools.planes, pools.plain  # as `from pools import orders` in `__main__`

    def by_value(rows):
        for _ in rows:
            yield orders.get(), planes.get(), plain.get().opened

    assert collect(spark, by_value) == expected
