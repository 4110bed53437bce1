package org.apache.spark.stagecrew

import org.scalatest.OneInstancePerTest
import org.scalatest.funsuite.AnyFunSuite
import scala.util.Random
import org.apache.spark.stagecrew.executor.PartitionCounts
import org.apache.spark.stagecrew.partitions.{CachedBlock, Ending, Output, PartitionTable, Deletions}
import org.apache.spark.stagecrew.wire.Description

/** The table of stored partitions: single cases, and all short and many long sequences of operations, compared with a
  * model of plain sets. */
class PartitionTableSuite extends AnyFunSuite with OneInstancePerTest {
  private val table = new PartitionTable

  private def write(attempt: Long, owner: String, shuffle: Int, bytes: Long = 10): Option[String] = {
    table.setUp(attempt, owner, Output(shuffle, attempt))
    table.finished(attempt, Output(shuffle, attempt), bytes)
  }

  test("an output is in progress until it is finished, failed, or its attempt ends") {
    table.setUp(1, "a", Output(0, 1))
    table.setUp(2, "a", Output(0, 2))
    table.setUp(3, "a", Output(0, 3))
    assert(table.stored("a") == PartitionCounts(inProgress = 3))
    assert(table.inventory.isEmpty)
    assert(table.finished(1, Output(0, 1), 10).isEmpty)
    table.failed(2, Output(0, 2))
    table.attemptEnded(3)
    assert(table.stored("a") == PartitionCounts(outputs = 1, outputBytes = 10))
    assert(table.inventory == Map("a" -> (Set(0), Set.empty)))
  }

  test("at the end of an attempt, finished outputs are kept, and the others are forgotten") {
    write(1, "a", 0)
    table.setUp(1, "a", Output(1, 1))
    table.attemptEnded(1)
    assert(table.finished(1, Output(1, 1), 10).isEmpty)
    assert(table.stored("a") == PartitionCounts(outputs = 1, outputBytes = 10))
  }

  test("two attempts of one partition are two outputs; an output that is written twice is one") {
    write(1, "a", 0)
    write(2, "a", 0)
    write(2, "a", 0, bytes = 30)
    assert(table.stored("a") == PartitionCounts(outputs = 2, outputBytes = 40))
  }

  test("release returns all finished outputs, and no others") {
    write(1, "a", 0)
    write(2, "a", 1)
    write(3, "b", 2)
    table.setUp(4, "a", Output(1, 4))
    table.end("a", Ending(outputs = true))
    assert(table.release("a") == Deletions(Map(Output(0, 1) -> 10L, Output(1, 2) -> 10L)))
    assert(table.stored("a") == PartitionCounts(inProgress = 1))
    assert(table.stored("b") == PartitionCounts(outputs = 1, outputBytes = 10))
    assert(table.release("a") == Deletions())
  }

  test("an output that finishes after the end of its topology is deleted by its task's thread") {
    table.setUp(1, "a", Output(0, 1))
    table.end("a", Ending(outputs = true))
    assert(table.finished(1, Output(0, 1), 10).contains("a"))
    assert(table.release("a") == Deletions())
    assert(table.isEmpty)
  }

  test("used outputs pass to heirs, even late ones; those that pass to the application are forgotten") {
    write(1, "a", 0)
    write(2, "a", 1)
    table.setUp(3, "a", Output(0, 3))
    table.setUp(4, "a", Output(1, 4))
    table.end("a", Ending(outputs = true, heirs = Map(0 -> Some("b"), 1 -> None)))
    assert(table.finished(3, Output(0, 3), 10).isEmpty)
    assert(table.finished(4, Output(1, 4), 10).isEmpty)
    assert(table.release("a") == Deletions())
    assert(table.stored("b") == PartitionCounts(outputs = 2, outputBytes = 20))
    table.end("b", Ending(outputs = true))
    assert(table.release("b").outputs.keySet == Set(Output(0, 1), Output(0, 3)))
    assert(table.isEmpty)
  }

