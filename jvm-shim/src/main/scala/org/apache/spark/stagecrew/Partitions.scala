package org.apache.spark.stagecrew

import java.util.concurrent.{CompletableFuture, ConcurrentHashMap, ExecutorService, TimeUnit, TimeoutException}
import scala.jdk.CollectionConverters._
import com.fasterxml.jackson.databind.JsonNode

/**
 * What topologies have stored on this executor, and its deletion. Tasks book in their own threads; deletion is done in
 * `pool`, but for what finishes behind the end of its topology, which its own thread deletes.
 */
final class Partitions(ownerOf: Long => Option[String], ledger: Ledger, pool: ExecutorService, disk: Partitions.Disk) {
  import Partitions._

  private val table = new PartitionTable
  private var said = Option(Map.empty[String, (Set[Int], Set[Int])]) // of the loop's thread; None: nobody knows
  private var quiet = 0
  private val deletions = ConcurrentHashMap.newKeySet[CompletableFuture[_]]()
  private var looking = CompletableFuture.completedFuture(()) // of the loop's thread, as are the next two
  private var asked = 0
  private var telling = Set.empty[Int]
  private val unconfirmed = new ConcurrentHashMap[String, Map[CachedBlock, Long]]() // blocks of topologies that the driver is to unpersist
  private val found = ConcurrentHashMap.newKeySet[Int]() // shuffles of which something stale was here

  /** An attempt begins to write. None when it belongs to no topology: Spark alone sees to that. */
  private[stagecrew] def setUp(attempt: Long, output: Output): Option[Booking] = ownerOf(attempt).map { owner =>
    table.setUp(attempt, owner, output)
    new Booked(attempt, output)
  }

  /** One output that is in progress; used by its task's thread alone. */
  private[stagecrew] final class Booked(attempt: Long, output: Output) extends Booking {
    override def finished(lengths: Array[Long]): Unit = {
      val bytes = lengths.sum
      table.finished(attempt, output, bytes).foreach(topology => delete(topology, Map(output -> bytes)))
    }
    override def failed(): Unit = table.failed(attempt, output)
  }

  /** An attempt is over, with these blocks stored or dropped. Before it is taken off its topology's attempts. */
  def over(attempt: Long, blocks: Seq[(CachedBlock, Option[Long])]): Unit = {
    if (blocks.nonEmpty) ownerOf(attempt).foreach(owner => blocks.foreach { case (block, bytes) => table.block(owner, block, bytes) })
    table.over(attempt)
  }

  /** The topology has ended. */
  def end(topology: String, ending: Ending): Unit = table.end(topology, ending)

  /** No attempt of the topology is left: what it leaves is deleted, and what else is `stale`. */
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

  /** The driver has unpersisted these datasets: counts the topology's blocks of them that are gone, and those that are not. */
  def unpersisted(topology: String, datasets: Set[Int]): Unit = Option(unconfirmed.remove(topology)).foreach { blocks =>
    val (left, gone) = blocks.filter { case (block, _) => datasets(block.rdd) }.partition { case (block, _) => disk.has(block) }
    count(topology, gone, left.size.toLong)
  }

  /** Whether the driver has not yet confirmed the release of the topology's cached datasets. */
  def awaits(topology: String): Boolean = unconfirmed.containsKey(topology)

  /** Of these shuffles, which nobody uses, what attempts before those named have written goes, booked or not: another executor
    * that leaves may have sent it. Of the loop's thread; every few calls looks at the disks, which may have many files. */
  def stale(before: Map[Int, Long]): Unit = if (before.nonEmpty && looking.isDone) {
    if (asked % Looks == 0) looking = inPool(removeStale(before))
    asked += 1
  }

  /** Nobody uses these shuffles: what is booked of them for the application goes. */
  def unclaimed(shuffles: Iterable[Int]): Unit = {
    val taken = table.unclaimed(shuffles)
    if (taken.outputs.nonEmpty) { inPool(delete(Description.Application, taken.outputs)); () }
  }

  def has(topology: String): Boolean = table.has(topology)

  /** The driver is gone: all that is finished is deleted, and what finishes from now on. */
  def abandon(): Unit = {
    val outputs = table.abandon()
    unconfirmed.clear()
    if (outputs.nonEmpty) { inPool(outputs.foreach(output => remove(output))); () }
  }

