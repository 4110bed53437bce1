package org.apache.spark.stagecrew
package partitions

import java.util.concurrent.{CompletableFuture, ConcurrentHashMap, ExecutorService, TimeUnit, TimeoutException}
import scala.jdk.CollectionConverters._
import scala.collection.immutable.VectorMap
import executor._, wire._

/**
 * Books the partitions of topologies on this executor, and deletes them. Tasks book their outputs in their own threads.
 * Outputs are deleted in `pool`. But if an output finishes after the end of its topology, its task's thread deletes it.
 */
final class Partitions(ownerOf: Long => Option[String], ledger: Ledger, pool: ExecutorService, disk: Partitions.Disk) {
  import Partitions._

  private val table = new PartitionTable
  /** The last inventory that was sent. None if it may not have reached the driver. Used by the loop only. */
  private var sentInventory = Option(Map.empty[String, (Set[Int], Set[Int])])
  private var unchangedReports = 0 // used by the loop only
  private val deletions = ConcurrentHashMap.newKeySet[CompletableFuture[_]]()
  private var staleScan = CompletableFuture.completedFuture(())
  private var staleCalls = 0
  private var reportedStale = Set.empty[Int]
  /** Cached blocks of closed topologies that the driver has not unpersisted yet. */
  private val unconfirmed = new ConcurrentHashMap[String, Map[CachedBlock, Long]]()
  private val staleShuffles = ConcurrentHashMap.newKeySet[Int]() // with stale outputs that were deleted

  /** An attempt begins to write an output. None if it belongs to no topology: only Spark manages the output then. */
  private[stagecrew] def setUp(attempt: Long, output: Output): Option[Booking] = ownerOf(attempt).map { owner =>
    table.setUp(attempt, owner, output)
    new Booked(attempt, output)
  }

  /** An output that is being written. Used by its task's thread only. */
  private[stagecrew] final class Booked(attempt: Long, output: Output) extends Booking {
    override def finished(lengths: Array[Long]): Unit = {
      val bytes = lengths.sum
      table.finished(attempt, output, bytes).foreach(topology => delete(topology, Map(output -> bytes)))
    }
    override def failed(): Unit = table.failed(attempt, output)
  }

  /** An attempt has ended. `blocks` are the cached blocks that it stored, with their sizes, or dropped. Called before
    * the attempt leaves its topologies. */
  def attemptEnded(attempt: Long, blocks: Seq[(CachedBlock, Option[Long])]): Unit = {
    if (blocks.nonEmpty) ownerOf(attempt).foreach(owner =>
      blocks.foreach { case (block, bytes) => table.block(owner, block, bytes) })
    table.attemptEnded(attempt)
  }

  /** The topology has ended. */
  def end(topology: String, ending: Ending): Unit = table.end(topology, ending)

  /** The topology has no attempts any more: deletes its partitions. Also deletes `stale` outputs (see `stale`). */
  def release(topology: String, stale: Map[Int, Long]): CompletableFuture[Deletions] = {
    val released = table.release(topology)
    if (released.blocks.nonEmpty) unconfirmed.put(topology, released.blocks)
    if (released.outputs.isEmpty && stale.isEmpty) CompletableFuture.completedFuture(released)
    else inPool {
      delete(topology, released.outputs)
      removeStale(stale)
      released
    }
  }

  /** The driver has unpersisted these datasets: counts the blocks of the topology that were deleted, and those that
    * were not. */
  def unpersisted(topology: String, datasets: Set[Int]): Unit = Option(unconfirmed.remove(topology)).foreach { blocks =>
    val (failed, deleted) = blocks.filter { case (block, _) => datasets(block.rdd) }
      .partition { case (block, _) => disk.has(block) }
    count(topology, deleted, failed.size.toLong)
  }

  /** Whether the driver has not yet confirmed the release of the topology's cached datasets. */
  def awaitsUnpersist(topology: String): Boolean = unconfirmed.containsKey(topology)

  /** No topology uses these shuffles: deletes outputs on disk from attempts before the given one of each shuffle. */
  def stale(before: Map[Int, Long]): Unit = if (before.nonEmpty && staleScan.isDone) {
    if (staleCalls % ScanEvery == 0) staleScan = inPool(removeStale(before))
    staleCalls += 1
  }

  /** No topology uses these shuffles: deletes the outputs that are booked under the application. */
  def unclaimed(shuffles: Iterable[Int]): Unit = {
    val released = table.unclaimed(shuffles)
    if (released.outputs.nonEmpty) { inPool(delete(Description.Application, released.outputs)); () }
  }

  def has(topology: String): Boolean = table.has(topology)

  /** The driver is lost: deletes all finished outputs, and later those that are still being written. */
  def driverLost(): Unit = {
    val outputs = table.driverLost()
    unconfirmed.clear()
    if (outputs.nonEmpty) { inPool(outputs.foreach(output => remove(output))); () }
  }

