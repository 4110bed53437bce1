package org.apache.spark.stagecrew
package spark

import java.util.Properties
import scala.annotation.unused
import org.apache.spark.{SparkContext, SparkEnv, TaskContext}
import org.apache.spark.shuffle.ShuffleBlockResolver
import org.apache.spark.sql.execution.streaming.StreamExecution
import org.apache.spark.sql.streaming.StreamingQueryListener.QueryStartedEvent

/** What differs between the minor versions of Spark. This file is for 4.0. */
private[stagecrew] object SparkVersion {
  /** The Spark version that this jar was built for, as major.minor. */
  val Line = "4.0"

  /** Finds the files of shuffles on this executor. None before the shuffle manager exists. */
  def resolver(env: SparkEnv): Option[ShuffleBlockResolver] =
    Option(env.shuffleManager).flatMap(manager => Option(manager.shuffleBlockResolver))

  /** Calls `action` when Spark asks the task to end. Before 4.2, Spark does not report this, so the task is polled:
    * `later` calls its argument after a short time. */
  def onInterrupt(task: TaskContext, later: (=> Unit) => Unit)(action: => Unit): Unit = later {
    if (task.isInterrupted()) action else if (!task.isCompleted()) onInterrupt(task, later)(action)
  }

  /** The tags of the session that started a streaming query. 4.0 does not report them. */
  def tagsOf(@unused started: QueryStartedEvent): Set[String] = Set.empty

  /** The run of the streaming query that a job with these properties belongs to: the job's group. So a query belongs to
    * a topology when its first job has started. */
  def runOf(job: Properties): Option[String] = Option.when(job.getProperty(StreamExecution.QUERY_ID_KEY) != null)(
    job.getProperty(SparkContext.SPARK_JOB_GROUP_ID))
}
