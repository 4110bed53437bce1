package org.apache.spark.stagecrew
package driver

import java.util.concurrent.ConcurrentHashMap
import scala.collection.mutable
import org.apache.spark.{ExecutorLostFailure, Success, TaskFailedReason, TaskKilled}
import org.apache.spark.scheduler._
import executor._, ui._, wire._

/**
 * An ended span for the driver's Python, which exports it.
 *
 * @param kind "open", "close" or "task"
 * @param name the listener's name; empty for a task
 * @param attempt the attempt of a task, else -1. Likewise `stage`, `stageAttempt` and `partition`
 * @param outcome "ok", "failed", "killed", or "lost" with its process or its executor
 */
private[stagecrew] final case class EndedSpan(
    topology: String, executor: String, kind: String, name: String, started: Long, ended: Long, outcome: String,
    error: String = "", attempt: Long = -1, stage: Int = -1, stageAttempt: Int = -1, partition: Int = -1)

/** The spans that Python has not taken yet. `dropped` is the number of spans that were dropped since the last take. */
private[stagecrew] final case class EndedSpans(spans: Vector[EndedSpan], dropped: Long)

/** Collects the ended spans of hooks and of all tasks until the driver's Python takes them. If more than `limit` wait,
  * the oldest are dropped. Used only if `spark.stagecrew.tracing` is set. Thread-safe. */
private[stagecrew] final class TraceLog(limit: Int = TraceLog.Limit) extends SparkListener {
  private val topologyOfStage = new ConcurrentHashMap[(Int, Int), String]()
  private val spans = mutable.Queue.empty[EndedSpan]
  private var dropped = 0L

  def add(span: EndedSpan): Unit = synchronized {
    if (spans.size >= limit) {
      spans.dequeue()
      dropped += 1
    }
    spans += span
  }

  /** An `open` or a `close` of a topology has ended. */
  def addHook(topology: String, span: Span): Unit = add(EndedSpan(topology, span.executor, span.kind, span.name,
    span.started, span.ended, if (span.lost) "lost" else if (span.failed) "failed" else "ok"))

  def take(most: Int): EndedSpans = synchronized {
    val taken = EndedSpans(Vector.fill(math.min(most, spans.size))(spans.dequeue()), dropped)
    dropped = 0
    taken
  }

  override def onStageSubmitted(event: SparkListenerStageSubmitted): Unit = {
    topologyOfStage.put((event.stageInfo.stageId, event.stageInfo.attemptNumber()),
      TaskAttempts.topologyIn(event.properties).getOrElse(Description.Application))
  }

  override def onTaskEnd(event: SparkListenerTaskEnd): Unit = if (event.taskInfo != null) {
    val task = event.taskInfo
    val (outcome, error) = event.reason match {
      case Success => ("ok", "")
      case TaskKilled(reason, _, _, _) => ("killed", reason)
      case lost: ExecutorLostFailure => ("lost", lost.toErrorString)
      case failed: TaskFailedReason => ("failed", failed.toErrorString)
      case other => ("failed", other.toString)
    }
    add(EndedSpan(
      topologyOfStage.getOrDefault((event.stageId, event.stageAttemptId), Description.Application), task.executorId,
      "task", "", task.launchTime, task.finishTime, outcome,
      Show.first(error, TraceLog.ErrorLength), task.taskId, event.stageId, event.stageAttemptId, task.partitionId))
  }

  /** The ends of a stage's last tasks may arrive after the end of the stage, so only much older stages are forgotten.
    */
  override def onStageCompleted(event: SparkListenerStageCompleted): Unit =
    if (topologyOfStage.size > TraceLog.Stages) {
      topologyOfStage.keySet.removeIf(_._1 < event.stageInfo.stageId - TraceLog.Stages / 2); ()
    }
}

private[stagecrew] object TraceLog {
  val Limit = 10000
  val ErrorLength = 1000
  private val Stages = 1000
}
