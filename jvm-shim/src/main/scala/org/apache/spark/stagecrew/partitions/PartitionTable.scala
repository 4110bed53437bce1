package org.apache.spark.stagecrew
package partitions

import scala.collection.mutable
import executor._, wire._

/** The shuffle output of one map task. `map` is the id of the attempt that wrote it. */
final case class Output(shuffle: Int, map: Long)

/** One block of a cached dataset. */
final case class CachedBlock(rdd: Int, partition: Int)

/**
 * The partitions that an executor releases at the end of a topology. A shuffle that other topologies use passes to one
 * of them, its heir. The heir None is the application: Spark manages its partitions. Other outputs are deleted if
 * `outputs` is set. Cached blocks are deleted if `blocks` is set, except those of `keptCaches`, which other topologies
 * use. No topology uses the `unclaimed` shuffles: their outputs that are booked under the application are deleted too.
 */
final case class Ending(
    outputs: Boolean, blocks: Boolean = false, heirs: Map[Int, Option[String]] = Map.empty,
    keptCaches: Set[Int] = Set.empty, unclaimed: Set[Int] = Set.empty)

/** Partitions of a topology that must be deleted, with their sizes. The driver unpersists the cached datasets. */
final case class Deletions(outputs: Map[Output, Long] = Map.empty, blocks: Map[CachedBlock, Long] = Map.empty) {
  def caches: Set[Int] = blocks.keySet.map(_.rdd)
}

/**
 * The stored partitions of each topology on one executor: a pure state machine, without Spark, files or a clock.
 *
 * {{{
 *   set up --finished--> finished --end--> (passes to an heir immediately, if there is one) --release--> deleted
 *      \--failed, or its attempt has ended--> forgotten
 *      \--finished, but its topology has ended--> passes to an heir, or the task's thread deletes it
 * }}}
 *
 * Only its own task ends a partition in progress. Counts are derived from sets of live partitions. The time of an
 * operation does not depend on the number of stored partitions. Unknown ids are ignored. Thread-safe.
 *
 * It follows Flink's TaskExecutorPartitionTracker and PartitionTable, but its keys are topologies. The end of an
 * attempt is the signal for an unfinished output, because SortShuffleWriter never calls abort.
 */
final class PartitionTable {
  private final class Outputs {
    val maps = mutable.HashMap.empty[Long, Long]
    var bytes = 0L
  }
  private final class Holding {
    val shuffles = mutable.HashMap.empty[Int, Outputs]
    val blocks = mutable.HashMap.empty[CachedBlock, Long]
    var outputs, outputBytes, blockBytes = 0L
    def isEmpty: Boolean = shuffles.isEmpty && blocks.isEmpty

    def remove(shuffle: Int): Option[Outputs] = shuffles.remove(shuffle).map { found =>
      outputs -= found.maps.size
      outputBytes -= found.bytes
      found
    }

    def add(output: Output, bytes: Long): Unit = {
      val of = shuffles.getOrElseUpdate(output.shuffle, new Outputs)
      val before = of.maps.put(output.map, bytes)
      if (before.isEmpty) outputs += 1
      of.bytes += bytes - before.getOrElse(0L)
      outputBytes += bytes - before.getOrElse(0L)
    }
  }
  private final class Attempt(val owner: String) {
    val outputs = mutable.HashSet.empty[Output]
  }

  private val holdings = mutable.HashMap.empty[String, Holding]
  private val attempts = mutable.HashMap.empty[Long, Attempt] // only those with outputs in progress
  private val endings = mutable.HashMap.empty[String, Ending]
  private val changedTopologies = mutable.HashSet.empty[String]
  private var driverIsLost = false

  /** An attempt of this topology begins to write an output. */
  def setUp(attempt: Long, owner: String, output: Output): Unit = synchronized {
    attempts.getOrElseUpdate(attempt, new Attempt(owner)).outputs += output
    changedTopologies += owner
  }

