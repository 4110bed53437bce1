package org.apache.spark.stagecrew

import java.util.concurrent.Executors
import org.scalatest.{BeforeAndAfterEach, OneInstancePerTest}
import org.scalatest.funsuite.AnyFunSuite
import scala.collection.immutable.VectorMap
import scala.collection.mutable
import org.apache.spark.stagecrew.executor.{Ledger, PartitionCounts}
import org.apache.spark.stagecrew.partitions.{CachedBlock, Deletions, Output, Partitions, Release}
import org.apache.spark.stagecrew.wire.{Description, Json}

/** Tests how an executor deletes, counts and reports partitions. A list of deleted outputs simulates the disk. */
class PartitionsSuite extends AnyFunSuite with OneInstancePerTest with BeforeAndAfterEach {
  private val stored = mutable.Set.empty[CachedBlock]
  private val deleted = mutable.Buffer.empty[Output]
  private val pool = Executors.newCachedThreadPool()
  private val ledger = new Ledger
  private val owners = mutable.Map.empty[Long, String]
  private val partitions = new Partitions(owners.get, ledger, pool, new Partitions.Disk {
    override def delete(output: Output): Boolean = {
      if (output.shuffle == 13) throw new java.io.IOException("a disk that fails")
      // For shuffle 14, a file remains, although Spark reports no error.
      output.shuffle != 14 && deleted.synchronized { deleted += output; true }
    }
    override def has(block: CachedBlock): Boolean = stored.contains(block)
    override def outputsOf(shuffles: Set[Int]): Seq[Output] =
      if (shuffles(15)) throw new java.io.IOException("a folder that cannot be listed")
      else shuffles.toSeq.sorted.map(Output(_, 99))
  })

  override def afterEach(): Unit = pool.shutdown()

