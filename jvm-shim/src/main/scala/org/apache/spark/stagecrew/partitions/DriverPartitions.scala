package org.apache.spark.stagecrew
package partitions

import java.util.concurrent.ConcurrentHashMap
import scala.collection.immutable.VectorMap
import scala.collection.mutable
import org.apache.spark.SparkContext
import org.apache.spark.scheduler.StagecrewScheduler
import spark._, wire._

/**
 * The bookkeeping on the driver: which topologies use which shuffles and cached datasets, and which of these are
 * released at the end of a topology. Used by the driver's loop, except `keep` and `findKept`.
 *
 * Shuffles are never unregistered, because that aborts the jobs that run on them. The driver drops their outputs from
 * the MapOutputTracker before executors delete the files. A job that needs them again recomputes them.
 */
private[stagecrew] final class DriverPartitions(sc: SparkContext) {
  import DriverPartitions._

  // False if Spark's own ShuffleDataIO does not store the outputs: they are not released then.
  private lazy val tracked = SparkInternals.tracksShuffles(sc)
  private val shuffles = new DatasetUsage
  private val caches = new DatasetUsage
  private val datasets = new ConcurrentHashMap[String, List[AnyRef]]() // topology -> the datasets to keep
  private val kept = new ConcurrentHashMap[String, (Set[Int], Set[Int])]()
  private val migrates = SparkInternals.migrates(SparkInternals.conf(sc))
  private val stale = mutable.HashMap.empty[Int, Long] // released shuffles: older attempts' outputs are unused

  /** A job of this topology needs these datasets. */
  def used(topology: String, shuffled: Iterable[Int], cached: Iterable[Int]): Unit = {
    if (tracked) shuffles.use(topology, shuffled)
    caches.use(topology, cached)
  }

  /** Keeps a dataset's partitions when the topology ends. */
  def keep(topology: String, dataset: AnyRef): Unit = datasets.merge(topology, List(dataset), (a, b) => b ++ a)

  /** Finds the stored partitions of the datasets that these topologies keep. Not called in the loop, because it can
    * take long for large plans. */
  def findKept(topologies: Iterable[String]): Unit = topologies.foreach { topology =>
    Option(datasets.get(topology)).foreach { toKeep =>
      var shuffled, cached = Set.empty[Int]
      toKeep.foreach(dataset => Log.contained("finding the stored partitions of a kept dataset") {
        val (itsShuffles, itsCaches) = SparkInternals.stored(sc, dataset)
        shuffled ++= itsShuffles
        cached ++= itsCaches
      })
      kept.put(topology, (shuffled, cached))
      if (!datasets.containsKey(topology)) kept.remove(topology) // the topology has ended in the meantime
    }
  }

  /** Ends a topology inside the `outer` ones: drops the shuffles that no other topology uses from the tracker. All
    * attempts `before` this id had begun when the usage of datasets was read. Returns what executors must release. */
  def end(topology: String, policy: String, outer: Seq[String], before: Long): Released = {
    datasets.remove(topology)
    Option(kept.remove(topology)).foreach { case (shuffled, cached) => used(Description.Application, shuffled, cached) }
    outer.foreach(id => Option(kept.get(id)).foreach { case (shuffled, cached) => used(id, shuffled, cached) })
    val (exclusive, heirs) = shuffles.end(topology)
    val (exclusiveCaches, cacheHeirs) = caches.end(topology)
    // Kept datasets belong to the application: the end of a topology that only reads them does not release them.
    if (policy == KeepsAll) shuffles.use(Description.Application, exclusive ++ heirs.keys)
    if (policy == KeepsAll) caches.use(Description.Application, cacheHeirs.keys)
    if (policy != ReleasesAll) caches.use(Description.Application, exclusiveCaches)
    val released = if (policy == KeepsAll) Nil else exclusive
    if (migrates) stale ++= released.map(_ -> before)
    val release = Release(
      policy != KeepsAll, policy == ReleasesAll, before, released.toVector, cacheHeirs.keys.toVector,
      heirs.map { case (shuffle, heir) => shuffle.toString -> heir }.to(VectorMap))
    Released(release, if (policy == ReleasesAll) exclusiveCaches else Nil, drop(released))
  }

  /** Drops outputs from the tracker. Returns the files of lost executors. */
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
   * Reconciles the driver's state with the inventory that an executor reported. Returns the partitions that the
   * executor must delete (of ended topologies, and of datasets that Spark has deleted), and the files of lost
   * executors. `leaving` says that some executors are being decommissioned. They may still send outputs of released
   * shuffles, which then return to the tracker and must be deleted again. `claim` finds the shuffles of running jobs.
   * It is called before anything is deleted.
   */
  def inventory(
      reported: Inventory, leaving: Boolean, stateOf: String => String,
      claim: () => Unit): (Orphans, Seq[SparkInternals.LeftBlocks]) = {
    lazy val before = {
      val next = StagecrewScheduler.nextAttempt(sc)
      claim()
      next
    }
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
        val heirs = shared.map(shuffle => shuffle.toString -> shuffles.heir(shuffle).get)
        if (migrates) stale ++= exclusive.map(_ -> before)
        ended += topology -> Release(true, blocks = false, before, exclusive, Vector.empty, heirs.to(VectorMap))
        leftBlocks ++= drop(exclusive)
      }
    }
    leftBlocks ++= drop(unclaimed)
    if (migrates) stale ++= unclaimed.map(_ -> before)
    val late = if (leaving) stale.filter { case (shuffle, _) => isUnused(shuffle) } else Map.empty[Int, Long]
    // A partly received output is not in the tracker, but Spark counts it as stored on the executor.
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

  /** The partitions that are released at the end of a topology. `leftBlocks` are files of lost executors that their
    * external shuffle service still stores. */
  final case class Released(release: Release, caches: Seq[Int], leftBlocks: Seq[SparkInternals.LeftBlocks])
  val NothingReleased: Released =
    Released(Release(false, false, 0, Vector.empty, Vector.empty, VectorMap.empty), Nil, Nil)
}

// Messages between the driver and its executors.

/** Shuffles and cached datasets, by Spark's ids. */
final case class Datasets(shuffles: Vector[Int], caches: Vector[Int])

/** The stored datasets of each topology on an executor, and the shuffles of which it `found` and deleted
  * stale outputs. */
final case class Inventory(topologies: VectorMap[String, Datasets], found: Vector[Int])

/** A released shuffle. The outputs of attempts with ids below `before` are unused. */
final case class StaleShuffle(shuffle: Int, before: Long)

/** The reply to an inventory: the partitions that the executor must delete, and the datasets that Spark has deleted
  * (`gone`). */
final case class Orphans(
    ended: VectorMap[String, Release], gone: Datasets, unclaimed: Vector[Int], stale: Vector[StaleShuffle])

/** The partitions that an executor releases at the end of a topology: the outputs of `shuffles` from attempts with ids
  * below `before`. The outputs of other shuffles pass to their heirs. */
final case class Release(
    outputs: Boolean, blocks: Boolean, before: Long, shuffles: Vector[Int], keptCaches: Vector[Int],
    heirs: VectorMap[String, String]) {
  def ending: Ending = Ending(outputs, blocks, heirs.map { case (shuffle, heir) =>
    shuffle.toInt -> Some(heir).filterNot(_ == Description.Application)
  }, keptCaches.toSet, shuffles.toSet)
}
