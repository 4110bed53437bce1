package org.apache.spark.stagecrew
package partitions

import scala.collection.immutable.VectorMap
import scala.collection.mutable
import executor._, wire._

/** The shuffle output of one attempt of a map task. */
final case class Output(shuffle: Int, attempt: Long)

/** One block of a cached dataset. */
final case class CachedBlock(rdd: Int, partition: Int)

/** Those of the partitions of a topology that must be deleted, with their sizes. The executor deletes the outputs. The
  * driver unpersists the cached datasets. */
final case class Deletions(outputs: Map[Output, Long] = Map.empty, blocks: Map[CachedBlock, Long] = Map.empty) {
  def caches: Set[Int] = blocks.keySet.map(_.rdd)
}

/**
 * The stored partitions of each topology on one executor: a pure state machine, without Spark, files or a clock.
 *
 * {{{
 *   in progress --finished--> finished --end--> (passes to an heir immediately, if there is one) --release--> deleted
 *      \--failed, or its attempt has ended--> forgotten
 *      \--finished, but its topology has ended--> passes to an heir, or the task's thread deletes it
 * }}}
 *
 * An output in progress is finished, failed or forgotten only by its own attempt. Counts are derived from the stored
 * partitions. The time of a task's calls does not depend on the number of stored partitions. Unknown ids are ignored.
 * Thread-safe.
 *
 * The table follows Flink's TaskExecutorPartitionTracker and PartitionTable, but its keys are topologies. An unfinished
 * output is forgotten when its attempt ends, because SortShuffleWriter never calls abort.
 */
final class PartitionTable {
  private final class StoredPartitions {
    val shuffles = mutable.HashMap.empty[Int, mutable.HashMap[Long, Long]] // sizes by shuffle and attempt
    val blocks = mutable.HashMap.empty[CachedBlock, Long] // sizes
    def isEmpty: Boolean = shuffles.isEmpty && blocks.isEmpty

    /** Removes the outputs of a shuffle, and returns them with their sizes. */
    def remove(shuffle: Int): Seq[(Output, Long)] =
      shuffles.remove(shuffle).toSeq.flatMap(_.map { case (attempt, bytes) => Output(shuffle, attempt) -> bytes })

    def removeOutputs(): Seq[(Output, Long)] = shuffles.keys.toSeq.flatMap(remove)
  }

  private val storedOf = mutable.HashMap.empty[String, StoredPartitions] // by topology
  private val inProgress = mutable.HashMap.empty[Output, String] // with the topology of its attempt
  private val endings = mutable.HashMap.empty[String, Release] // of ended topologies until `release`
  private val changedTopologies = mutable.HashSet.empty[String]
  private var driverIsLost = false

  /** An attempt of topology `owner` begins to write an output. */
  def setUp(owner: String, output: Output): Unit = synchronized {
    inProgress(output) = owner
    changedTopologies += owner
  }

  /** An output is written. If the caller must delete the output, returns its topology: the topology has ended, and no
    * other topology uses the output. */
  def finished(output: Output, bytes: Long): Option[String] = synchronized {
    remove(output).flatMap { owner =>
      val ending = if (driverIsLost) Some(Release(deleteOutputs = true)) else endings.get(owner)
      ending match {
        case None => add(owner, output, bytes); None
        case Some(end) => end.heirs.get(output.shuffle) match {
          case Some(heir) => passTo(heir, output, bytes); None
          case None => Option.when(end.deleteOutputs)(owner)
        }
      }
    }
  }

  /** An attempt failed to write an output. */
  def failed(output: Output): Unit = synchronized { remove(output); () }

  /** The attempt has ended: its unfinished outputs are forgotten. */
  def attemptEnded(id: Long): Unit = synchronized(inProgress.keys.filter(_.attempt == id).toSeq.foreach(remove))

  /** An attempt of topology `owner` stored a block of this size, or dropped it (`None`). */
  def blockChanged(owner: String, block: CachedBlock, bytes: Option[Long]): Unit = synchronized {
    bytes match {
      case Some(size) => if (!endings.contains(owner) && !driverIsLost) {
        storedOf.getOrElseUpdate(owner, new StoredPartitions).blocks(block) = size
        changedTopologies += owner
      }
      case None =>
        storedOf.foreach { case (topology, stored) =>
          if (stored.blocks.remove(block).nonEmpty) changedTopologies += topology
        }
        prune()
    }
  }

  /** The topology has ended. Outputs of shuffles with an heir pass to the heir, including outputs that finish later.
    * Other outputs that finish later are deleted immediately. */
  def end(topology: String, release: Release): Unit = synchronized {
    if (!endings.contains(topology)) {
      // If an heir has ended, or ends later, its own heir gets the shuffle.
      def resolved(ending: Release): Release = ending.copy(
        heirs = ending.heirs.flatMap { case (shuffle, heir) => successor(heir, shuffle).map(shuffle -> _) })
      endings(topology) = resolved(release)
      endings.mapValuesInPlace((_, ending) => resolved(ending))
      endings(topology).heirs.foreach { case (shuffle, heir) => move(topology, shuffle, heir) }
      release.shuffles.foreach(move(Description.Application, _, topology))
      changedTopologies += topology
      prune()
    }
  }

