package org.apache.spark.stagecrew

import org.scalatest.OneInstancePerTest
import org.scalatest.funsuite.AnyFunSuite
import scala.collection.immutable.VectorMap
import scala.util.Random
import org.apache.spark.stagecrew.executor.PartitionCounts
import org.apache.spark.stagecrew.partitions.{CachedBlock, Datasets, Deletions, Output, PartitionTable, Release}
import org.apache.spark.stagecrew.wire.Description

/** Tests the table of stored partitions in single cases. Also runs all short and many long sequences of operations, and
  * compares the table with a model of plain sets. */
class PartitionTableSuite extends AnyFunSuite with OneInstancePerTest {
  private val table = new PartitionTable

  private def write(attempt: Long, owner: String, shuffle: Int, bytes: Long = 10): Option[String] = {
    table.setUp(owner, Output(shuffle, attempt))
    table.finished(Output(shuffle, attempt), bytes)
  }

  test("an output is in progress until it is finished, it has failed, or its attempt ends") {
    table.setUp("a", Output(0, 1))
    table.setUp("a", Output(0, 2))
    table.setUp("a", Output(0, 3))
    assert(table.counts("a") == PartitionCounts(inProgress = 3))
    assert(table.inventory.isEmpty)
    assert(table.finished(Output(0, 1), 10).isEmpty)
    table.failed(Output(0, 2))
    table.attemptEnded(3)
    assert(table.counts("a") == PartitionCounts(outputs = 1, outputBytes = 10))
    assert(table.inventory == VectorMap("a" -> Datasets(Vector(0), Vector.empty)))
  }

  test("at the end of an attempt, its finished outputs are kept, and its unfinished outputs are forgotten") {
    write(1, "a", 0)
    table.setUp("a", Output(1, 1))
    table.attemptEnded(1)
    assert(table.finished(Output(1, 1), 10).isEmpty)
    assert(table.counts("a") == PartitionCounts(outputs = 1, outputBytes = 10))
  }

  test("outputs of two attempts of one partition count twice; an output that is written twice counts once") {
    write(1, "a", 0)
    write(2, "a", 0)
    write(2, "a", 0, bytes = 30)
    assert(table.counts("a") == PartitionCounts(outputs = 2, outputBytes = 40))
  }

  test("`release` returns all finished outputs of the topology, and no other outputs") {
    write(1, "a", 0)
    write(2, "a", 1)
    write(3, "b", 2)
    table.setUp("a", Output(1, 4))
    table.end("a", Release(deleteOutputs = true))
    assert(table.release("a") == Deletions(Map(Output(0, 1) -> 10L, Output(1, 2) -> 10L)))
    assert(table.counts("a") == PartitionCounts(inProgress = 1))
    assert(table.counts("b") == PartitionCounts(outputs = 1, outputBytes = 10))
    assert(table.release("a") == Deletions())
  }

  test("an output that finishes after the end of its topology is deleted by its task's thread") {
    table.setUp("a", Output(0, 1))
    table.end("a", Release(deleteOutputs = true))
    assert(table.finished(Output(0, 1), 10).contains("a"))
    assert(table.release("a") == Deletions())
    assert(table.isEmpty)
  }

  test("outputs pass to heirs even if they finish late, and outputs that pass to the application are forgotten") {
    write(1, "a", 0)
    write(2, "a", 1)
    table.setUp("a", Output(0, 3))
    table.setUp("a", Output(1, 4))
    table.end("a", Release(deleteOutputs = true, heirs = VectorMap(0 -> "b", 1 -> Description.Application)))
    assert(table.finished(Output(0, 3), 10).isEmpty)
    assert(table.finished(Output(1, 4), 10).isEmpty)
    assert(table.release("a") == Deletions())
    assert(table.counts("b") == PartitionCounts(outputs = 2, outputBytes = 20))
    table.end("b", Release(deleteOutputs = true))
    assert(table.release("b").outputs.keySet == Set(Output(0, 1), Output(0, 3)))
    assert(table.isEmpty)
  }

