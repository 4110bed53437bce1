package org.apache.spark.stagecrew

import org.scalatest.funsuite.AnyFunSuite
import org.apache.spark.stagecrew.executor.TopologyTable

/** Compares the table with a model, for every order of the events of two topologies and two attempts. */
class TopologyTableSuite extends AnyFunSuite {
  private sealed trait Event
  private case class Begin(attempt: Long) extends Event
  private case class Finish(attempt: Long) extends Event
  private case class End(topology: String) extends Event
  private case class Forget(topology: String) extends Event

  private val topologies = Seq("outer", "inner")
  private val chains = Map(1L -> Seq("outer", "inner"), 2L -> Seq("inner"))
  private val events: Vector[Event] = Vector(Begin(1), Begin(2), Finish(1), Finish(2)) ++
    topologies.map(End) ++ topologies.map(Forget)

  /** The expected state, computed without the table. */
  private final class Model {
    val table = new TopologyTable
    private var counted = Map.empty[Long, Seq[String]]
    private var ended = Set.empty[String]
    private var quiescent = Set.empty[String]

    private def attempts(topology: String) =
      counted.collect { case (attempt, chain) if chain.contains(topology) => attempt }.toSet

    def apply(event: Event): Unit = {
      event match {
        case Begin(attempt) =>
          val expected = counted.getOrElse(attempt, chains(attempt).filterNot(ended))
          counted += attempt -> expected
          assert(table.begin(attempt, chains(attempt)) == expected)
        case Finish(attempt) =>
          val chain = counted.getOrElse(attempt, Nil)
          counted -= attempt
          val expected = chain.filter(topology => ended(topology) && attempts(topology).isEmpty)
          assert(table.finish(attempt) == expected)
          quiescent ++= expected
        case End(topology) =>
          ended += topology
          val expected = attempts(topology).isEmpty
          assert(table.end(topology) == expected)
          if (expected) quiescent += topology
        case Forget(topology) =>
          if (attempts(topology).nonEmpty) intercept[IllegalArgumentException](table.forget(topology))
          else {
            table.forget(topology)
            ended += topology
            quiescent += topology
          }
      }
      topologies.foreach { topology =>
        assert(table.attemptsOf(topology) == attempts(topology))
        assert(table.active(topology) == !ended(topology))
        if (quiescent(topology)) assert(table.attemptsOf(topology).isEmpty,
          s"an attempt of quiescent $topology appeared")
      }
      chains.keys.foreach(attempt => assert(table.chainOf(attempt) == counted.getOrElse(attempt, Nil)))
    }
  }

  private def run(order: Seq[Event]): Unit = {
    val model = new Model
    order.foreach(event => try model(event) catch {
      case failed: Throwable =>
        throw new AssertionError(s"in the order ${order.mkString(", ")}: ${failed.getMessage}", failed)
    })
  }

  test("every order of all events, each once") {
    events.permutations.foreach(run)
  }

  test("every order of all events, each twice: all of them are idempotent") {
    events.permutations.foreach(order => run(order.flatMap(event => Seq(event, event))))
  }

  test("every sequence of five events, including repeated events") {
    def sequences(length: Int): Iterator[List[Event]] =
      if (length == 0) Iterator(Nil) else sequences(length - 1).flatMap(rest => events.iterator.map(_ :: rest))
    (1 to 5).foreach(length => sequences(length).foreach(run))
  }

  test("`live` returns topologies with attempts, and closing ones") {
    val table = new TopologyTable
    table.begin(1, Seq("a", "b"))
    table.end("c")
    assert(table.live == Set("a", "b", "c"))
    table.finish(1)
    table.forget("c")
    assert(table.live.isEmpty)
  }

  test("a limited number of closed topologies is remembered") {
    val table = new TopologyTable
    (0 to TopologyTable.RememberedClosed).foreach { i =>
      table.end(i.toString)
      table.forget(i.toString)
    }
    assert(table.active("0")) // forgotten, so the executor asks the driver, which replies that it has ended
    assert(!table.active("1"))
    assert(!table.active(TopologyTable.RememberedClosed.toString))
  }
}
