package org.apache.spark.stagecrew

import org.scalatest.funsuite.AnyFunSuite
import scala.collection.mutable
import org.apache.spark.stagecrew.driver.Executions

class ExecutionsSuite extends AnyFunSuite {
  private final class World {
    val stages = mutable.Map.empty[Int, Int]
    val jobs = mutable.Set.empty[Int]
    val sql = mutable.Set.empty[Long]
    val runs = mutable.Map.empty[String, String] // query id -> run
    val due = mutable.ArrayBuffer.empty[() => Unit]
    val executions = new Executions(
      new Executions.SparkState {
        def jobOfStage(stage: Int): Option[Int] = stages.get(stage)
        def jobRuns(job: Int): Boolean = jobs(job)
        def sqlRuns(execution: Long): Boolean = sql(execution)
        def queryRuns(run: String): Boolean = runs.values.exists(_ == run)
        def queryRun(id: String): Option[String] = runs.get(id)
      },
      _ => f => { due += (() => f); () })

    def time(): Unit = { val now = due.toVector; due.clear(); now.foreach(_.apply()) }

    def asked(key: String): mutable.Buffer[Option[String]] = {
      val answers = mutable.ArrayBuffer.empty[Option[String]]
      executions.find(key) { found => answers += found; () }
      answers
    }
  }

  test("a stage belongs to the first of the running jobs that share it") {
    val world = new World
    world.jobs ++= Seq(1, 2)
    world.executions.jobStarted(1, Seq(0, 1))
    world.executions.jobStarted(2, Seq(1, 2))
    assert(world.asked("stage:1") == Seq(Some("execution-job-1")) && world.asked("stage:2") == Seq(Some("execution-job-2")))
    world.executions.jobEnded(1)
    assert(!world.executions.hasStage(0) && world.executions.hasStage(1))
    assert(world.asked("stage:1") == Seq(Some("execution-job-2")))
    world.executions.jobEnded(2)
    assert(!world.executions.hasStage(1) && !world.executions.hasStage(2))
  }

  test("a job that has ended in Spark's books owns no stage, even if its event was dropped") {
    val world = new World
    world.jobs ++= Seq(1, 2)
    world.executions.jobStarted(1, Seq(1))
    world.executions.jobStarted(2, Seq(1))
    world.jobs -= 1
    assert(world.asked("stage:1") == Seq(Some("execution-job-2")))
    world.jobs -= 2
    world.executions.prune()
    assert(!world.executions.hasStage(1))
  }

  test("a task that is faster than the event of its job waits for the event") {
    val world = new World
    val (first, second) = (world.asked("stage:7"), world.asked("stage:7"))
    assert(first.isEmpty && second.isEmpty)
    world.jobs += 3
    world.executions.jobStarted(3, Seq(7))
    world.time()
    assert(first == Seq(Some("execution-job-3")) && second == first)
  }

  test("without that event Spark's scheduler is asked, and without its reply the task has no execution") {
    val world = new World
    world.stages(7) = 4
    val (known, unknown) = (world.asked("stage:7"), world.asked("stage:8"))
    world.time()
    assert(known == Seq(Some("execution-job-4")) && unknown == Seq(None))
    assert(world.asked("nonsense") == Seq(None))
  }

  test("a restarted query has its new run, also if the end of the old run is reported late") {
    val world = new World
    world.executions.queryStarted("q", "run 1")
    world.executions.queryStarted("q", "run 2")
    world.executions.queryEnded("q", "run 1")
    assert(world.asked("query:q") == Seq(Some("execution-query-run 2")))
    world.executions.queryEnded("q", "run 2")
    assert(world.asked("query:q") == Seq(None))
    world.runs("q") = "run 3" // whose event was dropped
    assert(world.asked("query:q") == Seq(Some("execution-query-run 3")))
  }

  test("a query begins with its event, and runs as long as in Spark's books") {
    val world = new World
    world.executions.queryStarted("q", "r-1")
    assert(world.executions.mayBegin("execution-query-r-1") && !world.executions.runs("execution-query-r-1"))
    world.runs("q") = "r-1"
    world.jobs += 5
    world.sql += 6L
    Seq("execution-query-r-1", "execution-job-5", "execution-sql-6").foreach { id =>
      assert(world.executions.runs(id) && world.executions.mayBegin(id))
    }
    Seq("execution-query-r-2", "execution-job-6", "execution-sql-5", "execution-what-1").foreach { id =>
      assert(!world.executions.runs(id) && !world.executions.mayBegin(id))
    }
    assert(Executions.name("execution-query-r-1") == "query r-1")
  }
}