  test("an heir owns inherited outputs immediately, and its release returns them") {
    write(1, "a", 0)
    table.setUp("a", Output(0, 2))
    table.setUp("a", Output(0, 3))
    table.end("a", Release(deleteOutputs = true, heirs = VectorMap(0 -> "b"))) // its listeners close slowly
    assert(table.counts("b") == PartitionCounts(outputs = 1, outputBytes = 10))
    assert(table.finished(Output(0, 2), 10).isEmpty)
    table.end("b", Release(deleteOutputs = true))
    assert(table.release("b").outputs.keySet == Set(Output(0, 1), Output(0, 2)))
    assert(table.finished(Output(0, 3), 10).contains("a"))
    assert(table.release("a") == Deletions())
    assert(table.isEmpty)
  }

  test("outputs pass from heir to heir in whichever order the topologies end") {
    for (order <- Seq("a", "b", "c").permutations) {
      val table = new PartitionTable
      table.setUp("a", Output(0, 1))
      table.finished(Output(0, 1), 10)
      table.setUp("a", Output(0, 2))
      val endings = Map("a" -> Release(deleteOutputs = true, heirs = VectorMap(0 -> "b")),
        "b" -> Release(deleteOutputs = true, heirs = VectorMap(0 -> "c")),
        "c" -> Release(deleteOutputs = true, heirs = VectorMap(0 -> Description.Application)))
      order.foreach(topology => table.end(topology, endings(topology)))
      assert(table.finished(Output(0, 2), 10).isEmpty, order) // passes to the application
      order.foreach(topology => assert(table.release(topology) == Deletions(), order))
      assert(table.isEmpty, order)
    }
  }

  test("the end of a topology releases the application's outputs of unused shuffles, but not its later outputs") {
    write(1, Description.Application, 0)
    write(2, Description.Application, 1)
    table.end("a", Release(deleteOutputs = true, shuffles = Vector(0)))
    write(3, Description.Application, 0) // written by a job that began while the listeners closed
    assert(table.release("a") == Deletions(Map(Output(0, 1) -> 10L)))
    assert(table.counts(Description.Application) == PartitionCounts(outputs = 2, outputBytes = 20))
  }

  test("if an executor shuts down before the driver has ended a topology, the table keeps the topology's outputs") {
    write(1, "a", 0)
    assert(table.release("a") == Deletions())
    assert(table.driverLost() == Seq(Output(0, 1)))
  }

  test("a block that is stored again is counted once, with its last size, and is released only if the policy says so") {
    table.blockChanged("a", CachedBlock(1, 0), Some(5))
    table.blockChanged("a", CachedBlock(1, 0), Some(7))
    table.blockChanged("a", CachedBlock(2, 0), Some(1))
    table.blockChanged("a", CachedBlock(3, 0), Some(1))
    table.blockChanged("b", CachedBlock(2, 0), None)
    assert(table.counts("a") == PartitionCounts(blocks = 2, blockBytes = 8))
    table.end("a", Release(deleteOutputs = true, deleteBlocks = true, keptCaches = Vector(3)))
    assert(table.release("a") == Deletions(blocks = Map(CachedBlock(1, 0) -> 7L)))
    table.blockChanged("b", CachedBlock(4, 0), Some(5))
    table.end("b", Release(deleteOutputs = true))
    assert(table.release("b") == Deletions())
    assert(table.isEmpty)
  }

  test("datasets that Spark has deleted are forgotten, and unknown ids are ignored") {
    write(1, "a", 0)
    write(2, "a", 1)
    table.blockChanged("a", CachedBlock(1, 0), Some(5))
    table.forget(Seq(0, 77), Seq(1, 77))
    assert(table.counts("a") == PartitionCounts(outputs = 1, outputBytes = 10))
    table.failed(Output(9, 9))
    table.attemptEnded(9)
    assert(table.finished(Output(9, 9), 1).isEmpty)
    assert(table.release("nobody") == Deletions())
    table.forget(Seq(1), Nil)
    assert(table.isEmpty)
  }

  test("the first end of a topology applies until its release, and a second end changes nothing") {
    write(1, "a", 0)
    table.end("a", Release(deleteOutputs = true))
    table.end("a", Release(deleteOutputs = false))
    assert(table.release("a").outputs.keySet == Set(Output(0, 1)))
  }

