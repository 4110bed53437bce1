package org.apache.spark.stagecrew
package spark

import scala.annotation.unused
import org.apache.spark.{SparkConf, SparkEnv, TaskContext}
import org.apache.spark.shuffle.ShuffleBlockResolver
import org.apache.spark.sql.streaming.StreamingQueryListener.QueryStartedEvent

/** What differs between the minor versions of Spark. This file is for 4.1. */
private[stagecrew] object SparkVersion {
  /** The Spark version that this jar was built for, as major.minor. */
  val Line = "4.1"

  /** Finds the files of shuffles on this executor. None before the shuffle manager exists. */
  def resolver(env: SparkEnv): Option[ShuffleBlockResolver] =
    Option(env.shuffleManager).flatMap(manager => Option(manager.shuffleBlockResolver))

  /** Calls `action` when Spark asks the task to end. Before 4.2, Spark does not report this, so the task is polled:
    * `later` calls its argument after a short time. */
  def onInterrupt(task: TaskContext, later: (=> Unit) => Unit)(action: => Unit): Unit = later {
    if (task.isInterrupted()) action else if (!task.isCompleted()) onInterrupt(task, later)(action)
  }

  /** The tags of the session that started a streaming query. */
  def tagsOf(started: QueryStartedEvent): Set[String] = started.jobTags.toSet

  /** Changes the configuration of the application, if this version needs it. */
  def configure(@unused conf: SparkConf): Unit = ()
}