  test("an heir owns inherited outputs immediately, and they are released with it") {
    write(1, "a", 0)
    table.setUp(2, "a", Output(0, 2))
    table.setUp(3, "a", Output(0, 3))
    table.end("a", Ending(outputs = true, heirs = Map(0 -> Some("b")))) // its listeners close slowly
    assert(table.stored("b") == PartitionCounts(outputs = 1, outputBytes = 10))
    assert(table.finished(2, Output(0, 2), 10).isEmpty)
    table.end("b", Ending(outputs = true))
    assert(table.release("b").outputs.keySet == Set(Output(0, 1), Output(0, 2)))
    assert(table.finished(3, Output(0, 3), 10).contains("a"))
    assert(table.release("a") == Deletions())
    assert(table.isEmpty)
  }

  test("outputs pass from heir to heir, whichever topology ends first") {
    for (order <- Seq("a", "b", "c").permutations) {
      val table = new PartitionTable
      table.setUp(1, "a", Output(0, 1))
      table.finished(1, Output(0, 1), 10)
      table.setUp(2, "a", Output(0, 2))
      val endings = Map("a" -> Ending(outputs = true, heirs = Map(0 -> Some("b"))),
        "b" -> Ending(outputs = true, heirs = Map(0 -> Some("c"))), "c" -> Ending(outputs = true, heirs = Map(0 -> None)))
      order.foreach(topology => table.end(topology, endings(topology)))
      assert(table.finished(2, Output(0, 2), 10).isEmpty, order) // passes to the application
      order.foreach(topology => assert(table.release(topology) == Deletions(), order))
      assert(table.isEmpty, order)
    }
  }

  test("the application's outputs of unused shuffles are released at the end, but later ones are not") {
    write(1, Description.Application, 0)
    write(2, Description.Application, 1)
    table.end("a", Ending(outputs = true, unclaimed = Set(0)))
    write(3, Description.Application, 0) // written by a job that began while the listeners closed
    assert(table.release("a") == Deletions(Map(Output(0, 1) -> 10L)))
    assert(table.stored(Description.Application) == PartitionCounts(outputs = 2, outputBytes = 20))
  }

  test("a topology that the driver has not ended remains booked when the executor shuts down") {
    write(1, "a", 0)
    assert(table.release("a") == Deletions())
    assert(table.driverLost() == Seq(Output(0, 1)))
  }

  test("blocks are counted where they were stored last, and released only if the policy says so") {
    table.block("a", CachedBlock(1, 0), Some(5))
    table.block("a", CachedBlock(1, 0), Some(7))
    table.block("a", CachedBlock(2, 0), Some(1))
    table.block("a", CachedBlock(3, 0), Some(1))
    table.block("b", CachedBlock(2, 0), None)
    assert(table.stored("a") == PartitionCounts(blocks = 2, blockBytes = 8))
    table.end("a", Ending(outputs = true, blocks = true, keptCaches = Set(3)))
    assert(table.release("a") == Deletions(blocks = Map(CachedBlock(1, 0) -> 7L)))
    table.block("b", CachedBlock(4, 0), Some(5))
    table.end("b", Ending(outputs = true))
    assert(table.release("b") == Deletions())
    assert(table.isEmpty)
  }

  test("datasets that Spark has deleted are forgotten, and unknown ids are ignored") {
    write(1, "a", 0)
    write(2, "a", 1)
    table.block("a", CachedBlock(1, 0), Some(5))
    table.forget(Seq(0, 77), Seq(1, 77))
    assert(table.stored("a") == PartitionCounts(outputs = 1, outputBytes = 10))
    table.failed(9, Output(9, 9))
    table.attemptEnded(9)
    assert(table.finished(9, Output(9, 9), 1).isEmpty)
    assert(table.release("nobody") == Deletions())
    table.forget(Seq(1), Nil)
    assert(table.isEmpty)
  }