  test("if the driver is lost, all finished outputs are deleted, including outputs that finish later") {
    write(1, "a", 0)
    table.setUp("b", Output(0, 2))
    assert(table.driverLost() == Seq(Output(0, 1)))
    assert(table.finished(Output(0, 2), 10).contains("b"))
    table.blockChanged("a", CachedBlock(1, 0), Some(5))
    assert(table.isEmpty)
  }

  test("`takeChanged` returns each changed topology once") {
    write(1, "a", 0)
    assert(table.takeChanged() == Set("a"))
    assert(table.takeChanged().isEmpty)
    table.blockChanged("b", CachedBlock(1, 0), Some(5))
    table.forget(Seq(0), Seq(1))
    assert(table.takeChanged() == Set("a", "b"))
  }

  // -- Comparison with a model

  private val topologies = Seq("a", "b")
  private type Operation = (PartitionTable, Model) => Unit

  /** A model of the table: plain sets of the stored partitions. */
  private final class Model {
    var progress = Set.empty[(Long, String, Output)]
    var outputs = Map.empty[(String, Output), Long]
    var blocks = Map.empty[(String, CachedBlock), Long]
    var endings = Map.empty[String, Release]

    def finished(attempt: Long, output: Output, bytes: Long): Option[String] =
      progress.find(p => p._1 == attempt && p._3 == output).flatMap { found =>
        progress -= found
        endings.get(found._2) match {
          case None => outputs += (found._2, output) -> bytes; None
          case Some(ending) if ending.heirs.contains(output.shuffle) =>
            outputs ++= inherited(ending.heirs, output, bytes)
            None
          case Some(ending) => if (ending.deleteOutputs) Some(found._2) else None
        }
      }

    private def inherited(heirs: Map[Int, String], output: Output, bytes: Long): Map[(String, Output), Long] =
      heirs.get(output.shuffle).filter(_ != Description.Application).map(heir => (heir, output) -> bytes).toMap

    def end(topology: String, ending: Release): Unit = if (!endings.contains(topology)) {
      def after(heirs: VectorMap[Int, String]): VectorMap[Int, String] = heirs.flatMap { case (shuffle, heir) =>
        endings.get(heir) match {
          case None => Some(shuffle -> heir)
          case Some(ended) if ended.heirs.contains(shuffle) => Some(shuffle -> ended.heirs(shuffle))
          case Some(ended) => if (ended.deleteOutputs) None else Some(shuffle -> Description.Application)
        }
      }
      endings += topology -> ending.copy(heirs = after(ending.heirs))
      endings = endings.map { case (other, ending) => other -> ending.copy(heirs = after(ending.heirs)) }
      val heirs = endings(topology).heirs
      outputs = outputs.flatMap {
        case ((`topology`, output), bytes) if heirs.contains(output.shuffle) => inherited(heirs, output, bytes)
        case other => Map(other)
      }
    }

    def release(topology: String): Deletions = if (!endings.contains(topology)) Deletions() else {
      val ending = endings(topology)
      endings -= topology
      val (alone, others) = outputs.partition(_._1._1 == topology)
      outputs = others
      val (blocked, otherBlocks) = blocks.partition(_._1._1 == topology)
      blocks = otherBlocks
      val gone = blocked.filter(b => ending.deleteBlocks && !ending.keptCaches.contains(b._1._2.rdd))
      Deletions(
        if (ending.deleteOutputs) alone.map { case ((_, output), bytes) => output -> bytes } else Map.empty,
        gone.map { case ((_, block), bytes) => block -> bytes })
    }

    def counts(topology: String): PartitionCounts = {
      val ofTopology = outputs.filter(_._1._1 == topology)
      val blocked = blocks.filter(_._1._1 == topology)
      PartitionCounts(progress.count(_._2 == topology).toLong, ofTopology.size.toLong, ofTopology.values.sum,
        blocked.size.toLong, blocked.values.sum)
    }
  }