  private def write(attempt: Long, owner: String, shuffle: Int, bytes: Long = 10): Partitions#OutputInProgress = {
    owners(attempt) = owner
    val output = partitions.setUp(Output(shuffle, attempt)).get
    output.finished(Array(bytes / 2, bytes - bytes / 2))
    output
  }

  test("the output of an attempt without a topology is not recorded") {
    assert(partitions.setUp(Output(0, 1)).isEmpty)
    assert(partitions.table.isEmpty)
  }

  test("a release deletes outputs and counts them, and a second release does nothing") {
    write(1, "a", 0)
    write(2, "a", 1)
    partitions.table.end("a", Release(deleteOutputs = true))
    assert(partitions.release("a", Map.empty).get().outputs.keySet == Set(Output(0, 1), Output(1, 2)))
    assert(deleted.toSet == Set(Output(0, 1), Output(1, 2)))
    assert(partitions.release("a", Map.empty).get() == Deletions())
    assert(ledger.of("a").partitions.released == 2)
    assert(ledger.of("a").partitions.releasedBytes == 20)
    assert(partitions.table.isEmpty)
  }

  test("an output that finishes after the end of its topology is deleted before its writer returns") {
    owners(1) = "a"
    val output = partitions.setUp(Output(0, 1)).get
    partitions.table.end("a", Release(deleteOutputs = true))
    output.finished(Array(10))
    assert(deleted == Seq(Output(0, 1)))
    assert(ledger.of("a").partitions.released == 1)
  }

  test("an output that cannot be deleted counts as a failure, and the other outputs are still deleted") {
    write(1, "a", 13, bytes = 1)
    write(2, "a", 1, bytes = 20)
    write(3, "a", 14, bytes = 300)
    partitions.table.end("a", Release(deleteOutputs = true))
    partitions.release("a", Map.empty).get()
    assert(deleted == Seq(Output(1, 2)))
    assert(partitions.table.isEmpty)
    val counts = ledger.of("a").partitions
    assert((counts.released, counts.releasedBytes, counts.releaseFailures) == (1, 20, 2))
    assert(ledger.of("a").totals.released == 1 && ledger.of("a").totals.releasedBytes == 20)
  }

  test("a late output that cannot be deleted counts as a failure") {
    owners(1) = "a"
    val output = partitions.setUp(Output(14, 1)).get
    partitions.table.end("a", Release(deleteOutputs = true))
    output.finished(Array(10))
    assert(ledger.of("a").partitions.released == 0 && ledger.of("a").partitions.releaseFailures == 1)
  }

  test("after the driver has unpersisted datasets, deleted blocks count as released, and remaining blocks as failures") {
    val blocks = Seq(CachedBlock(7, 0) -> 5L, CachedBlock(7, 1) -> 6L, CachedBlock(8, 0) -> 70L)
    owners(1) = "a"
    partitions.attemptEnded(1, blocks.map { case (block, bytes) => block -> Some(bytes) })
    stored ++= blocks.map(_._1)
    partitions.table.end("a", Release(deleteOutputs = true, deleteBlocks = true))
    assert(partitions.release("a", Map.empty).get().caches == Set(7, 8))
    assert(partitions.awaitsUnpersist("a") && ledger.of("a").partitions.released == 0)
    stored -= CachedBlock(7, 0)
    partitions.unpersisted("a", Set(7)) // dataset 8 is used again
    partitions.unpersisted("a", Set(7))
    val counts = ledger.of("a").partitions
    assert((counts.released, counts.releasedBytes, counts.releaseFailures) == (1, 5, 1))
    assert(!partitions.awaitsUnpersist("a"))
  }

  test("cached blocks whose release the driver never confirms are counted if they are gone") {
    owners(1) = "a"
    val (gone, left) = (CachedBlock(7, 0), CachedBlock(8, 0))
    partitions.attemptEnded(1, Seq(gone -> Some(5L), left -> Some(6L)))
    partitions.table.end("a", Release(deleteBlocks = true))
    partitions.release("a", Map.empty).get()
    stored += left
    partitions.expireUnpersisted("a")
    val counts = ledger.of("a").partitions
    assert((counts.released, counts.releasedBytes, counts.releaseFailures) == (1, 5, 0))
    assert(!partitions.awaitsUnpersist("a"))
  }

  test("outputs from a decommissioned executor are deleted, but newer outputs of the shuffle are not") {
    partitions.release("a", Map(4 -> 100L, 5 -> 99L, 6 -> 150L)).get()
    assert(deleted == Seq(Output(4, 99), Output(6, 99)))
    partitions.deleteStale(Map(7 -> 100L, 8 -> 99L))
    partitions.awaitDeletions(10000)
    assert(deleted == Seq(Output(4, 99), Output(6, 99), Output(7, 99)))
    // The shuffle is reported to the driver, so that Spark knows that the executor does not store it.
    def found(): Option[Set[Int]] = partitions.inventory(always = false).map(_.found.toSet)
    assert(found().contains(Set(4, 6, 7)))
    partitions.inventoryLost()
    assert(found().contains(Set(4, 6, 7)))
    val inventory = partitions.inventory(always = false).get
    partitions.release("b", Map(9 -> 100L)).get()
    assert(found().contains(Set(4, 6, 7, 9))) // before the driver has the first inventory
    partitions.inventoryDelivered(inventory)
    assert(found().contains(Set(9)))
    partitions.inventoryDelivered(partitions.inventory(always = false).get)
    assert(found().isEmpty)
  }

  test("if the outputs of a shuffle cannot be listed, a release reports the outputs that it deleted") {
    write(1, "a", 0)
    partitions.table.end("a", Release(deleteOutputs = true))
    assert(partitions.release("a", Map(15 -> 100L)).get().outputs.keySet == Set(Output(0, 1)))
    partitions.deleteStale(Map(15 -> 100L))
    partitions.awaitDeletions(10000)
  }

  test("the application's outputs of a shuffle are deleted when no topology uses the shuffle") {
    write(1, Description.Application, 0)
    write(2, Description.Application, 1)
    write(3, "b", 0)
    partitions.table.end("b", Release(deleteOutputs = true, shuffles = Vector(0)))
    assert(partitions.table.has("b"))
    assert(partitions.release("b", Map.empty).get().outputs.keySet == Set(Output(0, 1), Output(0, 3)))
    assert(!partitions.table.has("b"))
    assert(deleted.toSet == Set(Output(0, 1), Output(0, 3)))
    partitions.deleteUnclaimed(Seq(1, 7))
    org.scalatest.concurrent.Eventually.eventually(assert(deleted.contains(Output(1, 2))))
    assert(partitions.table.isEmpty)
  }

  test("if a writer fails, its output is not in progress any more") {
    owners(1) = "a"
    val output = partitions.setUp(Output(0, 1)).get
    assertThrows[IllegalStateException](output.reportingFailure(throw new IllegalStateException))
    assert(partitions.table.isEmpty)
  }

  test("the ledger contains the counts of stored partitions, and changes only when the counts change") {
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
    partitions.inventoryLost()
    assert(partitions.inventory(always = false).contains(inventory))
    assert(Iterator.continually(partitions.inventory(always = false)).take(11).flatten.toSeq == Seq(inventory))
  }

  test("an executor receives a release as the driver sent it") {
    val release = Release(deleteOutputs = true, deleteBlocks = true, 7, Vector(1, 2), Vector(3),
      VectorMap(4 -> "a", 5 -> Description.Application))
    assert(Json.read[Release](Json.write(release)) == release)
  }

  test("if the driver is lost, all outputs are deleted") {
    write(1, "a", 0)
    owners(2) = "b"
    val output = partitions.setUp(Output(0, 2)).get
    partitions.driverLost()
    partitions.awaitDeletions(10000)
    assert(deleted == Seq(Output(0, 1)))
    output.finished(Array(1))
    assert(deleted == Seq(Output(0, 1), Output(0, 2)))
  }

  test("an executor whose driver is lost waits for its deletions before it ends, within the timeout") {
    (0L until 5000L).foreach(write(_, "a", 0))
    partitions.release("a", Map.empty).get() // the executor shuts down before the driver has ended the topology
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