  /** The output is written. Returns its topology if the caller must delete the output: the topology has ended, and no
    * other topology uses the output. */
  def finished(attempt: Long, output: Output, bytes: Long): Option[String] = synchronized {
    remove(attempt, output).flatMap { owner =>
      val ending = if (driverIsLost) Some(Ending(outputs = true)) else endings.get(owner)
      ending match {
        case None => add(owner, output, bytes); None
        case Some(end) => end.heirs.get(output.shuffle) match {
          case Some(heir) => heir.foreach(add(_, output, bytes)); None
          case None => if (end.outputs) Some(owner) else None
        }
      }
    }
  }

  /** The attempt failed to write the output. */
  def failed(attempt: Long, output: Output): Unit = synchronized { remove(attempt, output); () }

  /** The attempt has ended: its unfinished outputs are forgotten. */
  def attemptEnded(attempt: Long): Unit = synchronized {
    attempts.remove(attempt).foreach(gone => changedTopologies += gone.owner)
  }

  /** An attempt stored a block, or dropped it (`None`). */
  def block(owner: String, block: CachedBlock, bytes: Option[Long]): Unit = synchronized {
    bytes match {
      case Some(size) if !endings.contains(owner) && !driverIsLost =>
        val holding = holdings.getOrElseUpdate(owner, new Holding)
        holding.blockBytes += size - holding.blocks.put(block, size).getOrElse(0L)
        changedTopologies += owner
      case Some(_) => ()
      case None => holdings.foreach { case (topology, holding) =>
        holding.blocks.remove(block).foreach { size =>
          holding.blockBytes -= size
          changedTopologies += topology
        }
      }
        prune()
    }
  }

  /** The topology has ended. Outputs of shuffles that other topologies use pass to these, even if they finish later.
    * Other outputs that finish later are deleted immediately. */
  def end(topology: String, ending: Ending): Unit = synchronized {
    if (!endings.contains(topology)) {
      // If the heir itself has ended, or ends later, its own heir gets the shuffle.
      val heirs = ending.heirs.flatMap { case (shuffle, heir) => successor(heir, shuffle).map(shuffle -> _) }
      endings(topology) = ending.copy(heirs = heirs)
      endings.mapValuesInPlace((_, other) =>
        if (!other.heirs.valuesIterator.contains(Some(topology))) other else other.copy(
        heirs = other.heirs.flatMap { case (shuffle, heir) => successor(heir, shuffle).map(shuffle -> _) }))
      heirs.foreach { case (shuffle, heir) => holdings.get(topology).foreach(move(_, shuffle, heir)) }
      ending.unclaimed.foreach(shuffle =>
        holdings.get(Description.Application).foreach(move(_, shuffle, Some(topology))))
      changedTopologies += topology
      prune()
    }
  }

  /** Follows heirs that have ended to one that has not. None if an ended heir released the shuffle. */
  private def successor(heir: Option[String], shuffle: Int): Option[Option[String]] = heir.flatMap(endings.get) match {
    case None => Some(heir)
    case Some(ended) => ended.heirs.get(shuffle).orElse(if (ended.outputs) None else Some(None))
  }

  private def move(from: Holding, shuffle: Int, heir: Option[String]): Unit = from.remove(shuffle).foreach { moved =>
    heir.foreach(to => moved.maps.foreach { case (map, bytes) => add(to, Output(shuffle, map), bytes) })
  }

  /** No topology uses these shuffles: removes and returns the outputs that are booked under the application. */
  def unclaimed(shuffles: Iterable[Int]): Deletions = synchronized {
    holdings.get(Description.Application) match {
      case None => Deletions()
      case Some(holding) =>
        changedTopologies += Description.Application
        val outputs = shuffles.toSeq.flatMap(shuffle => holding.remove(shuffle).toSeq.flatMap(written(shuffle, _)))
        prune()
        Deletions(outputs.toMap)
    }
  }

