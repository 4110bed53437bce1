package org.apache.spark.stagecrew
package partitions

import scala.collection.mutable
import executor._, wire._

/** One map task's shuffle output; the id of its map is that of the attempt that wrote it. */
final case class Output(shuffle: Int, map: Long)

/** One block of a cached dataset. */
final case class CachedBlock(rdd: Int, partition: Int)

/**
 * The partitions that a topology's end releases on an executor. Shuffles that other topologies use pass to one of them;
 * None is the application, whose partitions are Spark's business. Other outputs are deleted if `outputs` is set, and
 * blocks if `blocks` is set, except those of datasets that others use. Outputs of the `unclaimed` shuffles that are
 * booked for the application are deleted too: nobody uses these shuffles any more.
 */
final case class Ending(
    outputs: Boolean, blocks: Boolean = false, heirs: Map[Int, Option[String]] = Map.empty,
    keptCaches: Set[Int] = Set.empty, unclaimed: Set[Int] = Set.empty)

/** Partitions of a topology that must be deleted, with their bytes. The driver releases the cached datasets. */
final case class Taken(outputs: Map[Output, Long] = Map.empty, blocks: Map[CachedBlock, Long] = Map.empty) {
  def caches: Set[Int] = blocks.keySet.map(_.rdd)
}