  /** Waits for all deletions that have begun, at most so long: a process that ends cuts them off. */
  def awaitDeletions(ms: Long): Unit =
    try { CompletableFuture.allOf(deletions.toArray(Array.empty[CompletableFuture[_]]): _*).get(ms, TimeUnit.MILLISECONDS); () }
    catch { case _: TimeoutException => Log.log.warn(s"files of shuffles are still being deleted after $ms ms: some may stay") }

  /** Spark itself has deleted these. */
  def forget(shuffles: Iterable[Int], caches: Iterable[Int]): Unit = table.forget(shuffles, caches)

  /** Puts into the ledger what changed. Of the loop's thread, as is `inventory`. */
  def tell(): Unit = table.changed().foreach(tell)

  def tell(topology: String): Unit = {
    val stored = table.stored(topology)
    if (ledger.of(topology).stored != stored) ledger.change(topology)(_.copy(stored = stored))
  }

  /** The datasets of each topology, when the driver has not been told of them, or long ago; `always` when it has to be asked. */
  def inventory(always: Boolean): Option[String] = {
    val now = table.inventory
    quiet += 1
    telling = found.asScala.toSet
    if (!always && telling.isEmpty && said.contains(now) && (now.isEmpty || quiet < Quiet)) None
    else {
      said = Some(now)
      quiet = 0
      val node = Json.obj()
      val of = node.putObject("topologies")
      now.foreach { case (topology, (shuffles, caches)) =>
        val its = of.putObject(topology)
        its.set[JsonNode]("shuffles", Json.numbers(shuffles))
        its.set[JsonNode]("caches", Json.numbers(caches))
      }
      node.set[JsonNode]("found", Json.numbers(telling))
      Some(Json.write(node))
    }
  }

  /** Whether the driver heard of the last one. */
  def answered(heard: Boolean): Unit = if (heard) telling.foreach(found.remove) else said = None

  def isEmpty: Boolean = table.isEmpty

  private def inPool[T](f: => T): CompletableFuture[T] = {
    val done = CompletableFuture.supplyAsync[T](() => f, pool)
    deletions.add(done)
    done.whenComplete((_, _) => { deletions.remove(done); () })
    done
  }

  private def delete(topology: String, outputs: Map[Output, Long]): Unit = if (outputs.nonEmpty) {
    val (gone, left) = outputs.partition { case (output, _) => remove(output) }
    count(topology, gone, left.size.toLong)
  }

  /** Counts partitions that are gone for certain, and those that could not be deleted. */
  private def count(topology: String, gone: Map[_, Long], failures: Long): Unit = if (gone.nonEmpty || failures > 0) {
    ledger.change(topology)(c => c.copy(released = c.released + gone.size, releasedBytes = c.releasedBytes + gone.valuesIterator.sum,
      releaseFailures = c.releaseFailures + failures))
  }

  private def removeStale(before: Map[Int, Long]): Unit =
    if (before.nonEmpty) disk.outputsOf(before.keySet).filter(output => output.map < before(output.shuffle)).foreach { output =>
      remove(output)
      found.add(output.shuffle)
    }

  /** Deletes an output. Returns whether it is gone; if not, the log says why. */
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
  /** What a writer tells. */
  private[stagecrew] trait Booking {
    def finished(lengths: Array[Long]): Unit
    def failed(): Unit

    final def unlessItFails[T](f: => T): T =
      try f catch { case error: Throwable => failed(); throw error }
  }

  /** Where outputs lie. */
  private[stagecrew] trait Disk {
    /** Deletes an output. Returns whether none of its files is left. */
    def delete(output: Output): Boolean
    /** Whether a cached block is here. */
    def has(block: CachedBlock): Boolean
    /** Whatever is here of these shuffles, booked or not: another executor that was decommissioned may have sent it. */
    def outputsOf(shuffles: Set[Int]): Seq[Output]
  }

  /** An inventory that did not change is told again after so many reports: the driver may have forgotten. */
  private val Quiet = 10

  /** It is looked at the disks once in so many times. */
  private val Looks = 4

  // Spark makes the ShuffleDataIO by its name, in the same JVM; there is one executor in each.
  @volatile private var current = Option.empty[Partitions]

  def here: Option[Partitions] = current

  private[stagecrew] def serve(partitions: Partitions): Unit = current = Some(partitions)
  private[stagecrew] def stop(partitions: Partitions): Unit = if (current.contains(partitions)) current = None
}
