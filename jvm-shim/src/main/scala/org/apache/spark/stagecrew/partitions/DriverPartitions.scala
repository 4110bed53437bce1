package org.apache.spark.stagecrew
package partitions

import java.util.concurrent.ConcurrentHashMap
import scala.collection.immutable.VectorMap
import scala.collection.mutable
import org.apache.spark.SparkContext
import org.apache.spark.scheduler.StagecrewScheduler
import spark._, wire._

/**
 * The driver's part of the bookkeeping: which topologies use which shuffles and cached datasets, and which of these the
 * end of a topology releases. Used by the driver's loop, except `keep` and `lookForKept`.
 *
 * Shuffles are never unregistered, because that aborts a job that runs on them. Their outputs are dropped from the
 * tracker before executors delete the files. A job that needs them again recomputes them.
 */
private[stagecrew] final class DriverPartitions(sc: SparkContext) {
  import DriverPartitions._

  // Outputs that Spark's own ShuffleDataIO does not store are not touched.
  private lazy val tracked = SparkInternals.tracksShuffles(sc)
  private val shuffles = new DatasetUsage
  private val caches = new DatasetUsage
  private val datasets = new ConcurrentHashMap[String, List[AnyRef]]() // topology -> the datasets to keep
  private val kept = new ConcurrentHashMap[String, (Set[Int], Set[Int])]()
  private val migrates = SparkInternals.migrates(SparkInternals.conf(sc))
  private val stale = mutable.HashMap.empty[Int, Long] // released shuffles: nobody needs outputs of earlier attempts

  /** A job of this topology needs these datasets. */
  def used(topology: String, shuffled: Iterable[Int], cached: Iterable[Int]): Unit = {
    if (tracked) shuffles.use(topology, shuffled)
    caches.use(topology, cached)
  }

  /** Keeps a dataset's partitions when the topology ends. */
  def keep(topology: String, dataset: AnyRef): Unit = datasets.merge(topology, List(dataset), (a, b) => b ++ a)

  /** Finds the stored partitions of the datasets that these topologies keep. Their plans may be large, so the loop does
    * not do it. */
  def lookForKept(topologies: Iterable[String]): Unit = topologies.foreach { topology =>
    Option(datasets.get(topology)).foreach { ones =>
      var shuffled, cached = Set.empty[Int]
      ones.foreach(one => Log.contained("finding the stored partitions of a kept dataset") {
        val (itsShuffles, itsCaches) = SparkInternals.stored(sc, one)
        shuffled ++= itsShuffles
        cached ++= itsCaches
      })
      kept.put(topology, (shuffled, cached))
      if (!datasets.containsKey(topology)) kept.remove(topology) // the topology has ended meanwhile
    }
  }

  /** A topology inside these topologies ends: shuffles that no other topology uses are dropped from the tracker. The
    * use of datasets was found out after all attempts `before` this one had begun. Returns what executors must
    * release. */
  def end(topology: String, policy: String, around: Seq[String], before: Long): Released = {
    datasets.remove(topology)
    Option(kept.remove(topology)).foreach { case (shuffled, cached) => used(Description.Application, shuffled, cached) }
    around.foreach(outer => Option(kept.get(outer)).foreach { case (shuffled, cached) =>
      used(outer, shuffled, cached) })
    val (alone, heirs) = shuffles.end(topology)
    val (aloneCaches, cacheHeirs) = caches.end(topology)
    // Kept datasets belong to the application: the end of a topology that only reads them does not release them.
    if (policy == KeepsAll) shuffles.use(Description.Application, alone ++ heirs.keys)
    if (policy == KeepsAll) caches.use(Description.Application, cacheHeirs.keys)
    if (policy != ReleasesAll) caches.use(Description.Application, aloneCaches)
    val released = if (policy == KeepsAll) Nil else alone
    if (migrates) stale ++= released.map(_ -> before)
    val release = Release(
      policy != KeepsAll, policy == ReleasesAll, before, released.toVector, cacheHeirs.keys.toVector,
      heirs.map { case (shuffle, heir) => shuffle.toString -> heir }.to(VectorMap))
    Released(release, if (policy == ReleasesAll) aloneCaches else Nil, drop(released))
  }

  /** Drops outputs from the tracker. Returns the files of lost executors. */
  def drop(shuffles: Iterable[Int]): Seq[SparkInternals.LeftBlocks] = if (!tracked) Nil else {
    lazy val alive = SparkInternals.executorsAlive()
    shuffles.toSeq.flatMap { shuffle =>
      // Spark's own cleaner may remove it at the same time.
      try SparkInternals.dropOutputs(sc, shuffle, alive) catch {
        case Failure(error) =>
          Log.log.debug(s"the outputs of shuffle $shuffle could not be dropped from the tracker", error)
          Nil
      }
    }
  }

  /** Whether nobody uses a cached dataset now. */
  def unused(cache: Int): Boolean = caches.heir(cache).isEmpty

  /**
   * Takes over an executor's inventory. Returns the partitions that the executor must delete (those of ended
   * topologies, and of datasets that Spark has deleted), and the files that lost executors left. While executors leave
   * (`leaving`), this includes outputs that they still send of released shuffles, because these return into the
   * tracker. `claim` finds the shuffles of running jobs; it is called before anything is deleted.
   */
  def inventory(
      told: Inventory, leaving: Boolean, stateOf: String => String,
      claim: () => Unit): (Orphans, Seq[SparkInternals.LeftBlocks]) = {
    lazy val before = {
      val next = StagecrewScheduler.nextAttempt(sc)
      claim()
      next
    }
    def free(shuffle: Int): Boolean = before >= 0 && shuffles.heir(shuffle).isEmpty
    val left = mutable.ArrayBuffer.empty[SparkInternals.LeftBlocks]
    var ended = VectorMap.empty[String, Release]
    val goneShuffles, goneCaches, unclaimed = mutable.LinkedHashSet.empty[Int]
    told.topologies.foreach { case (topology, Datasets(shuffled, cached)) =>
      goneShuffles ++= shuffled.filterNot(SparkInternals.hasShuffle)
      goneCaches ++= cached.filterNot(SparkInternals.hasCache(sc, _))
      val state = stateOf(topology)
      if (topology == Description.Application) unclaimed ++= shuffled.filter(free)
      else if (state == "active") used(topology, shuffled.filterNot(goneShuffles), cached.filterNot(goneCaches))
      else if (state == "closed") {
        val (alone, passed) = shuffled.filterNot(goneShuffles).partition(free)
        val heirs = passed.map(shuffle => shuffle.toString -> shuffles.heir(shuffle).get)
        if (migrates) stale ++= alone.map(_ -> before)
        ended += topology -> Release(outputs = true, blocks = false, before, alone, Vector.empty, heirs.to(VectorMap))
        left ++= drop(alone)
      }
    }
    left ++= drop(unclaimed)
    if (migrates) stale ++= unclaimed.map(_ -> before)
    val late = if (leaving) stale.filter { case (shuffle, _) => free(shuffle) } else Map.empty[Int, Long]
    // An output that arrived in part is in no tracker, but Spark counts it as stored on its executor.
    left ++= drop(late.keySet.filter(SparkInternals.hasOutputs) ++ told.found.filter(free))
    (Orphans(ended, Datasets(goneShuffles.toVector, goneCaches.toVector), unclaimed.toVector,
      late.map { case (shuffle, before) => StaleShuffle(shuffle, before) }.toVector), left.toSeq)
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

  /** The partitions that the end of a topology releases. `left` are files that lost executors left with an external
    * shuffle service. */
  final case class Released(release: Release, caches: Seq[Int], left: Seq[SparkInternals.LeftBlocks])
  val NothingReleased: Released =
    Released(Release(false, false, 0, Vector.empty, Vector.empty, VectorMap.empty), Nil, Nil)
}

// Messages between the driver and its executors.

/** Shuffles and cached datasets, by Spark's ids. */
final case class Datasets(shuffles: Vector[Int], caches: Vector[Int])

/** What an executor stores of each topology, and the shuffles of which it found stale outputs. */
final case class Inventory(topologies: VectorMap[String, Datasets], found: Vector[Int])

/** A released shuffle: nobody needs the outputs of attempts before this one. */
final case class StaleShuffle(shuffle: Int, before: Long)

/** The reply to an inventory: the partitions that the executor must delete. */
final case class Orphans(
    ended: VectorMap[String, Release], gone: Datasets, unclaimed: Vector[Int], stale: Vector[StaleShuffle])

/** What an executor releases when a topology ends: of `shuffles` the outputs of attempts before this one. Outputs of
  * other shuffles pass to their heirs. */
final case class Release(
    outputs: Boolean, blocks: Boolean, before: Long, shuffles: Vector[Int], keptCaches: Vector[Int],
    heirs: VectorMap[String, String]) {
  def ending: Ending = Ending(outputs, blocks, heirs.map { case (shuffle, heir) =>
    shuffle.toInt -> Some(heir).filterNot(_ == Description.Application)
  }, keptCaches.toSet, shuffles.toSet)
}