  /** Whether the topology has stored partitions or partitions in progress. */
  def has(topology: String): Boolean =
    synchronized(holdings.contains(topology) || attempts.valuesIterator.exists(_.owner == topology))

  /** The topology has no attempts any more. Removes its partitions, and returns those that must be deleted. If the
    * driver has not ended the topology, this executor is shutting down, and the partitions remain booked: `driverLost`
    * returns them if the driver is lost. */
  def release(topology: String): Deletions = synchronized {
    (for (ending <- endings.remove(topology); holding <- holdings.remove(topology)) yield {
      changedTopologies += topology
      Deletions(if (ending.outputs) all(holding).toMap else Map.empty,
        if (ending.blocks) holding.blocks.toMap.filterNot { case (block, _) => ending.keptCaches(block.rdd) }
          else Map.empty)
    }).getOrElse(Deletions())
  }

  /** The driver is lost, so nothing uses the partitions any more. Returns the outputs that must be deleted. Outputs
    * that finish later are deleted too. */
  def driverLost(): Seq[Output] = synchronized {
    driverIsLost = true
    val outputs = holdings.values.toSeq.flatMap(all).map(_._1)
    changedTopologies ++= holdings.keys
    holdings.clear()
    endings.clear()
    outputs
  }

  /** Forgets datasets that Spark has deleted. */
  def forget(shuffles: Iterable[Int], caches: Iterable[Int]): Unit = synchronized {
    val gone = caches.toSet
    holdings.foreach { case (topology, holding) =>
      shuffles.foreach(shuffle => if (holding.remove(shuffle).nonEmpty) changedTopologies += topology)
      if (gone.nonEmpty) holding.blocks.filterInPlace { (block, size) =>
        val remains = !gone(block.rdd)
        if (!remains) {
          holding.blockBytes -= size
          changedTopologies += topology
        }
        remains
      }
    }
    prune()
  }

  /** The counts of the partitions of a topology. */
  def stored(topology: String): PartitionCounts = synchronized {
    val inProgress = attempts.valuesIterator.filter(_.owner == topology).map(_.outputs.size.toLong).sum
    holdings.get(topology).map(h =>
      PartitionCounts(inProgress, h.outputs, h.outputBytes, h.blocks.size.toLong, h.blockBytes))
      .getOrElse(PartitionCounts(inProgress))
  }

  /** The shuffles and cached datasets of each topology. */
  def inventory: Map[String, (Set[Int], Set[Int])] = synchronized {
    holdings.view.mapValues(h => (h.shuffles.keySet.toSet, h.blocks.keysIterator.map(_.rdd).toSet)).toMap
  }

  /** The topologies that changed since the last call. */
  def changed(): Set[String] = synchronized {
    val found = changedTopologies.toSet
    changedTopologies.clear()
    found
  }

  def isEmpty: Boolean = synchronized(holdings.isEmpty && attempts.isEmpty && endings.isEmpty)

  private def add(owner: String, output: Output, bytes: Long): Unit = {
    holdings.getOrElseUpdate(owner, new Holding).add(output, bytes)
    changedTopologies += owner
  }

  private def remove(attempt: Long, output: Output): Option[String] =
    attempts.get(attempt).filter(_.outputs.remove(output)).map { found =>
      if (found.outputs.isEmpty) attempts -= attempt
      changedTopologies += found.owner
      found.owner
    }

  private def all(holding: Holding): Iterator[(Output, Long)] =
    holding.shuffles.iterator.flatMap { case (shuffle, outputs) => written(shuffle, outputs) }

  private def written(shuffle: Int, outputs: Outputs): Iterator[(Output, Long)] =
    outputs.maps.iterator.map { case (map, bytes) => Output(shuffle, map) -> bytes }

  private def prune(): Unit = holdings.filterInPlace((_, holding) => !holding.isEmpty)
}
