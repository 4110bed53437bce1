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

/** Logs at most ten warnings a minute. The first one of the next minute says how many were left out. Thread-safe. */
private[stagecrew] final class LimitedWarnings(
    clock: () => Long = () => System.nanoTime(), log: String => Unit = Log.log.warn(_)) {
  private var (began, logged, leftOut) = (0L, 0, 0)

  def warn(text: => String): Unit = synchronized {
    if (logged == 0 || clock() - began > 60000000000L) {
      if (leftOut > 0) log(s"$leftOut more warnings of this kind were left out")
      began = clock()
      logged = 0
      leftOut = 0
    }
    if (logged < LimitedWarnings.PerMinute) {
      logged += 1
      log(text)
    } else leftOut += 1
  }
}

private[stagecrew] object LimitedWarnings {
  val PerMinute = 10
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
