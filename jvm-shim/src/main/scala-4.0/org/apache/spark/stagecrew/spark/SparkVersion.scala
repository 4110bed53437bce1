package org.apache.spark.stagecrew
package spark

import scala.annotation.unused
import org.apache.spark.{SparkConf, SparkContext, SparkEnv, TaskContext}
import org.apache.spark.shuffle.ShuffleBlockResolver
import org.apache.spark.sql.streaming.StreamingQueryListener
import org.apache.spark.sql.streaming.StreamingQueryListener._

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

  /** The tags of the session that started a streaming query. 4.0 does not report them: see `QueryStarts`. */
  def tagsOf(@unused started: QueryStartedEvent): Set[String] = Set.empty

  /** Changes the configuration of the application, if this version needs it. */
  def configure(conf: SparkConf): Unit = {
    val others = conf.getOption(ListenersKey).toSeq.filterNot(_.contains(classOf[QueryStarts].getName))
    conf.set(ListenersKey, (others :+ classOf[QueryStarts].getName).mkString(","))
  }
  private val ListenersKey = "spark.sql.streaming.streamingQueryListeners"
}

/** Passes the tags of each streaming query to the driver. Spark creates an instance for each session, and calls it in
  * the thread of the query, which has the local properties of the thread that started the query. */
final class QueryStarts extends StreamingQueryListener {
  override def onQueryStarted(started: QueryStartedEvent): Unit = SparkContext.getActive.foreach { sc =>
    Option(Shim.driver(sc.applicationId)).foreach(_.queryStarted(sc.getJobTags(), started.runId.toString))
  }
  override def onQueryProgress(event: QueryProgressEvent): Unit = ()
  override def onQueryTerminated(event: QueryTerminatedEvent): Unit = ()
}
