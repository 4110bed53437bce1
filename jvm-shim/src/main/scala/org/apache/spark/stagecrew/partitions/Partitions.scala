package org.apache.spark.stagecrew
package partitions

import java.util.concurrent.{CompletableFuture, ConcurrentHashMap, ExecutorService, TimeUnit, TimeoutException}
import scala.jdk.CollectionConverters._
import scala.collection.immutable.VectorMap
import executor._, wire._

/**
 * The partitions of topologies on this executor, and their deletion. Tasks book outputs in their own threads. Outputs
 * are deleted in `pool`, except one that finishes after the end of its topology, which its task's thread deletes.
 */
final class Partitions(ownerOf: Long => Option[String], ledger: Ledger, pool: ExecutorService, disk: Partitions.Disk) {
  import Partitions._

  private val table = new PartitionTable
  /** The inventory that the driver has; None if that is not known. Used by the loop only, as the next ones. */
  private var said = Option(Map.empty[String, (Set[Int], Set[Int])])
  private var quiet = 0
  private val deletions = ConcurrentHashMap.newKeySet[CompletableFuture[_]]()
  private var looking = CompletableFuture.completedFuture(())
  private var asked = 0
  private var telling = Set.empty[Int]
  /** Blocks of topologies that the driver must unpersist. */
  private val unconfirmed = new ConcurrentHashMap[String, Map[CachedBlock, Long]]()
  private val found = ConcurrentHashMap.newKeySet[Int]() // shuffles with stale outputs that were deleted

  /** An attempt begins to write an output. None if it belongs to no topology: then Spark alone manages the output. */
  private[stagecrew] def setUp(attempt: Long, output: Output): Option[Booking] = ownerOf(attempt).map { owner =>
    table.setUp(attempt, owner, output)
    new Booked(attempt, output)
  }

  /** An output in progress. Used by its task's thread only. */
  private[stagecrew] final class Booked(attempt: Long, output: Output) extends Booking {
    override def finished(lengths: Array[Long]): Unit = {
      val bytes = lengths.sum
      table.finished(attempt, output, bytes).foreach(topology => delete(topology, Map(output -> bytes)))
    }
    override def failed(): Unit = table.failed(attempt, output)
  }

  /** An attempt has ended, with these blocks stored or dropped. Called before the attempt leaves its topologies. */
  def over(attempt: Long, blocks: Seq[(CachedBlock, Option[Long])]): Unit = {
    if (blocks.nonEmpty) ownerOf(attempt).foreach(owner =>
      blocks.foreach { case (block, bytes) => table.block(owner, block, bytes) })
    table.over(attempt)
  }

  /** The topology has ended. */
  def end(topology: String, ending: Ending): Unit = table.end(topology, ending)

  /** The topology has no attempts any more: deletes its partitions, and `stale` outputs. */
  def release(topology: String, stale: Map[Int, Long]): CompletableFuture[Taken] = {
    val taken = table.take(topology)
    if (taken.blocks.nonEmpty) unconfirmed.put(topology, taken.blocks)
    if (taken.outputs.isEmpty && stale.isEmpty) CompletableFuture.completedFuture(taken)
    else inPool {
      delete(topology, taken.outputs)
      removeStale(stale)
      taken
    }
  }

  /** The driver has unpersisted these datasets: counts the blocks of the topology that are gone, and those that are
    * not. */
  def unpersisted(topology: String, datasets: Set[Int]): Unit = Option(unconfirmed.remove(topology)).foreach { blocks =>
    val (left, gone) = blocks.filter { case (block, _) => datasets(block.rdd) }
      .partition { case (block, _) => disk.has(block) }
    count(topology, gone, left.size.toLong)
  }

  /** Whether the driver has not yet confirmed the release of the topology's cached datasets. */
  def awaits(topology: String): Boolean = unconfirmed.containsKey(topology)

  /** Nobody uses these shuffles: deletes the outputs that are booked for the application. */
  def stale(before: Map[Int, Long]): Unit = if (before.nonEmpty && looking.isDone) {
    if (asked % Looks == 0) looking = inPool(removeStale(before))
    asked += 1
  }

  /** Nobody uses these shuffles: deletes their outputs that are booked for the application. */
  def unclaimed(shuffles: Iterable[Int]): Unit = {
    val taken = table.unclaimed(shuffles)
    if (taken.outputs.nonEmpty) { inPool(delete(Description.Application, taken.outputs)); () }
  }

  def has(topology: String): Boolean = table.has(topology)

  /** The driver is gone: deletes everything that is finished, or finishes later. */
  def abandon(): Unit = {
    val outputs = table.abandon()
    unconfirmed.clear()
    if (outputs.nonEmpty) { inPool(outputs.foreach(output => remove(output))); () }
  }

