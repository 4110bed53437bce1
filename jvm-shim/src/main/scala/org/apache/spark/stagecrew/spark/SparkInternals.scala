package org.apache.spark.stagecrew
package spark

import java.nio.file.Files
import java.nio.file.attribute.PosixFilePermissions
import java.util.Properties
import java.util.concurrent.TimeUnit
import scala.collection.mutable
import scala.util.matching.Regex
import org.apache.spark._
import org.apache.spark.api.java.JavaRDD
import org.apache.spark.api.python.PythonUtils
import org.apache.spark.internal.config
import org.apache.spark.network.shuffle.ExternalBlockStoreClient
import org.apache.spark.rdd.RDD
import org.apache.spark.scheduler._
import org.apache.spark.shuffle.IndexShuffleBlockResolver
import org.apache.spark.shuffle.api.ShuffleDataIO
import org.apache.spark.shuffle.sort.SortShuffleManager
import org.apache.spark.sql.classic.Dataset
import org.apache.spark.sql.execution.StagecrewPlans
import org.apache.spark.storage._
import org.apache.spark.util.{ShutdownHookManager, Utils}
import partitions._

/** An event of the plugin that is not written to event logs: core/scheduler/SparkListener.scala. */
private[stagecrew] trait NotLogged extends SparkListenerEvent {
  override def logEvent: Boolean = false
}

/**
 * The shim calls Spark's private API only here, and in `Rpc`, `SparkUi`, `StagecrewScheduler`, `StagecrewSql` and
 * `StagecrewPlans`. Each section names the Spark files (of 4.3) that it relies on. A new Spark version affects only
 * these files.
 */
