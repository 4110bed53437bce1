package org.apache.spark.stagecrew

import org.slf4j.{Logger, LoggerFactory}
import scala.util.control.NonFatal

/** Where the shim logs. Messages name topology, listener, executor, attempt; never what a listener holds. */
private[stagecrew] object Log {
  val log: Logger = LoggerFactory.getLogger("stagecrew")

  /** Runs it; what it throws is logged and goes no further. */
  def contained(what: => String)(f: => Unit): Unit = try f catch { case Failure(error) => log.warn(s"$what failed", error) }
}

/** What code of ours or of a user throws when it fails. Another Spark than the one that the jar was built for shows itself
  * by a LinkageError, which `NonFatal` lets through: Spark then runs a task's body all the same, or relaunches executors. */
private[stagecrew] object Failure {
  def unapply(error: Throwable): Option[Throwable] = error match {
    case NonFatal(_) | _: LinkageError => Some(error)
    case _ => None
  }
}