  /** Waits for the deletions in progress within the timeout: the end of the process would cut them off. */
  def awaitDeletions(ms: Long): Unit =
    try { CompletableFuture.allOf(deletions.toArray(Array.empty[CompletableFuture[_]]): _*)
      .get(ms, TimeUnit.MILLISECONDS); () }
    catch { case _: TimeoutException =>
      Log.log.warn(s"files of shuffles are still being deleted after $ms ms: some may stay") }

  /** Spark has deleted these. */
  def forget(shuffles: Iterable[Int], caches: Iterable[Int]): Unit = table.forget(shuffles, caches)

  /** Updates the ledger. Used by the loop only, as is `inventory`. */
  def tell(): Unit = table.changed().foreach(tell)

  def tell(topology: String): Unit = {
    val stored = table.stored(topology)
    val known = ledger.of(topology).partitions
    if (known.storing(stored) != known) ledger.change(topology)(c => c.copy(partitions = c.partitions.storing(stored)))
  }

  /** The datasets of each topology, if the driver does not have them, or has not had them for long; `always` to send
    * them in any case. */
  def inventory(always: Boolean): Option[Inventory] = {
    val now = table.inventory
    quiet += 1
    telling = found.asScala.toSet
    if (!always && telling.isEmpty && said.contains(now) && (now.isEmpty || quiet < Quiet)) None
    else {
      said = Some(now)
      quiet = 0
      Some(Inventory(now.map { case (topology, (shuffles, caches)) =>
        topology -> Datasets(shuffles.toVector, caches.toVector) }
        .to(VectorMap), telling.toVector))
    }
  }

  /** Whether the driver has the last inventory. */
  def answered(heard: Boolean): Unit = if (heard) telling.foreach(found.remove) else said = None

  def isEmpty: Boolean = table.isEmpty

  private def inPool[T](f: => T): CompletableFuture[T] = {
    val done = CompletableFuture.supplyAsync[T](() => f, pool)
    deletions.add(done)
    done.whenComplete((_, _) => deletions.remove(done))
    done
  }

  private def delete(topology: String, outputs: Map[Output, Long]): Unit = if (outputs.nonEmpty) {
    val (gone, left) = outputs.partition { case (output, _) => remove(output) }
    count(topology, gone, left.size.toLong)
  }

  /** Counts partitions that are known to be gone, and those that could not be deleted. */
  private def count(topology: String, gone: Map[_, Long], failures: Long): Unit = if (gone.nonEmpty || failures > 0) {
    val more = PartitionCounts(
      released = gone.size.toLong, releasedBytes = gone.valuesIterator.sum, releaseFailures = failures)
    ledger.change(topology)(c => c.copy(partitions = c.partitions + more))
  }

  private def removeStale(before: Map[Int, Long]): Unit = if (before.nonEmpty) disk.outputsOf(before.keySet)
    .filter(output => output.map < before(output.shuffle)).foreach { output =>
    remove(output)
    found.add(output.shuffle)
  }

  /** Deletes an output. Returns whether it is gone. If not, the log gives the reason. */
  private def remove(output: Output): Boolean = try {
    val gone = disk.delete(output)
    if (!gone) Log.log.warn(s"$output could not be deleted: its files are still in the executor's local directories")
    gone
  } catch {
    case Failure(error) =>
      Log.log.warn(s"$output could not be deleted", error)
      false
  }
}

object Partitions {
  /** The reports of a writer. */
  private[stagecrew] trait Booking {
    def finished(lengths: Array[Long]): Unit
    def failed(): Unit

    final def unlessItFails[T](f: => T): T = try f catch { case error: Throwable => failed(); throw error }
  }

  /** The storage of this executor. */
  private[stagecrew] trait Disk {
    /** Deletes an output. Returns whether none of its files is left. */
    def delete(output: Output): Boolean
    /** Whether a cached block is stored here. */
    def has(block: CachedBlock): Boolean
    /** All outputs of these shuffles, booked or not: a decommissioned executor may have sent them. */
    def outputsOf(shuffles: Set[Int]): Seq[Output]
  }

  /** An unchanged inventory is repeated after this many reports: the driver may have lost it. */
  private val Quiet = 10

  /** The disks are listed once in this many calls. */
  private val Looks = 4

  // Spark creates the ShuffleDataIO by its name, in the executor's JVM. Each JVM has one executor.
  @volatile private var current = Option.empty[Partitions]

  def here: Option[Partitions] = current

  private[stagecrew] def serve(partitions: Partitions): Unit = current = Some(partitions)
  private[stagecrew] def stop(partitions: Partitions): Unit = if (current.contains(partitions)) current = None
}
