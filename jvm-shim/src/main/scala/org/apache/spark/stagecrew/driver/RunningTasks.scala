package org.apache.spark.stagecrew
package driver

import java.util.concurrent.ConcurrentHashMap
import scala.collection.immutable.VectorMap
import scala.jdk.CollectionConverters._
import org.apache.spark.scheduler._
import executor._, ui._

/** The running tasks of named topologies, for the pages. The listener bus calls it for each task, so it does little.
  * Spark may drop events: a task whose end is missing is forgotten when its stage ends. If more than `limit` tasks run,
  * the others are not shown. */
private[stagecrew] final class RunningTasks(limit: Int = RunningTasks.Limit) extends SparkListener {
  private val topologyOfStage = new ConcurrentHashMap[Int, String]()
  private val tasks = new ConcurrentHashMap[Long, (Int, Span)]()

  override def onStageSubmitted(event: SparkListenerStageSubmitted): Unit =
    TaskAttempts.topologyIn(event.properties).foreach(topologyOfStage.put(event.stageInfo.stageId, _))

  override def onStageCompleted(event: SparkListenerStageCompleted): Unit = {
    val stage = event.stageInfo.stageId
    if (topologyOfStage.remove(stage) != null) tasks.values.removeIf(_._1 == stage)
  }

  override def onTaskStart(event: SparkListenerTaskStart): Unit =
    if (topologyOfStage.containsKey(event.stageId) && tasks.size < limit) {
      val task = event.taskInfo
      tasks.put(task.taskId, event.stageId -> Span(task.executorId, "task",
        s"stage ${event.stageId}.${event.stageAttemptId} partition ${task.index} attempt ${task.taskId}",
        task.launchTime, 0, failed = false))
    }

  override def onTaskEnd(event: SparkListenerTaskEnd): Unit = { tasks.remove(event.taskInfo.taskId); () }

  override def onExecutorRemoved(event: SparkListenerExecutorRemoved): Unit = {
    tasks.values.removeIf(_._2.executor == event.executorId); ()
  }

  /** The running tasks by the id of their topology, earliest first. */
  def byTopology: VectorMap[String, Vector[Span]] =
    tasks.values.asScala.toVector.flatMap { case (stage, span) => Option(topologyOfStage.get(stage)).map(_ -> span) }
      .groupMap(_._1)(_._2).view.mapValues(_.sortBy(_.started)).to(VectorMap)
}

private[stagecrew] object RunningTasks {
  val Limit = 10000
}
