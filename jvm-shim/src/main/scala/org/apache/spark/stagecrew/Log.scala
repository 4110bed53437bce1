package org.apache.spark.stagecrew

import org.slf4j.{Logger, LoggerFactory}
import scala.util.control.NonFatal

/** The logger of the shim. Messages contain the names of topologies, listeners, executors and attempts, but never the
  * content of a listener. */
private[stagecrew] object Log {
  val log: Logger = LoggerFactory.getLogger("stagecrew")

  /** Runs `f`. A failure is logged as "<action> failed", and not thrown. */
  def contained(action: => String)(f: => Unit): Unit =
    try f catch { case Failure(error) => log.warn(s"$action failed", error) }
}

/** Matches failures of our code or of users' code. Unlike `NonFatal`, it matches LinkageError, which is thrown if the
  * jar was not built for the running version of Spark. Uncaught, such an error would make Spark run the body of a
  * task, or relaunch executors. */
private[stagecrew] object Failure {
  def unapply(error: Throwable): Option[Throwable] = error match {
    case NonFatal(_) | _: LinkageError => Some(error)
    case _ => None
  }
}