  /** Returns `heir` if this topology has not ended, otherwise the topology's own heir of the shuffle. None if it has
    * released the shuffle. The application remains an heir even after its end. */
  private def successor(heir: String, shuffle: Int): Option[String] =
    endings.get(heir).filter(_ => heir != Description.Application) match {
      case None => Some(heir)
      case Some(ended) => ended.heirs.get(shuffle).orElse(Option.when(!ended.deleteOutputs)(Description.Application))
    }

  private def move(from: String, shuffle: Int, to: String): Unit = storedOf.get(from).foreach { stored =>
    stored.remove(shuffle).foreach { case (output, bytes) => passTo(to, output, bytes) }
  }

  /** Removes the application's outputs of these shuffles, and returns them. Call it only if no topology uses these
    * shuffles. */
  def removeUnclaimed(shuffles: Iterable[Int]): Map[Output, Long] = synchronized {
    storedOf.get(Description.Application).fold(Map.empty[Output, Long]) { stored =>
      changedTopologies += Description.Application
      val outputs = shuffles.toSeq.flatMap(stored.remove)
      prune()
      outputs.toMap
    }
  }

  /** Whether the topology has stored partitions or partitions in progress. */
  def has(topology: String): Boolean =
    synchronized(storedOf.contains(topology) || inProgress.valuesIterator.contains(topology))

  /** Called when the topology has no attempts left. Removes its partitions, and returns those that must be deleted. If
    * `end` was not called before, this executor is shutting down. The partitions then remain in the table, and
    * `driverLost` returns their outputs if the driver is lost. */
  def release(topology: String): Deletions = synchronized {
    (for (ending <- endings.remove(topology); stored <- storedOf.remove(topology)) yield {
      changedTopologies += topology
      val kept = ending.keptCaches.toSet
      Deletions(
        if (ending.deleteOutputs) stored.removeOutputs().toMap else Map.empty,
        if (ending.deleteBlocks) stored.blocks.filterNot { case (block, _) => kept(block.rdd) }.toMap else Map.empty)
    }).getOrElse(Deletions())
  }

  /** The driver is lost, so nothing uses the partitions any more. Returns the outputs that must be deleted. Outputs
    * that finish later are deleted too. */
  def driverLost(): Seq[Output] = synchronized {
    driverIsLost = true
    val outputs = storedOf.values.toSeq.flatMap(_.removeOutputs()).map(_._1)
    changedTopologies ++= storedOf.keys
    storedOf.clear()
    endings.clear()
    outputs
  }

  /** Forgets datasets that Spark has deleted. */
  def forget(shuffles: Iterable[Int], caches: Iterable[Int]): Unit = synchronized {
    val gone = caches.toSet
    storedOf.foreach { case (topology, stored) =>
      val before = stored.blocks.size
      if (gone.nonEmpty) stored.blocks.filterInPlace((block, _) => !gone(block.rdd))
      val forgotten = shuffles.toSeq.flatMap(stored.remove)
      if (forgotten.nonEmpty || stored.blocks.size < before) changedTopologies += topology
    }
    prune()
  }

  /** The counts of the partitions of a topology. */
  def counts(topology: String): PartitionCounts = synchronized {
    val stored = storedOf.getOrElse(topology, new StoredPartitions)
    PartitionCounts(
      inProgress = inProgress.valuesIterator.count(_ == topology).toLong,
      outputs = stored.shuffles.valuesIterator.map(_.size.toLong).sum,
      outputBytes = stored.shuffles.valuesIterator.flatMap(_.valuesIterator).sum,
      blocks = stored.blocks.size.toLong, blockBytes = stored.blocks.valuesIterator.sum)
  }

  /** The stored datasets of each topology, with sorted ids. */
  def inventory: VectorMap[String, Datasets] = synchronized {
    storedOf.view.mapValues(stored => Datasets(stored.shuffles.keys.toVector.sorted,
      stored.blocks.keysIterator.map(_.rdd).distinct.toVector.sorted)).to(VectorMap)
  }

  /** Returns the topologies that have changed since the last call. */
  def takeChanged(): Set[String] = synchronized {
    val found = changedTopologies.toSet
    changedTopologies.clear()
    found
  }

  def isEmpty: Boolean = synchronized(storedOf.isEmpty && inProgress.isEmpty && endings.isEmpty)

  /** Records an output for its heir. An output that passes to the application is no longer recorded, because Spark
    * manages it. */
  private def passTo(heir: String, output: Output, bytes: Long): Unit =
    if (heir != Description.Application) add(heir, output, bytes)

  private def add(owner: String, output: Output, bytes: Long): Unit = {
    storedOf.getOrElseUpdate(owner, new StoredPartitions).shuffles
      .getOrElseUpdate(output.shuffle, mutable.HashMap.empty)(output.attempt) = bytes
    changedTopologies += owner
  }

  /** Removes an output in progress. Returns its topology. */
  private def remove(output: Output): Option[String] = {
    val owner = inProgress.remove(output)
    changedTopologies ++= owner
    owner
  }

  private def prune(): Unit = storedOf.filterInPlace((_, stored) => !stored.isEmpty)
}
