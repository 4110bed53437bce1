package org.apache.spark.stagecrew

import java.util.{LinkedHashMap => JLinkedHashMap, Map => JMap}
import scala.jdk.CollectionConverters._
import org.apache.spark.SparkConf
import partitions._

/** The values of stagecrew's configuration keys. `conf.py` documents the same keys. A test checks that both files
  * have the same keys and defaults. */
final class Settings(conf: SparkConf) {
  import Settings._

  val listeners: Seq[String] = names(Listeners)
  val jvmListeners: Seq[String] = names(JvmListeners)
  val openTimeoutMs: Long = time(OpenTimeout)
  val closeTimeoutMs: Long = time(CloseTimeout)
  val shutdownTimeoutMs: Long = time(ShutdownTimeout)
  /** How Python processes connect to their executor: "unix", "tcp", or "auto": with a Unix socket if possible. */
  val channel: String = conf.get(Channel, defaults(Channel)) match {
    case "auto" if !conf.getBoolean("spark.python.unix.domain.socket.enabled", true) => "tcp"
    case kind @ ("auto" | "unix" | "tcp") => kind
    case other => throw new IllegalArgumentException(s"$Channel=$other: it must be auto, unix or tcp")
  }
  val channelTimeoutMs: Long = time(ChannelTimeout)
  val directConnections: Boolean = conf.getBoolean(Direct, defaults(Direct).toBoolean)
  val maxFrame: Int = math.min(bytes(MaxFrame), Int.MaxValue - 16L).toInt
  val reportIntervalMs: Long = time(ReportInterval)
  val processesIntervalMs: Long = conf.getTimeAsMs(ProcessesInterval, defaults(ProcessesInterval))
  if (processesIntervalMs < 0) throw new IllegalArgumentException(
    s"$ProcessesInterval=${conf.get(ProcessesInterval)}: it must be a positive time, or 0 to take no samples")
  val mailboxEvents: Int = positiveInt(MailboxEvents)
  val mailboxBytes: Long = bytes(MailboxBytes)
  val retainedTopologies: Int = positiveInt(RetainedTopologies)
  val retainedDeadExecutors: Int = positiveInt(RetainedDeadExecutors)
  val tracing: Boolean = conf.getBoolean(Tracing, defaults(Tracing).toBoolean)
  val eventLogIntervalMs: Long = time(EventLogInterval)
  val eventLogMaxEvents: Int = positiveInt(EventLogMaxEvents)

  private def time(key: String): Long = positive(key, conf.getTimeAsMs(key, defaults(key)))
  private def bytes(key: String): Long = positive(key, conf.getSizeAsBytes(key, defaults(key)))
  private def positiveInt(key: String): Int = positive(key, conf.getInt(key, defaults(key).toInt).toLong).toInt

  private def positive(key: String, value: Long): Long = {
    if (value <= 0) throw new IllegalArgumentException(
      s"$key=${conf.get(key, defaults(key))}: it must be positive; remove it to use the default, ${defaults(key)}")
    value
  }

  private def names(key: String): Seq[String] =
    conf.get(key, defaults(key)).split(",").map(_.trim).filter(_.nonEmpty).toSeq
}

object Settings {
  val Prefix = "spark.stagecrew."

  private var defaults = Map.empty[String, String]

  private def key(name: String, default: String): String = {
    defaults += Prefix + name -> default
    Prefix + name
  }

  val Listeners: String = key("listeners", "")
  val JvmListeners: String = key("jvmListeners", "")
  val OpenTimeout: String = key("open.timeout", "60s")
  val CloseTimeout: String = key("close.timeout", "10s")
  val ShutdownTimeout: String = key("shutdown.timeout", "5s")
  val Channel: String = key("channel", "auto")
  val ChannelTimeout: String = key("channel.timeout", "10s")
  val Direct: String = key("channel.direct", "true")
  val MaxFrame: String = key("channel.maxFrame", "64m")
  val ReportInterval: String = key("report.interval", "1s")
  val RetainedTopologies: String = key("ui.retainedTopologies", "1000")
  val RetainedDeadExecutors: String = key("ui.retainedDeadExecutors", "100")
  val ProcessesInterval: String = key("processes.interval", "10s")
  val Tracing: String = key("tracing", "false")
  val EventLogInterval: String = key("eventLog.interval", "10s")
  val EventLogMaxEvents: String = key("eventLog.maxEvents", "100")
  val ShuffleDelegate: String = key("shuffle.delegate", TrackedShuffleDataIO.LocalDisk)
  val MailboxEvents: String = key("mailbox.events", "100000")
  val MailboxBytes: String = key("mailbox.bytes", "64m")
  Seq("ack.timeout" -> "30s", "request.timeout" -> "60s", "event.maxSize" -> "16m") // read by Python only
    .foreach { case (name, default) => key(name, default) }

  /** Every key with its default. A test compares them with `conf.py`. */
  def allDefaults: JMap[String, String] = new JLinkedHashMap(defaults.asJava)

  /** The keys that start with `Prefix`, but are not known. They are probably misspelled. */
  def unknown(conf: SparkConf): Seq[String] =
    conf.getAll.toSeq.map(_._1).filter(key => key.startsWith(Prefix) && !defaults.contains(key)).sorted
}