  test("the first end of a topology wins, until it is released") {
    write(1, "a", 0)
    table.end("a", Ending(outputs = true))
    table.end("a", Ending(outputs = false))
    assert(table.release("a").outputs.keySet == Set(Output(0, 1)))
  }

  test("without a driver all finished outputs are deleted, including those that finish later") {
    write(1, "a", 0)
    table.setUp(2, "b", Output(0, 2))
    assert(table.driverLost() == Seq(Output(0, 1)))
    assert(table.finished(2, Output(0, 2), 10).contains("b"))
    table.block("a", CachedBlock(1, 0), Some(5))
    assert(table.isEmpty)
  }

  test("changed topologies are returned once") {
    write(1, "a", 0)
    assert(table.changed() == Set("a"))
    assert(table.changed().isEmpty)
    table.block("b", CachedBlock(1, 0), Some(5))
    table.forget(Seq(0), Seq(1))
    assert(table.changed() == Set("a", "b"))
  }

  // -- Comparison with a model

  private val topologies = Seq("a", "b")
  private type Operation = (PartitionTable, Model) => Unit

  /** A model of the table: plain sets of the stored partitions. */
  private final class Model {
    var progress = Set.empty[(Long, String, Output)]
    var outputs = Map.empty[(String, Output), Long]
    var blocks = Map.empty[(String, CachedBlock), Long]
    var endings = Map.empty[String, Ending]

    def finished(attempt: Long, output: Output, bytes: Long): Option[String] =
      progress.find(p => p._1 == attempt && p._3 == output).flatMap { found =>
        progress -= found
        endings.get(found._2) match {
          case None => outputs += (found._2, output) -> bytes; None
          case Some(Ending(_, _, heirs, _, _)) if heirs.contains(output.shuffle) =>
            heirs(output.shuffle).foreach(heir => outputs += (heir, output) -> bytes)
            None
          case Some(ending) => if (ending.outputs) Some(found._2) else None
        }
      }

    def end(topology: String, ending: Ending): Unit = if (!endings.contains(topology)) {
      def after(heirs: Map[Int, Option[String]]): Map[Int, Option[String]] = heirs.flatMap { case (shuffle, heir) =>
        heir.flatMap(endings.get) match {
          case None => Some(shuffle -> heir)
          case Some(ended) if ended.heirs.contains(shuffle) => Some(shuffle -> ended.heirs(shuffle))
          case Some(ended) => if (ended.outputs) None else Some(shuffle -> None)
        }
      }
      endings += topology -> ending.copy(heirs = after(ending.heirs))
      endings = endings.map { case (other, ending) => other -> ending.copy(heirs = after(ending.heirs)) }
      val heirs = endings(topology).heirs
      outputs = outputs.flatMap {
        case ((`topology`, output), bytes) if heirs.contains(output.shuffle) => heirs(output.shuffle).map(heir => (heir, output) -> bytes)
        case other => Some(other)
      }
    }

    def release(topology: String): Deletions = if (!endings.contains(topology)) Deletions() else {
      val ending = endings(topology)
      endings -= topology
      val (alone, others) = outputs.partition(_._1._1 == topology)
      outputs = others
      val (blocked, otherBlocks) = blocks.partition(_._1._1 == topology)
      blocks = otherBlocks
      val gone = blocked.filter(b => ending.blocks && !ending.keptCaches(b._1._2.rdd))
      Deletions(
        if (ending.outputs) alone.map { case ((_, output), bytes) => output -> bytes } else Map.empty,
        gone.map { case ((_, block), bytes) => block -> bytes })
    }

    def stored(topology: String): PartitionCounts = {
      val ofTopology = outputs.filter(_._1._1 == topology)
      val blocked = blocks.filter(_._1._1 == topology)
      PartitionCounts(progress.count(_._2 == topology).toLong, ofTopology.size.toLong, ofTopology.values.sum, blocked.size.toLong, blocked.values.sum)
    }
  }

