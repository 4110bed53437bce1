package org.apache.spark.stagecrew

import org.scalatest.funsuite.AnyFunSuite
import scala.collection.immutable.VectorMap
import org.apache.spark.stagecrew.executor.{ExecutorCounts, ListenerCounts, PartitionCounts, Totals}
import org.apache.spark.stagecrew.ui.{OperatorView, Percentiles, ProcessView, RecoveryView, Sample, Snapshot, Span}
import org.apache.spark.stagecrew.ui.{SparkJob, StepView, TopologyView}
import org.apache.spark.stagecrew.wire.Json

class SnapshotSuite extends AnyFunSuite {
  private val counts = ExecutorCounts(
    Vector(ListenerCounts(0, "a", "worker", 3, 2, 1, 1, 70, 80, "it broke")), 2, 1, Set("p"),
    PartitionCounts(1, 2, 3, 4, 5, 6, 7, 8))
  private val operator = OperatorView("o", "splits", "active", 1, 2, 3, 4, 5, 6, 7, 8, 9, Percentiles(1, 2, 3, 4, 5),
    Percentiles(6, 7, 8, 9, 10), "subtask 3", VectorMap("splits done" -> "4", "loss" -> "0.25"), "no")
  private val full = Snapshot(
    Vector(TopologyView("t", "<name>", "named", Some("p"), "closed", 10, 20, 3, Vector("1"), VectorMap("1" -> counts), Vector("2"),
      Vector("u"), Vector(operator), Vector(Span("1", "open", "a", 11, 12, failed = true, lost = true)), 9,
      lastJobs = Vector(SparkJob(4, Vector(5, 6), 7)))),
    Totals(1, 2, 3, 4, 5, 6, 7, 8),
    Vector(ProcessView("1", "h", 77, "worker", 1, 2, Vector(Sample(5, 6, 7, 8, 9)), "", "t", "stage 1.0")),
    Some(RecoveryView(VectorMap("job" -> "j", "term" -> "3"), Vector(StepView("s", "found", 1, 2)), 5)),
    Some(operator.copy(name = "")), 4)

  test("a snapshot is unchanged after JSON") {
    assert(Json.read[Snapshot](Json.write(full.json)) == full)
    assert(full.json.get("version").asInt == 1)
  }

  test("executors, progress and facts keep their order") {
    val names = Vector("z", "a", "m", "b", "y", "c", "x")
    val progress = operator.copy(progress = names.map(_ -> "2").to(VectorMap))
    val ordered = full.copy(recovery = Some(RecoveryView(names.map(_ -> "1").to(VectorMap), Vector.empty)),
      topologies = full.topologies.map(_.copy(executors = names.map(_ -> counts).to(VectorMap), operators = Vector(progress))))
    val read = Json.read[Snapshot](Json.write(ordered.json))
    assert(read == ordered && read.recovery.get.facts.keys.toVector == names)
    assert(read.topologies.head.executors.keys.toVector == names)
    assert(read.topologies.head.operators.head.progress.keys.toVector == names)
  }

  test("`fewer` keeps the running and the last steps in order, and counts the others") {
    val steps = Vector(StepView("a", "running", 1, 0)) ++ (1 to 5).map(i => StepView(i.toString, "finished", 1, 2)) :+ StepView("b", "running", 1, 0)
    val fewer = RecoveryView(VectorMap.empty, steps, 2).fewer(4)
    assert(fewer.steps.map(_.name) == Seq("a", "4", "5", "b") && fewer.forgottenSteps == 5)
    assert(fewer.fewer(1).steps.map(_.name) == Seq("a") && fewer.fewer(9) == fewer)
  }

  test("missing fields of an older version are empty, and unknown fields of a newer version are ignored") {
    val node = Json.parse(Json.write(full.json))
    node.put("more", 1).remove("processes")
    val topology = node.get("topologies").get(0).asInstanceOf[com.fasterxml.jackson.databind.node.ObjectNode]
    topology.put("more", "x").remove("operators")
    assert(Json.as[Snapshot](node) == full.copy(processes = Vector.empty,
      topologies = full.topologies.map(_.copy(operators = Vector.empty))))
    assert(Json.as[Snapshot](Json.obj()) == Snapshot(Vector.empty, Totals()))
  }
}