/**
 * Which partitions are stored on one executor, by topology: a pure state machine, without Spark, files or a clock.
 *
 * {{{
 *   set up --finished--> finished --end--> (passes to a topology that uses it, at once) --take--> deleted
 *      \--failed, or its attempt has ended--> forgotten
 *      \--finished, its topology has ended--> passes to another topology, or the task's own thread deletes it
 * }}}
 *
 * Partitions in progress are never touched from outside. Every set is live, and nothing else is counted. Each operation
 * takes the same time however much is stored. Unknown ids are ignored. Nothing is called while the lock is held.
 *
 * It follows Flink's TaskExecutorPartitionTracker and PartitionTable, but is keyed by topology, and uses the ends of
 * attempts as the signal that always comes: SortShuffleWriter never calls abort.
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
  private val touched = mutable.HashSet.empty[String]
  private var abandoned = false

  /** An attempt of this topology begins to write an output. */
  def setUp(attempt: Long, owner: String, output: Output): Unit = synchronized {
    attempts.getOrElseUpdate(attempt, new Attempt(owner)).outputs += output
    touched += owner
  }

  /** The output is written. Returns its topology if that has ended and no other topology uses the output: then the
    * caller deletes it. */
  def finished(attempt: Long, output: Output, bytes: Long): Option[String] = synchronized {
    remove(attempt, output).flatMap { owner =>
      val ending = if (abandoned) Some(Ending(outputs = true)) else endings.get(owner)
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

  /** The attempt has ended: outputs that it set up and did not finish are forgotten. */
  def over(attempt: Long): Unit = synchronized {
    attempts.remove(attempt).foreach(gone => touched += gone.owner)
  }

  /** An attempt stored a block, or dropped it (`None`). */
  def block(owner: String, block: CachedBlock, bytes: Option[Long]): Unit = synchronized {
    bytes match {
      case Some(size) if !endings.contains(owner) && !abandoned =>
        val holding = holdings.getOrElseUpdate(owner, new Holding)
        holding.blockBytes += size - holding.blocks.put(block, size).getOrElse(0L)
        touched += owner
      case Some(_) => ()
      case None => holdings.foreach { case (topology, holding) =>
        holding.blocks.remove(block).foreach { size =>
          holding.blockBytes -= size
          touched += topology
        }
      }
        prune()
    }
  }

  /** The topology has ended. Its shuffles pass to other topologies that use them, also those that finish later.
    * Other outputs that finish later are deleted at once. */
  def end(topology: String, ending: Ending): Unit = synchronized {
    if (!endings.contains(topology)) {
      // An heir may have ended itself, before or after this: then its own heir gets the shuffle.
      val heirs = ending.heirs.flatMap { case (shuffle, heir) => successor(heir, shuffle).map(shuffle -> _) }
      endings(topology) = ending.copy(heirs = heirs)
      endings.mapValuesInPlace((_, other) =>
        if (!other.heirs.valuesIterator.contains(Some(topology))) other else other.copy(
        heirs = other.heirs.flatMap { case (shuffle, heir) => successor(heir, shuffle).map(shuffle -> _) }))
      heirs.foreach { case (shuffle, heir) => holdings.get(topology).foreach(move(_, shuffle, heir)) }
      ending.unclaimed.foreach(shuffle =>
        holdings.get(Description.Application).foreach(move(_, shuffle, Some(topology))))
      touched += topology
      prune()
    }
  }

  /** The heir of an heir that may have ended. None if that released the shuffle. */
  private def successor(heir: Option[String], shuffle: Int): Option[Option[String]] = heir.flatMap(endings.get) match {
    case None => Some(heir)
    case Some(ended) => ended.heirs.get(shuffle).orElse(if (ended.outputs) None else Some(None))
  }

  private def move(from: Holding, shuffle: Int, heir: Option[String]): Unit = from.remove(shuffle).foreach { passed =>
    heir.foreach(to => passed.maps.foreach { case (map, bytes) => add(to, Output(shuffle, map), bytes) })
  }

  /** Nobody uses these shuffles: takes the outputs that are booked for the application. */
  def unclaimed(shuffles: Iterable[Int]): Taken = synchronized {
    holdings.get(Description.Application) match {
      case None => Taken()
      case Some(holding) =>
        touched += Description.Application
        val taken = shuffles.toSeq.flatMap(shuffle => holding.remove(shuffle).toSeq.flatMap(written(shuffle, _))).toMap
        prune()
        Taken(taken)
    }
  }

  /** Whether the topology has partitions, stored or in progress. */
  def has(topology: String): Boolean =
    synchronized(holdings.contains(topology) || attempts.valuesIterator.exists(_.owner == topology))

  /** The topology has no attempts any more. Returns the partitions that must be deleted. If the driver has not ended
    * the topology, everything stays booked: the executor ends, and `abandon` takes it if the driver is gone. */
  def take(topology: String): Taken = synchronized {
    (for (ending <- endings.remove(topology); holding <- holdings.remove(topology)) yield {
      touched += topology
      Taken(if (ending.outputs) all(holding).toMap else Map.empty,
        if (ending.blocks) holding.blocks.toMap.filterNot { case (block, _) => ending.keptCaches(block.rdd) }
          else Map.empty)
    }).getOrElse(Taken())
  }

  /** The driver is gone: nobody uses anything any more. Returns the outputs that must be deleted. Outputs that
    * finish later are deleted too. */
  def abandon(): Seq[Output] = synchronized {
    abandoned = true
    val outputs = holdings.values.toSeq.flatMap(all).map(_._1)
    touched ++= holdings.keys
    holdings.clear()
    endings.clear()
    outputs
  }

  /** These datasets are no longer registered: Spark has deleted them. */
  def forget(shuffles: Iterable[Int], caches: Iterable[Int]): Unit = synchronized {
    val gone = caches.toSet
    holdings.foreach { case (topology, holding) =>
      shuffles.foreach(shuffle => if (holding.remove(shuffle).nonEmpty) touched += topology)
      if (gone.nonEmpty) holding.blocks.filterInPlace { (block, size) =>
        val stays = !gone(block.rdd)
        if (!stays) {
          holding.blockBytes -= size
          touched += topology
        }
        stays
      }
    }
    prune()
  }

  /** The partitions of a topology. */
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
    val found = touched.toSet
    touched.clear()
    found
  }

  def isEmpty: Boolean = synchronized(holdings.isEmpty && attempts.isEmpty && endings.isEmpty)

  private def add(owner: String, output: Output, bytes: Long): Unit = {
    holdings.getOrElseUpdate(owner, new Holding).add(output, bytes)
    touched += owner
  }

  private def remove(attempt: Long, output: Output): Option[String] =
    attempts.get(attempt).filter(_.outputs.remove(output)).map { found =>
    if (found.outputs.isEmpty) attempts -= attempt
    touched += found.owner
    found.owner
  }

  private def all(holding: Holding): Iterator[(Output, Long)] =
    holding.shuffles.iterator.flatMap { case (shuffle, outputs) => written(shuffle, outputs) }

  private def written(shuffle: Int, outputs: Outputs): Iterator[(Output, Long)] =
    outputs.maps.iterator.map { case (map, bytes) => Output(shuffle, map) -> bytes }

  private def prune(): Unit = holdings.filterInPlace((_, holding) => !holding.isEmpty)
}
