package org.apache.spark.stagecrew
package partitions

import java.util.concurrent.{CompletableFuture, ConcurrentHashMap, ExecutorService, TimeUnit, TimeoutException}
import scala.jdk.CollectionConverters._
import scala.collection.immutable.VectorMap
import executor._, wire._

/**
 * Records the partitions of topologies on this executor, and deletes them. Tasks record their outputs in their own
 * threads. Outputs are deleted in `pool`, except an output that finishes after the end of its topology: the thread of
 * its task deletes it.
 */
final class Partitions(ownerOf: Long => Option[String], ledger: Ledger, pool: ExecutorService, disk: Partitions.Disk) {
  import Partitions._

  val table = new PartitionTable
  /** The last inventory that was sent. None if it may not have reached the driver. Used by the loop only. */
  private var sentInventory = Option(VectorMap.empty[String, Datasets])
  private var unchangedReports = 0 // used by the loop only
  private val deletions = ConcurrentHashMap.newKeySet[CompletableFuture[_]]()
  private var staleScan = CompletableFuture.completedFuture(())
  private var staleCalls = 0
  /** Cached blocks of closed topologies that the driver has not unpersisted yet. */
  private val unconfirmed = new ConcurrentHashMap[String, Map[CachedBlock, Long]]()
  private val staleShuffles = ConcurrentHashMap.newKeySet[Int]() // shuffles whose stale outputs were deleted

  /** Called when an attempt begins to write an output. Returns None if the attempt belongs to no topology: then only
    * Spark manages the output. */
  private[stagecrew] def setUp(output: Output): Option[OutputInProgress] = ownerOf(output.attempt).map { owner =>
    table.setUp(owner, output)
    new OutputInProgress(output)
  }

  /** An output that a task is writing. Used by the task's thread only. */
  private[stagecrew] final class OutputInProgress(output: Output) {
    /** Called when the task has written the output. `lengths` are the sizes of its partitions. */
    def finished(lengths: Array[Long]): Unit = {
      val bytes = lengths.sum
      table.finished(output, bytes).foreach(topology => delete(topology, Map(output -> bytes)))
    }
    def failed(): Unit = table.failed(output)

    def reportingFailure[T](f: => T): T = try f catch { case error: Throwable => failed(); throw error }
  }

  /** Called when an attempt has ended, before it leaves its topologies. `blocks` are the cached blocks that it stored,
    * with their sizes, and those that it dropped, with None. */
  def attemptEnded(attempt: Long, blocks: Seq[(CachedBlock, Option[Long])]): Unit = {
    if (blocks.nonEmpty) ownerOf(attempt).foreach(owner =>
      blocks.foreach { case (block, bytes) => table.blockChanged(owner, block, bytes) })
    table.attemptEnded(attempt)
  }

  /** Called when an ended topology has no attempts left: deletes its outputs. Its cached blocks remain until the driver
    * has unpersisted them. Also deletes the outputs that `deleteStale` would delete. */
  def release(topology: String, before: Map[Int, Long]): CompletableFuture[Deletions] = {
    val released = table.release(topology)
    if (released.blocks.nonEmpty) unconfirmed.put(topology, released.blocks)
    if (released.outputs.isEmpty && before.isEmpty) CompletableFuture.completedFuture(released)
    else inPool {
      delete(topology, released.outputs)
      removeStale(before)
      released
    }
  }

  /** Called when the driver has unpersisted these cached datasets. Counts the topology's blocks that are gone as
    * released, and those that are still here as failures. */
  def unpersisted(topology: String, datasets: Set[Int]): Unit = Option(unconfirmed.remove(topology)).foreach { blocks =>
    val (failed, deleted) = blocks.filter { case (block, _) => datasets(block.rdd) }
      .partition { case (block, _) => disk.has(block) }
    count(topology, deleted, failed.size.toLong)
  }

  /** Called when the driver has not confirmed the release of the topology's cached datasets for a long time. */
  def expireUnpersisted(topology: String): Unit = Option(unconfirmed.remove(topology))
    .foreach(blocks => count(topology, blocks.filterNot { case (block, _) => disk.has(block) }, 0))

  /** Whether the driver has not yet confirmed the release of the topology's cached datasets. */
  def awaitsUnpersist(topology: String): Boolean = unconfirmed.containsKey(topology)

