package org.apache.spark.stagecrew

import java.util.concurrent.Executors
import org.scalatest.{BeforeAndAfterEach, OneInstancePerTest}
import org.scalatest.funsuite.AnyFunSuite
import scala.collection.mutable
import org.apache.spark.stagecrew.executor.{Ledger, PartitionCounts}
import org.apache.spark.stagecrew.partitions.{CachedBlock, Ending, Output, Partitions, Deletions}
import org.apache.spark.stagecrew.wire.{Description, Json}

/** The deletions, counts and reports of an executor's partitions. A list simulates the disk. */
class PartitionsSuite extends AnyFunSuite with OneInstancePerTest with BeforeAndAfterEach {
  private val stored = mutable.Set.empty[CachedBlock]
  private val deleted = mutable.Buffer.empty[Output]
  private val pool = Executors.newCachedThreadPool()
  private val ledger = new Ledger
  private val owners = mutable.Map.empty[Long, String]
  private val partitions = new Partitions(owners.get, ledger, pool, new Partitions.Disk {
    override def delete(output: Output): Boolean = {
      if (output.shuffle == 13) throw new java.io.IOException("a disk that fails")
      output.shuffle != 14 && deleted.synchronized { deleted += output; true } // for shuffle 14, a file remains although Spark reports no error
    }
    override def has(block: CachedBlock): Boolean = stored.contains(block)
    override def outputsOf(shuffles: Set[Int]): Seq[Output] = shuffles.toSeq.sorted.map(Output(_, 99))
  })

  override def afterEach(): Unit = pool.shutdown()

  private def write(attempt: Long, owner: String, shuffle: Int, bytes: Long = 10): Partitions.Booking = {
    owners(attempt) = owner
    val booking = partitions.setUp(attempt, Output(shuffle, attempt)).get
    booking.finished(Array(bytes / 2, bytes - bytes / 2))
    booking
  }

  test("attempts of no topology are not booked") {
    assert(partitions.setUp(1, Output(0, 1)).isEmpty)
    assert(partitions.isEmpty)
  }

  test("a release deletes outputs and counts them; a second one does nothing") {
    write(1, "a", 0)
    write(2, "a", 1)
    partitions.end("a", Ending(outputs = true))
    assert(partitions.release("a", Map.empty).get().outputs.keySet == Set(Output(0, 1), Output(1, 2)))
    assert(deleted.toSet == Set(Output(0, 1), Output(1, 2)))
    assert(partitions.release("a", Map.empty).get() == Deletions())
    assert(ledger.of("a").partitions.released == 2)
    assert(ledger.of("a").partitions.releasedBytes == 20)
    assert(partitions.isEmpty)
  }

  test("an output that finishes after the end is deleted before its writer returns") {
    owners(1) = "a"
    val booking = partitions.setUp(1, Output(0, 1)).get
    partitions.end("a", Ending(outputs = true))
    booking.finished(Array(10))
    assert(deleted == Seq(Output(0, 1)))
    assert(ledger.of("a").partitions.released == 1)
  }

  test("a file that cannot be deleted does not stop the others, and counts as a failure") {
    write(1, "a", 13, bytes = 1)
    write(2, "a", 1, bytes = 20)
    write(3, "a", 14, bytes = 300)
    partitions.end("a", Ending(outputs = true))
    partitions.release("a", Map.empty).get()
    assert(deleted == Seq(Output(1, 2)))
    assert(partitions.isEmpty)
    val counts = ledger.of("a").partitions
    assert((counts.released, counts.releasedBytes, counts.releaseFailures) == (1, 20, 2))
    assert(ledger.of("a").totals.released == 1 && ledger.of("a").totals.releasedBytes == 20)
  }

  test("a late output that cannot be deleted counts as a failure") {
    owners(1) = "a"
    val booking = partitions.setUp(1, Output(14, 1)).get
    partitions.end("a", Ending(outputs = true))
    booking.finished(Array(10))
    assert(ledger.of("a").partitions.released == 0 && ledger.of("a").partitions.releaseFailures == 1)
  }

