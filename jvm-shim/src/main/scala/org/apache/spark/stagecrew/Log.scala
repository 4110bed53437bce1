package org.apache.spark.stagecrew

import org.slf4j.{Logger, LoggerFactory}
import scala.util.control.NonFatal

/** The log of the shim. Messages name topology, listener, executor and attempt, but never the content of a listener. */
private[stagecrew] object Log {
  val log: Logger = LoggerFactory.getLogger("stagecrew")

  /** Runs something, and logs a failure instead of throwing it. */
  def contained(what: => String)(f: => Unit): Unit =
    try f catch { case Failure(error) => log.warn(s"$what failed", error) }
}

/** Failures of our code or of users' code. A Spark that the jar was not built for causes a LinkageError, which
  * `NonFatal` lets through: Spark would then run the body of a task, or relaunch executors. */
private[stagecrew] object Failure {
  def unapply(error: Throwable): Option[Throwable] = error match {
    case NonFatal(_) | _: LinkageError => Some(error)
    case _ => None
  }
}
