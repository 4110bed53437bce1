package org.apache.spark.stagecrew
package partitions

import java.util.concurrent.ConcurrentHashMap
import scala.collection.immutable.VectorMap
import scala.collection.mutable
import scala.util.Try
import org.apache.spark.SparkContext
import org.apache.spark.scheduler.StagecrewScheduler
import spark._, wire._

/**
 * Records on the driver which topologies use which shuffles and cached datasets, and decides which of these the end of
 * a topology releases. Used by the driver's loop only, except `keep` and `findKept`.
 *
 * Shuffles are never unregistered, because unregistering a shuffle aborts the jobs that use it. The driver drops the
 * outputs from the MapOutputTracker before executors delete the files. A job that needs the outputs again recomputes
 * them.
 */
private[stagecrew] final class DriverPartitions(sc: SparkContext) {
  import DriverPartitions._

  // False if shuffle outputs are not written through our ShuffleDataIO to executors' disks. They are then not released.
  private lazy val tracked = SparkInternals.tracksShuffles(sc)
  private val shuffles = new DatasetUsage
  private val caches = new DatasetUsage
  private val datasets = new ConcurrentHashMap[String, List[AnyRef]]() // topology -> the datasets to keep
  /** Per topology, the shuffles and caches of these datasets; None if they could not be found. */
  private val kept = new ConcurrentHashMap[String, Option[(Set[Int], Set[Int])]]()
  /** Whether decommissioned executors send their outputs to other executors. */
  val migrates: Boolean = SparkInternals.migrates(SparkInternals.conf(sc))
  private val stale = mutable.HashMap.empty[Int, Long] // released shuffle -> `Release.before`, if executors migrate

  /** A job of this topology uses these datasets. */
  def used(topology: String, shuffled: Iterable[Int], cached: Iterable[Int]): Unit = {
    if (tracked) shuffles.use(topology, shuffled)
    caches.use(topology, cached)
  }

  /** Requests that the partitions of a dataset are kept when the topology ends. */
  def keep(topology: String, dataset: AnyRef): Unit = {
    problems.foreach(text => throw new UnsupportedOperationException(text))
    datasets.merge(topology, List(dataset), (a, b) => b ++ a)
  }

  /** What does not work with this Spark. */
  val problems: Seq[String] = if (SparkInternals.missingFields.isEmpty) Nil else Seq(
    s"stagecrew ${Shim.version} cannot keep datasets with Spark ${sc.version}, which lacks " +
      s"${SparkInternals.missingFields.mkString(", ")}: use another Spark or stagecrew")

  /** Finds the stored partitions of the datasets that these topologies keep. Not called in the loop, because the search
    * can take a long time in large plans. */
  def findKept(topologies: Iterable[String]): Unit = topologies.foreach { topology =>
    Option(datasets.get(topology)).foreach { toKeep =>
      val found = Try(toKeep.map(SparkInternals.stored(sc, _)))
      found.failed.foreach(error => Log.log.warn("could not find the stored partitions of a kept dataset, so all " +
        s"partitions of topology $topology are kept", error))
      kept.put(topology, found.toOption.map(all => (all.flatMap(_._1).toSet, all.flatMap(_._2).toSet)))
      if (!datasets.containsKey(topology)) kept.remove(topology) // the topology has ended in the meantime
    }
  }

  /** Ends a topology inside the `outer` topologies. All attempts with ids below `before` had begun when the usage of
    * datasets was read. Returns the partitions that executors must release, and the cached datasets that the driver
    * must release. */
  def end(topology: String, givenPolicy: String, outer: Seq[String], before: Long): (Release, Seq[Int]) = {
    datasets.remove(topology)
    val keptHere = Option(kept.remove(topology))
    keptHere.flatten.foreach { case (shuffled, cached) => used(Description.Application, shuffled, cached) }
    val keptOutside = outer.flatMap(id => Option(kept.get(id)).map(id -> _))
    keptOutside.foreach { case (id, found) => found.foreach { case (shuffled, cached) => used(id, shuffled, cached) } }
    // If it is unknown what must be kept, everything is.
    val policy = if (keptHere.contains(None) || keptOutside.exists(_._2.isEmpty)) KeepsAll else givenPolicy
    val (exclusive, heirs) = shuffles.end(topology)
    val (exclusiveCaches, cacheHeirs) = caches.end(topology)
    // Kept datasets belong to the application: the end of a topology that only reads them does not release them.
    if (policy == KeepsAll) used(Description.Application, exclusive ++ heirs.keys, cacheHeirs.keys)
    if (policy != ReleasesAll) caches.use(Description.Application, exclusiveCaches)
    val released = if (policy == KeepsAll) Nil else exclusive
    if (migrates) stale ++= released.map(_ -> before)
    val release = Release(policy != KeepsAll, policy == ReleasesAll, before, released.toVector,
      cacheHeirs.keys.toVector, heirs.to(VectorMap))
    release -> (if (policy == ReleasesAll) exclusiveCaches else Nil)
  }

  /** Drops outputs of shuffles from the tracker. Returns the files of lost executors that their external shuffle
    * service still stores. */
  def drop(shuffles: Iterable[Int]): Seq[SparkInternals.LeftBlocks] = if (!tracked) Nil else {
    lazy val alive = SparkInternals.executorsAlive()
    shuffles.toSeq.flatMap { shuffle =>
      // Spark's ContextCleaner may remove it at the same time.
      try SparkInternals.dropOutputs(sc, shuffle, alive) catch {
        case Failure(error) =>
          Log.log.debug(s"the outputs of shuffle $shuffle could not be dropped from the tracker", error)
          Nil
      }
    }
  }

  /** Whether no topology uses a cached dataset. */
  def unused(cache: Int): Boolean = caches.heir(cache).isEmpty

  /**
   * Reconciles the driver's state with the inventory that an executor reported. Returns the reply to the executor, and
   * the files of lost executors that must be deleted.
   *
   * @param leaving whether some executors are being decommissioned. They may still send outputs of released shuffles,
   * which then return to the tracker and must be deleted again
   * @param claim records the shuffles of running jobs. It is called before the driver decides that a shuffle is unused
   */
  def inventory(
      reported: Inventory, leaving: Boolean, stateOf: String => String,
      claim: () => Unit): (Orphans, Seq[SparkInternals.LeftBlocks]) = {
    lazy val before = {
      val next = StagecrewScheduler.nextTaskAttempt(sc)
      claim()
      next
    }
    // `before` is evaluated first, which records the shuffles of running jobs.
    def isUnused(shuffle: Int): Boolean = before >= 0 && shuffles.heir(shuffle).isEmpty
    val leftBlocks = mutable.ArrayBuffer.empty[SparkInternals.LeftBlocks]
    var ended = VectorMap.empty[String, Release]
    val goneShuffles, goneCaches, unclaimed = mutable.LinkedHashSet.empty[Int]
    reported.topologies.foreach { case (topology, Datasets(shuffled, cached)) =>
      goneShuffles ++= shuffled.filterNot(SparkInternals.hasShuffle)
      goneCaches ++= cached.filterNot(SparkInternals.hasCache(sc, _))
      val state = stateOf(topology)
      if (topology == Description.Application) unclaimed ++= shuffled.filter(isUnused)
      else if (state == "active") used(topology, shuffled.filterNot(goneShuffles), cached.filterNot(goneCaches))
      else if (state == "closed") {
        val (exclusive, shared) = shuffled.filterNot(goneShuffles).partition(isUnused)
        val heirs = shared.map(shuffle => shuffle -> shuffles.heir(shuffle).get).to(VectorMap)
        if (migrates) stale ++= exclusive.map(_ -> before)
        ended += topology -> Release(deleteOutputs = true, before = before, shuffles = exclusive, heirs = heirs)
        leftBlocks ++= drop(exclusive)
      }
    }
    leftBlocks ++= drop(unclaimed)
    if (migrates) stale ++= unclaimed.map(_ -> before)
    val late = if (leaving) stale.filter { case (shuffle, _) => isUnused(shuffle) } else Map.empty[Int, Long]
    // A partly received output is not in the tracker, but Spark counts it as stored on the executor. Hence the executor
    // reports its shuffle in `found`.
    leftBlocks ++= drop(late.keySet.filter(SparkInternals.hasOutputs) ++ reported.found.filter(isUnused))
    (Orphans(ended, Datasets(goneShuffles.toVector, goneCaches.toVector), unclaimed.toVector,
      late.map { case (shuffle, before) => StaleShuffle(shuffle, before) }.toVector), leftBlocks.toSeq)
  }

  /** Forgets datasets that Spark has deleted. */
  def prune(): Unit = {
    shuffles.prune(SparkInternals.hasShuffle)
    caches.prune(SparkInternals.hasCache(sc, _))
    stale.filterInPlace((shuffle, _) => SparkInternals.hasShuffle(shuffle))
  }
}

