package org.apache.spark.stagecrew
package driver

import java.io.File
import java.util.{Collections, Map => JMap}
import scala.collection.immutable.VectorMap
import org.apache.spark.{SparkConf, SparkContext}
import org.apache.spark.api.plugin.{DriverPlugin, PluginContext}
import executor._, partitions._, spark._, ui._, wire._

/** The driver side of the plugin. Before any executor starts, it rejects configurations that cannot work. */
final class DriverShim extends DriverPlugin {
  private[stagecrew] var crew: DriverCrew = _
  private var facade: DriverFacade = _
  private var hook: AnyRef = _
  private var sc: SparkContext = _

  override def init(context: SparkContext, plugin: PluginContext): JMap[String, String] = {
    sc = context
    val conf = SparkInternals.conf(sc)
    DriverShim.configure(conf)
    crew = new DriverCrew(sc)
    crew.start(DriverShim.application(conf, crew.settings))
    facade = new DriverFacade(crew)
    crew.partitions.problems.foreach(Log.log.warn(_))
    Metrics.registerDriver(plugin.metricRegistry(), crew)
    Collections.singletonMap(DriverShim.Timelines, crew.timelines.toString)
  }

  override def registerMetrics(application: String, plugin: PluginContext): Unit = {
    Shim.running(application, facade)
    hook = SparkInternals.addShutdownHook(driver = true)(() => crew.drain(crew.settings.shutdownTimeoutMs))
    // If this fails, the application runs without the tab.
    Log.contained("attaching the tab to the Spark UI")(Tab.attach(sc, crew))
  }

  override def shutdown(): Unit = {
    if (hook != null) Log.contained("removing the shutdown hook")(SparkInternals.removeShutdownHook(hook))
    if (facade != null) Shim.ended(facade)
    if (crew != null) crew.stop()
  }
}

object DriverShim {
  val DaemonModuleKey = "spark.python.daemon.module"
  val DaemonModule = "stagecrew.worker.daemon"
  private val UseDaemonKey = "spark.python.use.daemon"
  private val UnifiedKey = "spark.sql.execution.udf.unified.execution.enabled"
  private val BlockStatusesKey = "spark.taskMetrics.trackUpdatedBlockStatuses"
  private val TrackedIO = TrackedShuffleDataIO.getClass.getName.stripSuffix("$")

  /** The key that tells executors whether the UI or the event log shows timelines. */
  val Timelines = "timelines"

  /** Sets the Spark settings that the plugin needs, and rejects settings that cannot work. */
  def configure(conf: SparkConf): Unit = {
    conf.getOption(DaemonModuleKey).filter(_ != DaemonModule).foreach(module => throw new IllegalArgumentException(
      s"$DaemonModuleKey=$module: stagecrew must provide Spark's Python daemon; remove this setting or the plugin"))
    if (!conf.getBoolean(UseDaemonKey, defaultValue = true)) throw new IllegalArgumentException(
      s"$UseDaemonKey=false: stagecrew works inside Spark's Python daemon; remove this setting")
    if (conf.getBoolean(UnifiedKey, defaultValue = false))
      throw new IllegalArgumentException(TaskAttempts.UnifiedMessage)
    Settings.unknown(conf).foreach(key =>
      Log.log.warn(s"$key is not a setting of stagecrew ${Shim.version}; check its spelling"))
    conf.set(DaemonModuleKey, DaemonModule)
    SparkVersion.configure(conf)
    trackPartitions(conf)
  }

  /** Wraps the configured ShuffleDataIO in ours, which records shuffle outputs, and lets tasks report their cached
    * blocks. */
  private def trackPartitions(conf: SparkConf): Unit = {
    if (SparkInternals.usesOldFetch(conf)) Log.log.warn(
      "spark.shuffle.useOldFetchProtocol=true: Spark names shuffle outputs by partition, not by attempt, so they are " +
        "not tracked, and not released when a topology ends")
    else if (!SparkInternals.sortsShuffles(conf)) Log.log.warn(
      s"spark.shuffle.manager=${conf.get("spark.shuffle.manager")} does not write through Spark's ShuffleDataIO: its " +
        "partitions are not tracked, and not released when a topology ends")
    conf.getOption(TrackedShuffleDataIO.Key).filter(_ != TrackedIO)
      .foreach(conf.set(TrackedShuffleDataIO.DelegateKey, _))
    conf.set(TrackedShuffleDataIO.Key, TrackedIO)
    if (!conf.contains(BlockStatusesKey)) conf.set(BlockStatusesKey, "true")
    else if (!conf.getBoolean(BlockStatusesKey, defaultValue = true)) Log.log.warn(
      s"$BlockStatusesKey=false: cached blocks are not tracked, and not released; remove this setting")
  }

  /** The application topology as described by the configuration. */
  def application(conf: SparkConf, settings: Settings): Description = {
    val jvm = settings.jvmListeners.map { name =>
      Entry(0, "jvm", name.substring(name.lastIndexOf('.') + 1), name,
        Some("jvm"), Some("application"), required = true, None)
    }
    val named = settings.listeners.map { target =>
      Entry(0, "name", target.substring(target.indexOf(':') + 1), target, None, None, required = true, None)
    }
    val prefix = "spark.executorEnv."
    Description(Description.Application, Description.Application, None,
      (jvm ++ named).zipWithIndex.map { case (entry, i) => entry.copy(index = i) }.toVector,
      conf.getOption("spark.pyspark.python").orElse(sys.env.get("PYSPARK_PYTHON")).getOrElse("python3"),
      conf.getAll.collect { case (key, value) if key.startsWith(prefix) =>
        key.stripPrefix(prefix) -> value }.to(VectorMap),
      conf.get("spark.submit.pyFiles", "").split(",").filter(_.nonEmpty).map(path => new File(path).getName).toVector)()
  }
}