  test("after the driver has unpersisted datasets, deleted blocks count as released, others as failures") {
    val blocks = Seq(CachedBlock(7, 0) -> 5L, CachedBlock(7, 1) -> 6L, CachedBlock(8, 0) -> 70L)
    owners(1) = "a"
    partitions.attemptEnded(1, blocks.map { case (block, bytes) => block -> Some(bytes) })
    stored ++= blocks.map(_._1)
    partitions.end("a", Ending(outputs = true, blocks = true))
    assert(partitions.release("a", Map.empty).get().caches == Set(7, 8))
    assert(partitions.awaitsUnpersist("a") && ledger.of("a").partitions.released == 0)
    stored -= CachedBlock(7, 0)
    partitions.unpersisted("a", Set(7)) // dataset 8 is used again
    partitions.unpersisted("a", Set(7))
    val counts = ledger.of("a").partitions
    assert((counts.released, counts.releasedBytes, counts.releaseFailures) == (1, 5, 1))
    assert(!partitions.awaitsUnpersist("a"))
  }

  test("outputs from a decommissioned executor are deleted, but newer outputs of the shuffle are not") {
    partitions.release("a", Map(4 -> 100L, 5 -> 99L, 6 -> 150L)).get()
    assert(deleted == Seq(Output(4, 99), Output(6, 99)))
    partitions.stale(Map(7 -> 100L, 8 -> 99L))
    partitions.awaitDeletions(10000)
    assert(deleted == Seq(Output(4, 99), Output(6, 99), Output(7, 99)))
    // The shuffle is reported to the driver, so that Spark knows that the executor does not store it.
    def found(): Option[Set[Int]] = partitions.inventory(always = false).map(_.found.toSet)
    assert(found().contains(Set(4, 6, 7)))
    partitions.inventorySent(delivered = false)
    assert(found().contains(Set(4, 6, 7)))
    partitions.inventorySent(delivered = true)
    assert(found().isEmpty)
  }

  test("outputs of tasks of an ended topology are deleted when no topology uses the shuffle") {
    write(1, Description.Application, 0)
    write(2, Description.Application, 1)
    write(3, "b", 0)
    partitions.end("b", Ending(outputs = true, unclaimed = Set(0)))
    assert(partitions.has("b"))
    assert(partitions.release("b", Map.empty).get().outputs.keySet == Set(Output(0, 1), Output(0, 3)))
    assert(!partitions.has("b"))
    assert(deleted.toSet == Set(Output(0, 1), Output(0, 3)))
    partitions.unclaimed(Seq(1, 7))
    org.scalatest.concurrent.Eventually.eventually(assert(deleted.contains(Output(1, 2))))
    assert(partitions.isEmpty)
  }

  test("a failed writer has no output in progress") {
    owners(1) = "a"
    val booking = partitions.setUp(1, Output(0, 1)).get
    assertThrows[IllegalStateException](booking.reportingFailure(throw new IllegalStateException))
    assert(partitions.isEmpty)
  }

  test("the ledger contains the stored partitions, and changes only when they change") {
    write(1, "a", 0)
    partitions.attemptEnded(1, Seq(CachedBlock(7, 0) -> Some(5L)))
    partitions.updateLedger()
    assert(ledger.of("a").partitions == PartitionCounts(outputs = 1, outputBytes = 10, blocks = 1, blockBytes = 5))
    val (number, _) = ledger.report().get
    ledger.delivered(number)
    partitions.updateLedger()
    assert(ledger.report().isEmpty)
  }

  test("an inventory is sent after changes, periodically, and after a failed delivery") {
    assert(partitions.inventory(always = false).isEmpty)
    write(1, "a", 0)
    val inventory = partitions.inventory(always = false).get
    assert(Json.write(inventory) == """{"topologies":{"a":{"shuffles":[0],"caches":[]}},"found":[]}""")
    assert(partitions.inventory(always = false).isEmpty)
    partitions.inventorySent(delivered = false)
    assert(partitions.inventory(always = false).contains(inventory))
    assert(Iterator.continually(partitions.inventory(always = false)).take(11).flatten.toSeq == Seq(inventory))
  }

  test("without a driver everything is deleted") {
    write(1, "a", 0)
    owners(2) = "b"
    val booking = partitions.setUp(2, Output(0, 2)).get
    partitions.driverLost()
    partitions.awaitDeletions(10000)
    assert(deleted == Seq(Output(0, 1)))
    booking.finished(Array(1))
    assert(deleted == Seq(Output(0, 1), Output(0, 2)))
  }

  test("an executor that ends without a driver waits for its deletions, within the timeout") {
    (0L until 5000L).foreach(write(_, "a", 0))
    partitions.release("a", Map.empty).get() // the executor shuts down, and the driver has not ended the topology
    assert(deleted.isEmpty)
    deleted.synchronized {
      partitions.driverLost()
      partitions.driverLost() // called again during shutdown
      partitions.awaitDeletions(1)
      assert(deleted.isEmpty)
    }
    partitions.awaitDeletions(60000)
    assert(deleted.size == 5000)
  }
}