private[stagecrew] object DriverPartitions {
  val ReleasesShuffles = "shuffles"
  val ReleasesAll = "all"
  val KeepsAll = "none"
}

// Messages between the driver and its executors.

/** Shuffles and cached datasets, by Spark's ids. */
final case class Datasets(shuffles: Vector[Int], caches: Vector[Int])

/** The stored datasets of each topology on an executor. `found` are the shuffles whose stale outputs the executor has
  * found and deleted. */
final case class Inventory(topologies: VectorMap[String, Datasets], found: Vector[Int])

/** A released shuffle. No topology uses the outputs of attempts with ids below `before`. */
final case class StaleShuffle(shuffle: Int, before: Long)

/**
 * The reply to an inventory.
 *
 * @param ended ended topologies that still have partitions on the executor, which it must close and release
 * @param gone datasets that Spark has deleted, which the executor must forget
 * @param unclaimed shuffles of the application that no topology uses: the executor must delete their outputs
 * @param stale shuffles whose outputs may have returned from a decommissioned executor: they must be deleted again
 */
final case class Orphans(
    ended: VectorMap[String, Release], gone: Datasets, unclaimed: Vector[Int], stale: Vector[StaleShuffle])

/**
 * What an executor does with the partitions of a topology when the topology ends.
 *
 * @param deleteOutputs whether to delete the topology's outputs of shuffles without an heir
 * @param deleteBlocks whether to delete the topology's cached blocks, except those of `keptCaches`
 * @param before all attempts with ids below this one had begun when the driver decided. See `StaleShuffle`
 * @param shuffles shuffles that no topology uses any more. Outputs of them that are recorded for the application are
 * deleted too
 * @param keptCaches cached datasets that other topologies use
 * @param heirs for each shuffle that other topologies use, one of them: the outputs pass to it. If the heir is the
 * application, Spark manages the outputs
 */
final case class Release(
    deleteOutputs: Boolean = false, deleteBlocks: Boolean = false, before: Long = 0,
    shuffles: Vector[Int] = Vector.empty, keptCaches: Vector[Int] = Vector.empty,
    heirs: VectorMap[Int, String] = VectorMap.empty)