  /** Waits for the deletions in progress, within the timeout. The end of the process would interrupt them. */
  def awaitDeletions(ms: Long): Unit =
    try { CompletableFuture.allOf(deletions.toArray(Array.empty[CompletableFuture[_]]): _*)
      .get(ms, TimeUnit.MILLISECONDS); () }
    catch { case _: TimeoutException =>
      Log.log.warn(s"shuffle files are still being deleted after $ms ms: some may be left on the disk") }

  /** Forgets datasets that Spark has deleted. */
  def forget(shuffles: Iterable[Int], caches: Iterable[Int]): Unit = table.forget(shuffles, caches)

  /** Updates the ledger. Used by the loop only, as is `inventory`. */
  def updateLedger(): Unit = table.changed().foreach(updateLedger)

  def updateLedger(topology: String): Unit = {
    val stored = table.stored(topology)
    val known = ledger.of(topology).partitions
    if (known.storing(stored) != known) ledger.change(topology)(c => c.copy(partitions = c.partitions.storing(stored)))
  }

  /** The datasets of each topology, to be sent to the driver. None if it has them already, and not for long; `always`
    * returns them in any case. */
  def inventory(always: Boolean): Option[Inventory] = {
    val now = table.inventory
    unchangedReports += 1
    reportedStale = staleShuffles.asScala.toSet
    val isKnown = sentInventory.contains(now) && (now.isEmpty || unchangedReports < RepeatAfter)
    if (!always && reportedStale.isEmpty && isKnown) None
    else {
      sentInventory = Some(now)
      unchangedReports = 0
      Some(Inventory(now.map { case (topology, (shuffles, caches)) =>
        topology -> Datasets(shuffles.toVector, caches.toVector) }.to(VectorMap), reportedStale.toVector))
    }
  }

  /** The last inventory has reached the driver, or may not have. */
  def inventorySent(delivered: Boolean): Unit =
    if (delivered) reportedStale.foreach(staleShuffles.remove) else sentInventory = None

  def isEmpty: Boolean = table.isEmpty

  private def inPool[T](f: => T): CompletableFuture[T] = {
    val done = CompletableFuture.supplyAsync[T](() => f, pool)
    deletions.add(done)
    done.whenComplete((_, _) => deletions.remove(done))
    done
  }

  private def delete(topology: String, outputs: Map[Output, Long]): Unit = if (outputs.nonEmpty) {
    val (deleted, failed) = outputs.partition { case (output, _) => remove(output) }
    count(topology, deleted, failed.size.toLong)
  }

  /** Counts deleted partitions, and those that could not be deleted. */
  private def count(topology: String, deleted: Map[_, Long], failures: Long): Unit = if (deleted.size + failures > 0) {
    val more = PartitionCounts(
      released = deleted.size.toLong, releasedBytes = deleted.valuesIterator.sum, releaseFailures = failures)
    ledger.change(topology)(c => c.copy(partitions = c.partitions + more))
  }

  private def removeStale(before: Map[Int, Long]): Unit = if (before.nonEmpty) disk.outputsOf(before.keySet)
    .filter(output => output.map < before(output.shuffle)).foreach { output =>
    remove(output)
    staleShuffles.add(output.shuffle)
  }

  /** Deletes an output. Returns whether it was deleted. If not, the log contains the reason. */
  private def remove(output: Output): Boolean = try {
    val deleted = disk.delete(output)
    if (!deleted) Log.log.warn(s"$output could not be deleted: its files are still in the executor's local directories")
    deleted
  } catch {
    case Failure(error) =>
      Log.log.warn(s"$output could not be deleted", error)
      false
  }
}

object Partitions {
  /** Receives the reports of a shuffle writer about one output. */
  private[stagecrew] trait Booking {
    def finished(lengths: Array[Long]): Unit
    def failed(): Unit

    final def reportingFailure[T](f: => T): T = try f catch { case error: Throwable => failed(); throw error }
  }

  /** The storage of this executor. */
  private[stagecrew] trait Disk {
    /** Deletes an output. Returns false if files of it are left. */
    def delete(output: Output): Boolean
    /** Whether a cached block is stored here. */
    def has(block: CachedBlock): Boolean
    /** All outputs of these shuffles, booked or not. A decommissioned executor may have sent some of them. */
    def outputsOf(shuffles: Set[Int]): Seq[Output]
  }

  /** An unchanged inventory is sent again after this many reports, because the driver may have lost it. */
  private val RepeatAfter = 10

  /** One in this many calls of `stale` lists the disks. */
  private val ScanEvery = 4

  // Spark creates the ShuffleDataIO by class name, so it finds the executor's `Partitions` here. A JVM has one
  // executor.
  @volatile private var current = Option.empty[Partitions]

  def here: Option[Partitions] = current

  private[stagecrew] def serve(partitions: Partitions): Unit = current = Some(partitions)
  private[stagecrew] def stop(partitions: Partitions): Unit = if (current.contains(partitions)) current = None
}
