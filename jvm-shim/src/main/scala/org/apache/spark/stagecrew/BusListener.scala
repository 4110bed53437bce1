package org.apache.spark.stagecrew

import org.apache.spark.scheduler._
import org.apache.spark.sql.execution.ui.{SparkListenerSQLExecutionEnd, SparkListenerSQLExecutionStart}
import org.apache.spark.sql.streaming.StreamingQueryListener.{QueryStartedEvent, QueryTerminatedEvent}

/** Comes behind the events of what was started before it was posted; it is in no event log. */
private[stagecrew] final case class Heard(latch: java.util.concurrent.CountDownLatch) extends SparkListenerEvent {
  override protected[spark] def logEvent: Boolean = false
}

/** Topologies close on other executors than before: see `ExecutorPinning`. */
private[stagecrew] final case class BusyChanged() extends SparkListenerEvent {
  override protected[spark] def logEvent: Boolean = false
}

/** Hands Spark's events to the driver's loop. The bus may drop events: they make things quick, they are not the truth. */
private[stagecrew] final class BusListener(crew: DriverCrew) extends SparkListener {
  override def onJobStart(event: SparkListenerJobStart): Unit = crew.jobStarted(
    event.jobId, event.stageIds,
    Option(event.properties).flatMap(p => Option(p.getProperty(ExecutorCrew.TopologyProperty))),
    event.stageInfos.flatMap(SparkInternals.shuffleOf), event.stageInfos.flatMap(SparkInternals.cachesOf))

  override def onJobEnd(event: SparkListenerJobEnd): Unit = crew.jobEnded(event.jobId)

  override def onExecutorRemoved(event: SparkListenerExecutorRemoved): Unit = crew.executorRemoved(event.executorId)

  override def onOtherEvent(event: SparkListenerEvent): Unit = event match {
    case start: SparkListenerSQLExecutionStart => crew.executionStarted(start.executionId, start.jobTags)
    case end: SparkListenerSQLExecutionEnd => crew.executionEnded(end.executionId)
    case started: QueryStartedEvent => crew.queryStarted(started.id.toString, started.runId.toString, started.jobTags)
    case ended: QueryTerminatedEvent => crew.queryEnded(ended.id.toString, ended.runId.toString)
    case Heard(latch) => crew.heard(latch)
    case BusyChanged() => crew.busyChanged()
    case _ => ()
  }
}
