package org.apache.spark.stagecrew

import org.slf4j.{Logger, LoggerFactory}

/** Where the shim logs. Messages name topology, listener, executor, attempt; never what a listener holds. */
private[stagecrew] object Log {
  val log: Logger = LoggerFactory.getLogger("stagecrew")

  /** Runs it; what it throws is logged and goes no further. */
  def contained(what: => String)(f: => Unit): Unit =
    try f catch { case error: Throwable if scala.util.control.NonFatal(error) => log.warn(s"$what failed", error) }
}