private[stagecrew] object SparkInternals {

  // -- Tasks: core/TaskContext.scala

  def localProperties(task: TaskContext): Properties = task.getLocalProperties

  /** Prevents the body of the task from running: the attempt ends as killed, which is not a failure for Spark. */
  def markInterrupted(task: TaskContext, reason: String): Unit = task.markInterrupted(reason)

  /** The blocks of cached datasets that a task stored, with their sizes, or dropped (None):
    * core/executor/TaskMetrics.scala. */
  def updatedBlocks(task: TaskContext): Seq[(CachedBlock, Option[Long])] =
    if (task.taskMetrics() == null) Nil
    else task.taskMetrics().updatedBlockStatuses.collect { case (RDDBlockId(rdd, partition), status) =>
      CachedBlock(rdd, partition) -> Option.when(status.storageLevel.isValid)(status.memSize + status.diskSize)
    }

  /** The host of this JVM, as the BlockManager knows it. Empty before it is known: core/storage/BlockManager.scala. */
  def host: String = Option(SparkEnv.get).flatMap(env => Option(env.blockManager.blockManagerId)).fold("")(_.host)

  def isDriver(executor: String): Boolean = executor == SparkContext.DRIVER_IDENTIFIER

  // -- Stored partitions on an executor: core/shuffle/{IndexShuffleBlockResolver, ShuffleBlockResolver}.scala

  /** Deletes the files of a map task like core/shuffle/sort/SortShuffleManager.scala. Returns false if files are left,
    * because Spark only logs that it could not delete a file. */
  def deleteOutput(output: Output): Boolean = SparkVersion.resolver(SparkEnv.get) match {
    case Some(resolver: IndexShuffleBlockResolver) =>
      resolver.removeDataByMap(output.shuffle, output.attempt)
      val checksums = SparkEnv.get.conf.get(config.SHUFFLE_CHECKSUM_ALGORITHM)
      Seq(resolver.getDataFile(output.shuffle, output.attempt), resolver.getIndexFile(output.shuffle, output.attempt),
        resolver.getChecksumFile(output.shuffle, output.attempt, checksums)).forall(f => Files.notExists(f.toPath))
    case _ => false
  }

  /** Whether this executor stores a block of a cached dataset, or a file of it that Spark could not delete:
    * core/storage/BlockManager.scala. */
  def hasBlock(block: CachedBlock): Boolean = {
    val (manager, id) = (SparkEnv.get.blockManager, RDDBlockId(block.rdd, block.partition))
    manager.getStatus(id).nonEmpty || manager.diskBlockManager.containsBlock(id)
  }

  /** The outputs of these shuffles on this executor's disks. An output may lack its index or data file, if it was
    * deleted while it was received: core/storage/DiskBlockManager.scala. */
  def outputsOf(shuffles: Set[Int]): Seq[Output] = SparkEnv.get.blockManager.diskBlockManager.getAllBlocks().collect {
    case ShuffleIndexBlockId(shuffle, map, _) => Output(shuffle, map)
    case ShuffleDataBlockId(shuffle, map, _) => Output(shuffle, map)
  }.filter(output => shuffles(output.shuffle)).distinct

  /** Whether an executor is being decommissioned: core/scheduler/TaskSchedulerImpl.scala. */
  def isDecommissioned(sc: SparkContext, executor: String): Boolean =
    sc.taskScheduler.getExecutorDecommissionState(executor).nonEmpty

  /** Whether decommissioned executors send their outputs to others. */
  def migrates(conf: SparkConf): Boolean =
    conf.get(config.DECOMMISSION_ENABLED) && conf.get(config.STORAGE_DECOMMISSION_SHUFFLE_BLOCKS_ENABLED)

  /** Loads a ShuffleDataIO like core/shuffle/ShuffleDataIOUtils.scala. */
  def shuffleDataIO(name: String, conf: SparkConf): ShuffleDataIO =
    Utils.loadExtensions(classOf[ShuffleDataIO], Seq(name), conf).headOption.getOrElse(
      throw new IllegalArgumentException(s"$name is not a ShuffleDataIO"))

  // -- Stored partitions on the driver: core/MapOutputTracker.scala, storage/BlockManagerMasterEndpoint.scala

  def shuffleOf(stage: StageInfo): Option[Int] = stage.shuffleDepId
  def cachesOf(stage: StageInfo): Seq[Int] = stage.rddInfos.toSeq.filter(_.storageLevel != StorageLevel.NONE).map(_.id)

  /** Whether Spark's own shuffle manager writes shuffles through its ShuffleDataIO, in different files for each
    * attempt: core/shuffle/ShuffleManager.scala. */
  def sortsShuffles(conf: SparkConf): Boolean =
    SortShuffleManagers(conf.get(config.SHUFFLE_MANAGER)) && !usesOldFetch(conf)

  /** Whether map outputs are named by partition. A recomputed output then has the same name as the released one. */
  def usesOldFetch(conf: SparkConf): Boolean = conf.get(config.SHUFFLE_USE_OLD_FETCH_PROTOCOL)
  private val SortShuffleManagers = Set("sort", "tungsten-sort", classOf[SortShuffleManager].getName)

  /** Whether shuffles are written through Spark's ShuffleDataIO to the executors' disks: core/SparkContext.scala. */
  def tracksShuffles(sc: SparkContext): Boolean =
    sortsShuffles(sc.conf) && !sc.shuffleDriverComponents.supportsReliableStorage()

  private def tracker: MapOutputTrackerMaster = SparkEnv.get.mapOutputTracker.asInstanceOf[MapOutputTrackerMaster]

  def hasShuffle(shuffle: Int): Boolean = tracker.containsShuffle(shuffle)
  def hasOutputs(shuffle: Int): Boolean = tracker.shuffleStatuses.get(shuffle).exists(_.numAvailableMapOutputs > 0)
  def hasCache(sc: SparkContext, rdd: Int): Boolean = sc.persistentRdds.contains(rdd)

  /** Files of a lost executor that the external shuffle service of its host still stores. */
  final case class LeftBlocks(host: String, port: Int, executor: String, blocks: Seq[String])

  /** The executors that the BlockManagerMaster knows. Sends a message to it. */
  def executorsAlive(): Set[String] = SparkEnv.get.blockManager.master.getMemoryStatus.keySet.map(_.executorId).toSet

  /** Drops all outputs of a shuffle from the tracker. The shuffle remains registered, and its executors can become
    * idle. Returns the files of lost executors. */
  def dropOutputs(sc: SparkContext, shuffle: Int, alive: => Set[String]): Seq[LeftBlocks] =
    tracker.shuffleStatuses.get(shuffle).toSeq.flatMap { status =>
      val leftBlocks = if (!SparkEnv.get.blockManager.externalShuffleServiceEnabled) Nil else {
        val outputs = status.withMapStatuses(_.toSeq.filter(_ != null).map(s => s.location -> s.mapId))
        val lost = outputs.filterNot { case (location, _) => alive(location.executorId) }
        lost.groupMap(_._1)(_._2).toSeq.map { case (location, maps) =>
          LeftBlocks(location.host, location.port, location.executorId, maps.flatMap(filesOf(sc, shuffle, _)))
        }
      }
      tracker.unregisterAllMapAndMergeOutput(shuffle)
      sc.executorAllocationManager.foreach(_.executorMonitor.shuffleCleaned(shuffle))
      leftBlocks
    }

  private def filesOf(sc: SparkContext, shuffle: Int, map: Long): Seq[String] = Seq(
    ShuffleDataBlockId(shuffle, map, 0).name, ShuffleIndexBlockId(shuffle, map, 0).name,
    s"${ShuffleChecksumBlockId(shuffle, map, 0).name}.${sc.conf.get(config.SHUFFLE_CHECKSUM_ALGORITHM)}")

  /** Deletes files at an external shuffle service, and waits: network/shuffle/ExternalBlockStoreClient.java. */
  def deleteLeftBlocks(left: LeftBlocks, timeoutMs: Long): Unit = SparkEnv.get.blockManager.blockStoreClient match {
    case client: ExternalBlockStoreClient =>
      client.removeBlocks(left.host, left.port, left.executor, left.blocks.toArray)
        .get(timeoutMs, TimeUnit.MILLISECONDS)
    case _ => ()
  }

  /** Whether a cached dataset can be released. A local checkpoint cannot, because it has no lineage to recompute it. */
  def mayUncache(sc: SparkContext, rdd: Int): Boolean = sc.persistentRdds.get(rdd).exists(!_.isCheckpointed)

  /** Unpersists a cached dataset. If SQL's CacheManager has it, removes it there. */
  def uncache(sc: SparkContext, rdd: Int): Unit = sc.persistentRdds.get(rdd).foreach { cached =>
    if (missingFields.nonEmpty || !StagecrewPlans.uncache(rdd)) cached.unpersist(blocking = true)
  }

  /** The private fields that this Spark does not have. Without them, the datasets of a plan cannot be found. */
  lazy val missingFields: Seq[String] = StagecrewPlans.missing

  /** The shuffles and cached datasets of a Dataset or a JavaRDD. */
  def stored(sc: SparkContext, dataset: AnyRef): (Set[Int], Set[Int]) = {
    val found = dataset match {
      case dataset: Dataset[_] => StagecrewPlans.stored(dataset)
      case rdd: JavaRDD[_] => StagecrewPlans.Found(rdds = Seq(rdd.rdd))
      case rdd: RDD[_] => StagecrewPlans.Found(rdds = Seq(rdd))
      case other => throw new IllegalArgumentException(s"a ${other.getClass.getName} is not a dataset")
    }
    val seen = mutable.HashSet.empty[Int]
    val shuffles = mutable.HashSet.from(found.shuffles)
    val caches = mutable.HashSet.from(found.caches)
    var pending = found.rdds.toList
    while (pending.nonEmpty) {
      val rdd = pending.head
      pending = pending.tail
      if (seen.add(rdd.id)) {
        if (sc.persistentRdds.contains(rdd.id)) caches += rdd.id
        shuffles ++= rdd.dependencies.collect { case shuffle: ShuffleDependency[_, _, _] => shuffle.shuffleId }
        pending = rdd.dependencies.map(_.rdd).toList ::: pending
      }
    }
    (shuffles.toSet, caches.toSet)
  }

  /** Whether Spark removes idle executors. False while the SparkContext starts. */
  def removesIdleExecutors(sc: SparkContext): Boolean = sc.executorAllocationManager.nonEmpty

  /** Prevents Spark from removing an executor as idle while a topology closes there, as if it ran a task. Called in
    * the listener thread of core/scheduler/dynalloc/ExecutorMonitor.scala. */
  def pin(sc: SparkContext, executor: String, begins: Boolean): Unit = sc.executorAllocationManager.foreach { manager =>
    val task = new TaskInfo(-1L, -1, 0, -1, System.currentTimeMillis(), executor, "", TaskLocality.ANY, false)
    if (begins) manager.executorMonitor.onTaskStart(SparkListenerTaskStart(-1, 0, task))
    else manager.executorMonitor.onTaskEnd(SparkListenerTaskEnd(-1, 0, "", Success, task, null, null))
  }

  // -- The driver: core/SparkContext.scala, core/scheduler/LiveListenerBus.scala

  def conf(sc: SparkContext): SparkConf = sc.conf

  def slots(sc: SparkContext): Int = sc.maxNumConcurrentTasks(sc.resourceProfileManager.defaultResourceProfile)

  /** Adds a listener to the queue of executor management, which is always in use (HeartbeatReceiver.scala) and is fast.
    * With a separate queue, Spark would pass each start and end of a task to another thread. */
  def addListener(sc: SparkContext, listener: SparkListener): Unit = sc.listenerBus.addToManagementQueue(listener)

  def post(sc: SparkContext, event: SparkListenerEvent): Unit = sc.listenerBus.post(event)

  /** In local mode the master URL sets the limit, not the configuration: core/scheduler/TaskSchedulerImpl.scala. */
  def maxTaskFailures(sc: SparkContext): Int = sc.taskScheduler match {
    case scheduler: TaskSchedulerImpl => scheduler.maxTaskFailures
    case _ => sc.conf.getInt("spark.task.maxFailures", 4)
  }

  // -- Processes: core/util/ShutdownHookManager.scala, core/api/python/PythonUtils.scala, core/util/Utils.scala

  /** Adds a shutdown hook that runs before Spark's own hooks stop the SparkContext (priority 50) and delete folders
    * (25). The driver's hook runs before the hook of core/executor/Executor.scala (100), which ends the plugin of the
    * executor: with a local master, the executor must still reply to the driver. */
  def addShutdownHook(driver: Boolean)(hook: () => Unit): AnyRef = ShutdownHookManager.addShutdownHook(
    10 + (if (driver) ShutdownHookManager.DEFAULT_SHUTDOWN_PRIORITY
      else ShutdownHookManager.SPARK_CONTEXT_SHUTDOWN_PRIORITY))(hook)

  def removeShutdownHook(hook: AnyRef): Unit =
    if (!ShutdownHookManager.inShutdown()) ShutdownHookManager.removeShutdownHook(hook)

  def pythonPath(paths: String*): String = PythonUtils.mergePythonPaths(PythonUtils.sparkPythonPath +: paths: _*)

  /** A folder that only this user can read. It is deleted when this JVM ends. */
  def temporaryFolder(conf: SparkConf): java.io.File = {
    val folder = Utils.createTempDir(Utils.getLocalDir(conf), "stagecrew")
    Files.setPosixFilePermissions(folder.toPath, PosixFilePermissions.fromString("rwx------"))
    folder
  }

  def delete(folder: java.io.File): Unit = Utils.deleteRecursively(folder)

  def redactionPattern(conf: SparkConf): Regex = conf.get(config.SECRET_REDACTION_PATTERN)
}
