package org.apache.spark.stagecrew

import org.scalatest.funsuite.AnyFunSuite
import scala.collection.immutable.VectorMap
import org.apache.spark.stagecrew.executor.{ExecutorCounts, ListenerCounts, PartitionCounts}
import org.apache.spark.stagecrew.ui.{Hints, PageModel, Span, TopologyView}

class HintsSuite extends AnyFunSuite {
  import Views._

  private def counted(counts: ExecutorCounts*): TopologyView = topology("t").copy(started = 0,
    executors = counts.zipWithIndex.map { case (one, i) => i.toString -> one }.to(VectorMap))

  private def opens(name: String, opens: Long, micros: Long): ListenerCounts =
    ListenerCounts(0, name, "worker", opens, openMicros = micros)

  private def tasks(durations: Long*): TopologyView = topology("t").copy(
    spans = durations.map(ms => Span("1", "task", "one", 1000, 1000 + ms, failed = false)).toVector)

  test("a topology without problems has no hints") {
    assert(Hints.of(counted(ExecutorCounts(Vector(opens("pool", 2, 10000)), 2)), 60000).isEmpty)
  }

  test("a listener whose open takes most of the run is named, with the average share of one open") {
    val view = counted(ExecutorCounts(Vector(opens("pool", 2, 18400000), opens("quick", 2, 10)), 2))
    assert(Hints.slowOpen(view, 10000).contains("open of pool takes 92 % of this run."))
    assert(Hints.slowOpen(view, 20000).isEmpty)
    assert(Hints.slowOpen(counted(ExecutorCounts(Vector(opens("pool", 1, 900000)))), 950).isEmpty, "a short run")
  }

  test("failed hooks, lost processes, unhandled messages and partitions that were not deleted are counted") {
    val failing = ListenerCounts(0, "pool", "worker", 3, failures = 1)
    val one = ExecutorCounts(Vector(failing), 3, 1, Set.empty, PartitionCounts(releaseFailures = 2))
    val view = counted(one, one).copy(operators = Vector(operator("budget").copy(queued = 5000)))
    assert(Hints.of(view, 60000) == Seq("2 hooks failed. The table of listeners shows the last errors.",
      "2 Python processes ended before closing all listeners. SIGKILL is a usual cause, for example because memory ran " +
        "out.", "coordinator budget has not handled 5000 messages yet.",
      "4 partitions could not be deleted. The logs of the executors say why."))
  }

  test("few tasks that take most of the time are counted, if every task was recorded") {
    val uneven = tasks(Seq(40000L, 40000L) ++ Seq.fill(62)(100L): _*)
    assert(Hints.unevenTasks(uneven)
      .contains("2 tasks of 64 take 80 % of the time of all tasks. Splits balance such work."))
    assert(Hints.unevenTasks(uneven.copy(spansDropped = 1)).isEmpty)
    assert(Hints.unevenTasks(tasks(Seq.fill(64)(1000L): _*)).isEmpty)
    assert(Hints.unevenTasks(tasks(40000L, 1L)).isEmpty, "too few tasks")
    assert(Hints.unevenTasks(topology("t")).isEmpty)
  }

  test("topologies that began long ago and have no running task are named") {
    val (old, busy, closed) = (topology("old").copy(started = 0), topology("busy").copy(started = 0),
      topology("closed", state = "closed").copy(started = 0))
    val task = Span("1", "task", "one", 0, 0, failed = false)
    val model = PageModel(snapshot(old, busy, closed).copy(running = VectorMap("busy" -> Vector(task))), 3600000)
    assert(Hints.forgotten(model).contains(
      "1 topology began more than 10 min ago, has no running task, and is not closed: name of old."))
    assert(Hints.forgotten(model.copy(now = 60000)).isEmpty)
    val recent = old.copy(spans = Vector(task.copy(ended = 3500000)))
    assert(Hints.forgotten(model.copy(snapshot = snapshot(recent))).isEmpty)
  }

  test("splits that few tasks read are named by the coordinator") {
    val view = topology("t").copy(operators = Vector(operator("splits").copy(
      progress = VectorMap("uneven" -> "2 of 64 tasks have read 80 % of the splits")), operator("other")))
    assert(Hints.of(view, 61000) == Seq("2 of 64 tasks have read 80 % of the splits."))
  }

  test("the first page shows the last hints of all topologies, and texts of users are escaped") {
    val failing = ListenerCounts(0, "pool", "worker", 3, failures = 1)
    val views = (0 until 9).map(i => counted(ExecutorCounts(Vector(failing))).copy(id = s"t$i", name = s"$Hostile$i"))
    val html = page("", model(views: _*))
    val hints = (html \\ "p").filter(p => (p \@ "class").contains("stagecrew-hint")).map(_.text)
    assert(hints.size == 5 && hints.last.startsWith(s"${Hostile}8: 1 hook failed"))
    assert((html \\ "script").size == 1)
  }
}