  /** Deletes stale outputs from this executor's disks. For each shuffle, `before` has an attempt id: no topology uses
    * the outputs of attempts with lower ids. */
  def deleteStale(before: Map[Int, Long]): Unit = if (before.nonEmpty && staleScan.isDone) {
    if (staleCalls % ScanEvery == 0) staleScan = inPool(removeStale(before))
    staleCalls += 1
  }

  /** Deletes outputs of shuffles that no topology uses, if they are recorded for the application. */
  def deleteUnclaimed(shuffles: Iterable[Int]): Unit = {
    val outputs = table.removeUnclaimed(shuffles)
    if (outputs.nonEmpty) { inPool(delete(Description.Application, outputs)); () }
  }

  /** Called when the driver is lost. Deletes all finished outputs, and those that finish later. */
  def driverLost(): Unit = {
    val outputs = table.driverLost()
    unconfirmed.clear()
    if (outputs.nonEmpty) { inPool(outputs.foreach(output => remove(output))); () }
  }

  /** Waits for the deletions in progress, at most for this time. The end of the process would interrupt them. */
  def awaitDeletions(ms: Long): Unit =
    try { CompletableFuture.allOf(deletions.toArray(Array.empty[CompletableFuture[_]]): _*)
      .get(ms, TimeUnit.MILLISECONDS); () }
    catch { case _: TimeoutException =>
      Log.log.warn(s"shuffle files are still being deleted after $ms ms: some may be left on the disk") }

  /** Updates the counts of all changed topologies in the ledger. Used by the loop only, as is `inventory`. */
  def updateLedger(): Unit = table.takeChanged().foreach(updateLedger)

  def updateLedger(topology: String): Unit = {
    val stored = table.counts(topology)
    val known = ledger.of(topology).partitions
    if (known.storing(stored) != known) ledger.change(topology)(c => c.copy(partitions = c.partitions.storing(stored)))
  }

  /** The inventory to be sent to the driver. None if nothing has changed since the last one, which the driver has, and
    * which was sent recently. If `always` is set, the result is never None. */
  def inventory(always: Boolean): Option[Inventory] = {
    val now = table.inventory
    unchangedReports += 1
    val found = staleShuffles.asScala.toVector
    val isKnown = sentInventory.contains(now) && (now.isEmpty || unchangedReports < RepeatAfter)
    if (!always && found.isEmpty && isKnown) None
    else {
      sentInventory = Some(now)
      unchangedReports = 0
      Some(Inventory(now, found))
    }
  }

  /** The driver has this inventory. */
  def inventoryDelivered(inventory: Inventory): Unit = inventory.found.foreach(staleShuffles.remove)

  /** An inventory may not have reached the driver. */
  def inventoryLost(): Unit = sentInventory = None

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

  private def removeStale(before: Map[Int, Long]): Unit = if (before.nonEmpty) Log.contained("deleting stale outputs")(
    disk.outputsOf(before.keySet).filter(output => output.attempt < before(output.shuffle)).foreach { output =>
      remove(output)
      staleShuffles.add(output.shuffle)
    })

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
  /** The storage of this executor. */
  private[stagecrew] trait Disk {
    /** Deletes an output. Returns false if some of its files are left. */
    def delete(output: Output): Boolean
    /** Whether a cached block is stored here. */
    def has(block: CachedBlock): Boolean
    /** All outputs of these shuffles. Includes those that a decommissioned executor sent, which are not in the
      * table. */
    def outputsOf(shuffles: Set[Int]): Seq[Output]
  }

  /** An unchanged inventory is sent again after this many reports, because the driver may have lost it. */
  private val RepeatAfter = 10

  /** One in this many calls of `deleteStale` lists the files on the disks. */
  private val ScanEvery = 4

  // Spark creates our ShuffleDataIO without arguments, so the ShuffleDataIO takes the executor's `Partitions` from
  // here. A JVM has one executor.
  @volatile private var current = Option.empty[Partitions]

  def here: Option[Partitions] = current

  private[stagecrew] def serve(partitions: Partitions): Unit = current = Some(partitions)
  private[stagecrew] def stop(partitions: Partitions): Unit = if (current.contains(partitions)) current = None
}
