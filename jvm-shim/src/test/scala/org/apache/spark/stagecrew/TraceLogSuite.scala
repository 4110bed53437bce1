package org.apache.spark.stagecrew

import java.util.Properties
import org.apache.spark.{ExceptionFailure, ExecutorLostFailure, Success, TaskEndReason, TaskKilled, TaskState}
import org.apache.spark.scheduler._
import org.scalatest.funsuite.AnyFunSuite
import org.apache.spark.stagecrew.driver.TraceLog
import org.apache.spark.stagecrew.executor.TaskAttempts
import org.apache.spark.stagecrew.ui.Span

class TraceLogSuite extends AnyFunSuite {
  private def submit(log: TraceLog, stage: Int, topology: String): Unit = {
    val properties = new Properties
    if (topology.nonEmpty) properties.setProperty(TaskAttempts.TopologyProperty, topology)
    log.onStageSubmitted(SparkListenerStageSubmitted(
      new StageInfo(stage, 0, s"stage $stage", 2, Nil, Nil, "", resourceProfileId = 0), properties))
  }

  private def end(log: TraceLog, stage: Int, attempt: Long, reason: TaskEndReason): Unit = {
    val task = new TaskInfo(attempt, 5, 0, 5, 1000, "1", "host", TaskLocality.ANY, speculative = false)
    task.markFinished(TaskState.FINISHED, 3000)
    log.onTaskEnd(SparkListenerTaskEnd(stage, 0, "", reason, task, null, null))
  }

  test("an ended task has its topology, its attempt, and how it ended") {
    val log = new TraceLog
    submit(log, 3, "a")
    submit(log, 4, "")
    end(log, 3, 7, Success)
    end(log, 3, 8, TaskKilled("another attempt succeeded"))
    end(log, 3, 9, ExecutorLostFailure("1", exitCausedByApp = true, Some("it ended")))
    end(log, 4, 10, new ExceptionFailure(new IllegalStateException("no"), Nil))
    val spans = log.take(10).spans
    assert(spans.map(span => (span.topology, span.attempt, span.outcome)) == Vector(
      ("a", 7, "ok"), ("a", 8, "killed"), ("a", 9, "lost"), ("application", 10, "failed")))
    val first = spans.head
    assert((first.kind, first.executor, first.started, first.ended, first.stage, first.stageAttempt, first.partition)
      == (("task", "1", 1000, 3000, 3, 0, 5)))
    assert(first.error == "" && spans(1).error == "another attempt succeeded" && spans(2).error.contains("it ended")
      && spans(3).error.startsWith("java.lang.IllegalStateException: no"))
  }

  test("a hook has the outcome of its span") {
    val log = new TraceLog
    Seq((false, false), (true, false), (true, true)).foreach { case (failed, lost) =>
      log.addHook("a", Span("1", "open", "pool", 5, 6, failed, lost))
    }
    assert(log.take(10).spans.map(span => (span.name, span.outcome, span.attempt)) ==
      Vector(("pool", "ok", -1), ("pool", "failed", -1), ("pool", "lost", -1)))
  }

  test("each span is taken once; if too many wait, the oldest are dropped and counted") {
    val log = new TraceLog(3)
    submit(log, 3, "a")
    (1L to 5L).foreach(end(log, 3, _, Success))
    val first = log.take(2)
    assert(first.spans.map(_.attempt) == Vector(3, 4) && first.dropped == 2)
    assert(log.take(2).spans.map(_.attempt) == Vector(5) && log.take(2).dropped == 0)
  }

  test("the topologies of stages that ended long ago are forgotten") {
    val log = new TraceLog
    (0 to 3000).foreach { stage =>
      submit(log, stage, "a")
      end(log, stage, stage.toLong, Success)
      log.onStageCompleted(SparkListenerStageCompleted(
        new StageInfo(stage, 0, "", 2, Nil, Nil, "", resourceProfileId = 0)))
    }
    end(log, 0, 1, Success)
    end(log, 3000, 2, Success)
    assert(log.take(10000).spans.takeRight(2).map(_.topology) == Vector("application", "a"))
  }
}