  private def operations: IndexedSeq[Operation] = {
    val writes = for ((attempt, owner, shuffle) <- Seq((1L, "a", 0), (2L, "a", 1), (3L, "b", 0))) yield {
      val output = Output(shuffle, attempt)
      Seq[Operation](
        (t, m) => { t.setUp(owner, output); m.progress += ((attempt, owner, output)) },
        (t, m) => assert(t.finished(output, attempt) == m.finished(attempt, output, attempt)),
        (t, m) => { t.attemptEnded(attempt); m.progress = m.progress.filterNot(_._1 == attempt) })
    }
    val ends = Seq[(String, Release)](
      "a" -> Release(deleteOutputs = true, deleteBlocks = true, heirs = VectorMap(0 -> "b"), keptCaches = Vector(1)),
      "a" -> Release(deleteOutputs = false),
      "b" -> Release(deleteOutputs = true, heirs = VectorMap(0 -> Description.Application))
    ).map { case (topology, ending) =>
      ((t, m) => { t.end(topology, ending); m.end(topology, ending) }): Operation
    }
    val takes = topologies.map { topology =>
      ((t, m) => {
        val (found, expected) = (t.release(topology), m.release(topology))
        assert(found == expected)
        ()
      }): Operation
    }
    val others = Seq[Operation](
      (t, m) => {
        t.blockChanged("a", CachedBlock(2, 0), Some(3))
        if (!m.endings.contains("a")) m.blocks += ("a", CachedBlock(2, 0)) -> 3L
      },
      (t, m) => {
        t.blockChanged("b", CachedBlock(2, 0), None)
        m.blocks = m.blocks.filterNot(_._1._2 == CachedBlock(2, 0))
      },
      (t, m) => {
        t.forget(Seq(0), Seq(2))
        m.outputs = m.outputs.filterNot(_._1._2.shuffle == 0)
        m.blocks = m.blocks.filterNot(_._1._2.rdd == 2)
      })
    (writes.flatten ++ ends ++ takes ++ others).toIndexedSeq
  }

  private def compare(order: Seq[Int]): Unit = {
    val (table, model, all) = (new PartitionTable, new Model, every)
    order.foreach { i =>
      all(i)(table, model)
      topologies.foreach(topology => assert(table.counts(topology) == model.counts(topology), order))
      assert(table.inventory.keySet == model.outputs.keySet.map(_._1) ++ model.blocks.keySet.map(_._1), order)
    }
    val isEmpty = Seq(model.progress, model.outputs, model.blocks, model.endings).forall(_.isEmpty)
    assert(table.isEmpty == isEmpty, order)
  }
  private lazy val every = operations

  test("all sequences of four operations match a model of plain sets") {
    val n = every.size
    for (a <- 0 until n; b <- 0 until n; c <- 0 until n; d <- 0 until n) compare(Seq(a, b, c, d))
  }

  test("20,000 random sequences of thirty operations match a model of plain sets") {
    val random = new Random(5)
    (0 until 20000).foreach(_ => compare(Seq.fill(30)(random.nextInt(every.size))))
  }

  test("an operation takes as long in a table of 100,000 partitions as in one of 1,000") {
    def nanos(size: Int): Double = {
      val table = new PartitionTable
      (0 until size).foreach { i =>
        table.setUp(s"t${i % 100}", Output(i % 1000, i.toLong))
        table.finished(Output(i % 1000, i.toLong), 1)
      }
      val rounds = (0 until 101).map { round =>
        val started = System.nanoTime()
        (0 until 20).foreach { i =>
          val attempt = size + round * 20L + i
          table.setUp(s"t${i % 100}", Output(i % 1000, attempt))
          table.finished(Output(i % 1000, attempt), 1)
          table.attemptEnded(attempt)
        }
        (System.nanoTime() - started) / 20.0
      }
      rounds.sorted.apply(rounds.size / 2)
    }
    val sizes = Seq(1000, 10000, 100000)
    (0 until 3).foreach(_ => sizes.foreach(nanos)) // warm-up
    // The sizes take turns, so that a busy machine affects all of them.
    val turns = (0 until 5).map(_ => sizes.map(nanos))
    val times = sizes.zip(turns.transpose.map(_.sorted.apply(2)))
    info(times.map { case (size, time) => f"$size%,d partitions: $time%.0f ns for each output" }.mkString("; "))
    assert(times.last._2 < 5 * times.head._2) // a list would take a hundred times as long
  }
}
