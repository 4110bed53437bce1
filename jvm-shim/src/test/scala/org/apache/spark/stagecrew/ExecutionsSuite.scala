package org.apache.spark.stagecrew

import org.scalatest.funsuite.AnyFunSuite
import scala.collection.mutable
import org.apache.spark.stagecrew.driver.Executions

class ExecutionsSuite extends AnyFunSuite {
  private final class Fixture {
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

    def runDue(): Unit = {
      val now = due.toVector
      due.clear()
      now.foreach(_.apply())
    }

    def find(key: String): mutable.Buffer[Option[String]] = {
      val answers = mutable.ArrayBuffer.empty[Option[String]]
      executions.find(key) { found => answers += found; () }
      answers
    }
  }

  test("a stage belongs to the first of the running jobs that share it") {
    val fixture = new Fixture
    fixture.jobs ++= Seq(1, 2)
    fixture.executions.jobStarted(1, Seq(0, 1))
    fixture.executions.jobStarted(2, Seq(1, 2))
    assert(fixture.find("stage:1") == Seq(Some("execution-job-1")))
    assert(fixture.find("stage:2") == Seq(Some("execution-job-2")))
    fixture.executions.jobEnded(1)
    assert(!fixture.executions.hasStage(0) && fixture.executions.hasStage(1))
    assert(fixture.find("stage:1") == Seq(Some("execution-job-2")))
    fixture.executions.jobEnded(2)
    assert(!fixture.executions.hasStage(1) && !fixture.executions.hasStage(2))
  }

  test("a stage whose job started without an event is found in Spark's own state") {
    val fixture = new Fixture
    fixture.stages(7) = 1
    assert(fixture.executions.hasStage(7) && !fixture.executions.hasStage(8))
  }

  test("a job that has ended according to Spark's own state has no stages, even if its end event was dropped") {
    val fixture = new Fixture
    fixture.jobs ++= Seq(1, 2)
    fixture.executions.jobStarted(1, Seq(1))
    fixture.executions.jobStarted(2, Seq(1))
    fixture.jobs -= 1
    assert(fixture.find("stage:1") == Seq(Some("execution-job-2")))
    fixture.jobs -= 2
    fixture.executions.prune()
    assert(!fixture.executions.hasStage(1))
  }

  test("if a task starts before the start event of its job arrives, the search for its execution waits for the event") {
    val fixture = new Fixture
    val (first, second) = (fixture.find("stage:7"), fixture.find("stage:7"))
    assert(first.isEmpty && second.isEmpty)
    fixture.jobs += 3
    fixture.executions.jobStarted(3, Seq(7))
    fixture.runDue()
    assert(first == Seq(Some("execution-job-3")) && second == first)
  }

  test("without the start event, Spark's scheduler is asked; if it does not know a job, the task has no execution") {
    val fixture = new Fixture
    fixture.stages(7) = 4
    val (known, unknown) = (fixture.find("stage:7"), fixture.find("stage:8"))
    fixture.runDue()
    assert(known == Seq(Some("execution-job-4")) && unknown == Seq(None))
    assert(fixture.find("nonsense") == Seq(None))
  }

  test("a restarted query belongs to its new run, even if the end of the old run is reported late") {
    val fixture = new Fixture
    fixture.executions.queryStarted("q", "run 1")
    fixture.executions.queryStarted("q", "run 2")
    fixture.executions.queryEnded("q", "run 1")
    assert(fixture.find("query:q") == Seq(Some("execution-query-run 2")))
    fixture.executions.queryEnded("q", "run 2")
    assert(fixture.find("query:q") == Seq(None))
    fixture.runs("q") = "run 3" // the event of this run was dropped
    assert(fixture.find("query:q") == Seq(Some("execution-query-run 3")))
  }

  test("a restarted query belongs to its new run, even if the events of both runs are late") {
    val fixture = new Fixture
    fixture.executions.queryStarted("q", "run 1")
    fixture.runs("q") = "run 2"
    assert(fixture.find("query:q") == Seq(Some("execution-query-run 2")))
  }

  test("the topology of a query may begin after the query's event, and a query runs as long as Spark's own state says so") {
    val fixture = new Fixture
    fixture.executions.queryStarted("q", "r-1")
    assert(fixture.executions.mayBegin("execution-query-r-1") && !fixture.executions.runs("execution-query-r-1"))
    fixture.runs("q") = "r-1"
    fixture.jobs += 5
    fixture.sql += 6L
    Seq("execution-query-r-1", "execution-job-5", "execution-sql-6").foreach { id =>
      assert(fixture.executions.runs(id) && fixture.executions.mayBegin(id))
    }
    Seq("execution-query-r-2", "execution-job-6", "execution-sql-5", "execution-what-1").foreach { id =>
      assert(!fixture.executions.runs(id) && !fixture.executions.mayBegin(id))
    }
    assert(Executions.name("execution-query-r-1") == "query r-1")
  }
}
