package org.apache.spark.stagecrew
package driver

import java.util.concurrent.CountDownLatch
import scala.collection.mutable
import org.apache.spark.scheduler._
import org.apache.spark.sql.execution.SQLExecution
import org.apache.spark.sql.execution.ui.{SparkListenerSQLExecutionEnd, SparkListenerSQLExecutionStart}
import org.apache.spark.sql.streaming.StreamingQueryListener.{QueryStartedEvent, QueryTerminatedEvent}
import executor._, spark._, ui._, wire._

/** When the driver handles this event, it has handled all earlier events that Spark did not drop. */
private[stagecrew] final case class FlushMarker(latch: CountDownLatch) extends NotLogged

/** The set of executors on which topologies are closing has changed: see `ExecutorPinning`. */
private[stagecrew] final case class PinningChanged() extends NotLogged

/** Passes Spark's events to the driver's loop. Spark may drop events, so the driver uses them only to react quickly,
  * and does not rely on them. It also counts failed opens, which executors report in messages, and forgets the counts
  * of a stage when no running job has the stage. */
private[stagecrew] final class BusListener(crew: DriverCrew) extends SparkListener {
  import crew.{executions, inLoop, topologies}

  /** The attempts whose listeners could not be opened, by stage and partition. Spark does not count these attempts as
    * failures, and would retry them forever. */
  private val openFailures = mutable.LinkedHashMap.empty[(Int, Int), mutable.HashSet[Long]]

  override def onJobStart(event: SparkListenerJobStart): Unit = {
    val topologyId = TaskAttempts.topologyIn(event.properties)
    val shuffles = event.stageInfos.flatMap(SparkInternals.shuffleOf)
    val caches = event.stageInfos.flatMap(SparkInternals.cachesOf)
    val job = SparkJob(event.jobId, event.stageIds.toVector.sorted, Option(event.properties)
      .flatMap(p => Option(p.getProperty(SQLExecution.EXECUTION_ID_KEY))).flatMap(_.toLongOption).getOrElse(-1L))
    inLoop {
      executions.jobStarted(event.jobId, event.stageIds)
      crew.userOf(topologyId).foreach(crew.partitions.used(_, shuffles, caches))
      // If another thread has closed the topology of the job, the job belongs to the application.
      val chain = topologyId.flatMap(topologies.get).toSeq.flatMap(crew.chainOf).filter(_.state != "closed")
      val counted = (chain ++ topologies.get(Description.Application)).distinct
      counted.foreach { topology =>
        topology.jobs += 1
        topology.lastJobs(job.id) = job
      }
      // A query with AQE that is cancelled between two of its jobs still starts the next job.
      chain.flatMap(_.cancelled).headOption.foreach(reason => crew.sc.cancelJob(event.jobId, reason))
      crew.publish(counted: _*)
    }
  }

  override def onJobEnd(event: SparkListenerJobEnd): Unit = inLoop {
    executions.jobEnded(event.jobId)
    openFailures.filterInPlace((key, _) => executions.hasStage(key._1))
    crew.endExecution(Executions.ofJob(event.jobId))
  }

  override def onExecutorRemoved(event: SparkListenerExecutorRemoved): Unit = inLoop(crew.lost(event.executorId))

  override def onOtherEvent(event: SparkListenerEvent): Unit = event match {
    case start: SparkListenerSQLExecutionStart =>
      inLoop(tagged(start.jobTags).foreach(_.executions += start.executionId))
    case end: SparkListenerSQLExecutionEnd => inLoop {
      topologies.values.foreach(_.executions -= end.executionId)
      crew.endExecution(Executions.ofSql(end.executionId))
    }
    case started: QueryStartedEvent => inLoop {
      executions.queryStarted(started.id.toString, started.runId.toString)
      queryStarted(SparkVersion.tagsOf(started), started.runId.toString)
    }
    case ended: QueryTerminatedEvent => inLoop {
      topologies.values.foreach(_.queries -= ended.runId.toString)
      executions.queryEnded(ended.id.toString, ended.runId.toString)
      crew.endExecution(Executions.ofQuery(ended.runId.toString))
    }
    case FlushMarker(latch) => inLoop(latch.countDown())
    case PinningChanged() => crew.pinning.notifySpark() // not in the loop
    case _ => ()
  }

  /** Handles an executor's OPEN_FAILED message: an attempt could not open its listeners. When the number of
    * such attempts of a partition reaches `spark.task.maxFailures`, the driver cancels the stage with the error. Called
    * in the loop. */
  def openFailed(frame: Frame): Unit = {
    val key = (frame.long("stage").toInt, frame.long("partition").toInt)
    val attempts = openFailures.getOrElseUpdate(key, mutable.HashSet.empty)
    attempts += frame.long("attempt")
    if (attempts.size >= SparkInternals.maxTaskFailures(crew.sc)) {
      openFailures.filterInPlace((other, _) => other._1 != key._1)
      crew.sc.cancelStage(key._1, frame.text("error"))
    }
  }

  /** A streaming query of a session with these tags has started. Called in the loop. */
  def queryStarted(tags: Set[String], run: String): Unit = tagged(tags).foreach(_.queries += run)

  private def tagged(tags: Set[String]): Seq[Topology] =
    topologies.values.filter(t => tags(DriverCrew.tag(t.description.id))).toSeq
}
