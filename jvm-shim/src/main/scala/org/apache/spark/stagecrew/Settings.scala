package org.apache.spark.stagecrew

import java.util.{LinkedHashMap => JLinkedHashMap, Map => JMap}
import scala.jdk.CollectionConverters._
import org.apache.spark.SparkConf

/** The values of stagecrew's configuration keys. `conf.py` documents the same keys; a test compares both. */
final class Settings(conf: SparkConf) {
  import Settings._

  val listeners: Seq[String] = names(Listeners)
  val jvmListeners: Seq[String] = names(JvmListeners)
  val openTimeoutMs: Long = time(OpenTimeout)
  val closeTimeoutMs: Long = time(CloseTimeout)
  val shutdownTimeoutMs: Long = time(ShutdownTimeout)
  val channelTimeoutMs: Long = time(ChannelTimeout)
  val maxFrame: Int = math.min(conf.getSizeAsBytes(MaxFrame, defaults(MaxFrame)), Int.MaxValue - 16L).toInt
  val reportIntervalMs: Long = time(ReportInterval)
  val processesIntervalMs: Long = conf.getTimeAsMs(ProcessesInterval, defaults(ProcessesInterval)) match {
    case negative if negative < 0 =>
      throw new IllegalArgumentException(s"$ProcessesInterval=${conf.get(ProcessesInterval)}: it is a time, or 0 for never")
    case ms => ms
  }
  val mailboxEvents: Int = positive(MailboxEvents, conf.getInt(MailboxEvents, defaults(MailboxEvents).toInt))
  val mailboxBytes: Long = positive(MailboxBytes, conf.getSizeAsBytes(MailboxBytes, defaults(MailboxBytes)))
  val retainedTopologies: Int = positive(RetainedTopologies, conf.getInt(RetainedTopologies, defaults(RetainedTopologies).toInt))

  val retainedDeadExecutors: Int =
    positive(RetainedDeadExecutors, conf.getInt(RetainedDeadExecutors, defaults(RetainedDeadExecutors).toInt))

  val eventLogIntervalMs: Long = time(EventLogInterval)
  val eventLogMaxEvents: Int = positive(EventLogMaxEvents, conf.getInt(EventLogMaxEvents, defaults(EventLogMaxEvents).toInt))

  private def time(key: String): Long = positive(key, conf.getTimeAsMs(key, defaults(key)))

  private def positive[T](key: String, value: T)(implicit numeric: Numeric[T]): T =
    if (numeric.gt(value, numeric.zero)) value
    else throw new IllegalArgumentException(s"$key=${conf.get(key, defaults(key))}: it has to be more than nothing; take it away for ${defaults(key)}")

  private def names(key: String): Seq[String] =
    conf.get(key, defaults(key)).split(",").map(_.trim).filter(_.nonEmpty).toSeq
}

object Settings {
  val Prefix = "spark.stagecrew."
  val Listeners = "spark.stagecrew.listeners"
  val JvmListeners = "spark.stagecrew.jvmListeners"
  val OpenTimeout = "spark.stagecrew.open.timeout"
  val CloseTimeout = "spark.stagecrew.close.timeout"
  val ShutdownTimeout = "spark.stagecrew.shutdown.timeout"
  val ChannelTimeout = "spark.stagecrew.channel.timeout"
  val MaxFrame = "spark.stagecrew.channel.maxFrame"
  val ReportInterval = "spark.stagecrew.report.interval"
  val RetainedTopologies = "spark.stagecrew.ui.retainedTopologies"
  val RetainedDeadExecutors = "spark.stagecrew.ui.retainedDeadExecutors"
  val EventLogInterval = "spark.stagecrew.eventLog.interval"
  val EventLogMaxEvents = "spark.stagecrew.eventLog.maxEvents"

  val ProcessesInterval = "spark.stagecrew.processes.interval"
  val ShuffleDelegate = TrackedShuffleDataIO.DelegateKey
  val MailboxEvents = "spark.stagecrew.mailbox.events"
  val MailboxBytes = "spark.stagecrew.mailbox.bytes"
  val AckTimeout = "spark.stagecrew.ack.timeout"
  val RequestTimeout = "spark.stagecrew.request.timeout"
  val MaxEvent = "spark.stagecrew.event.maxSize"

  private val defaults = Map(
    Listeners -> "",
    JvmListeners -> "",
    OpenTimeout -> "60s",
    CloseTimeout -> "10s",
    ShutdownTimeout -> "5s",
    ChannelTimeout -> "10s",
    MaxFrame -> "64m",
    ReportInterval -> "1s",
    RetainedTopologies -> "1000",
    RetainedDeadExecutors -> "100",
    ProcessesInterval -> "10s",
    EventLogInterval -> "10s",
    EventLogMaxEvents -> "100",
    ShuffleDelegate -> TrackedShuffleDataIO.LocalDisk,
    MailboxEvents -> "100000",
    MailboxBytes -> "64m",
    AckTimeout -> "30s",
    RequestTimeout -> "60s",
    MaxEvent -> "16m")

  /** Every key with its default, for the test that compares them with `conf.py`. */
  def known: JMap[String, String] = new JLinkedHashMap(defaults.asJava)

  /** Keys that begin as ours do and are none: likely misspelt. */
  def unknown(conf: SparkConf): Seq[String] =
    conf.getAll.toSeq.map(_._1).filter(key => key.startsWith(Prefix) && !defaults.contains(key)).sorted
}