  private def operations: IndexedSeq[Operation] = {
    val writes = for ((attempt, owner, shuffle) <- Seq((1L, "a", 0), (2L, "a", 1), (3L, "b", 0))) yield {
      val output = Output(shuffle, attempt)
      Seq[Operation](
        (t, m) => { t.setUp(attempt, owner, output); m.progress += ((attempt, owner, output)) },
        (t, m) => assert(t.finished(attempt, output, attempt) == m.finished(attempt, output, attempt)),
        (t, m) => { t.attemptEnded(attempt); m.progress = m.progress.filterNot(_._1 == attempt) })
    }
    val ends = Seq[(String, Ending)](
      "a" -> Ending(outputs = true, blocks = true, heirs = Map(0 -> Some("b")), keptCaches = Set(1)),
      "a" -> Ending(outputs = false), "b" -> Ending(outputs = true, heirs = Map(0 -> None))).map { case (topology, ending) =>
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
        t.block("a", CachedBlock(2, 0), Some(3))
        if (!m.endings.contains("a")) m.blocks += ("a", CachedBlock(2, 0)) -> 3L
      },
      (t, m) => { t.block("b", CachedBlock(2, 0), None); m.blocks = m.blocks.filterNot(_._1._2 == CachedBlock(2, 0)) },
      (t, m) => { t.forget(Seq(0), Seq(2)); m.outputs = m.outputs.filterNot(_._1._2.shuffle == 0); m.blocks = m.blocks.filterNot(_._1._2.rdd == 2) })
    (writes.flatten ++ ends ++ takes ++ others).toIndexedSeq
  }

  private def run(order: Seq[Int]): Unit = {
    val (table, model, all) = (new PartitionTable, new Model, every)
    order.foreach { i =>
      all(i)(table, model)
      topologies.foreach(topology => assert(table.stored(topology) == model.stored(topology), order))
      assert(table.inventory.keySet == model.outputs.keySet.map(_._1) ++ model.blocks.keySet.map(_._1), order)
    }
    assert(table.isEmpty == (model.progress.isEmpty && model.outputs.isEmpty && model.blocks.isEmpty && model.endings.isEmpty), order)
  }
  private lazy val every = operations

  test("all sequences of four operations match a model of plain sets") {
    val n = every.size
    for (a <- 0 until n; b <- 0 until n; c <- 0 until n; d <- 0 until n) run(Seq(a, b, c, d))
  }

  test("20,000 random sequences of thirty operations match a model of plain sets") {
    val random = new Random(5)
    (0 until 20000).foreach(_ => run(Seq.fill(30)(random.nextInt(every.size))))
  }

  test("an operation takes as long in a table of 100,000 partitions as in one of 1,000") {
    def nanos(size: Int): Double = {
      val table = new PartitionTable
      (0 until size).foreach { i =>
        table.setUp(i.toLong, s"t${i % 100}", Output(i % 1000, i.toLong))
        table.finished(i.toLong, Output(i % 1000, i.toLong), 1)
      }
      val rounds = (0 until 101).map { round =>
        val started = System.nanoTime()
        (0 until 20).foreach { i =>
          val attempt = size + round * 20L + i
          table.setUp(attempt, s"t${i % 100}", Output(i % 1000, attempt))
          table.finished(attempt, Output(i % 1000, attempt), 1)
          table.attemptEnded(attempt)
        }
        (System.nanoTime() - started) / 20.0
      }
      rounds.sorted.apply(rounds.size / 2)
    }
    val sizes = Seq(1000, 10000, 100000)
    (0 until 3).foreach(_ => sizes.foreach(nanos)) // warm-up
    // The sizes alternate, so that a busy machine affects all of them.
    val turns = (0 until 5).map(_ => sizes.map(nanos))
    val times = sizes.zip(turns.transpose.map(_.sorted.apply(2)))
    info(times.map { case (size, time) => f"$size%,d partitions: $time%.0f ns for each output" }.mkString("; "))
    assert(times.last._2 < 5 * times.head._2) // a list would take a hundred times as long
  }
}
