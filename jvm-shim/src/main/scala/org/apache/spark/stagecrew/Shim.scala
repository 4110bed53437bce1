package org.apache.spark.stagecrew

import java.io.File
import java.util.{Collections, Map => JMap}
import java.util.concurrent.{ConcurrentHashMap, TimeUnit, TimeoutException}
import scala.collection.immutable.VectorMap
import org.apache.spark.{SPARK_VERSION, SparkConf, SparkContext, SparkEnv, TaskContext}
import org.apache.spark.api.plugin.{DriverPlugin, ExecutorPlugin, PluginContext}
import org.apache.spark.sql.StagecrewSql

/** What both sides of the plugin need to know about this jar. */
object Shim {
  /** The version of this jar, which is that of the Python package in it. */
  val version: String = {
    val in = getClass.getClassLoader.getResourceAsStream("stagecrew/_version.py")
    def text = new String(in.readAllBytes(), "UTF-8")
    if (in == null) "unknown"
    else try """__version__ = "(.+)"""".r.findFirstMatchIn(text).fold("unknown")(_.group(1)) finally in.close()
  }

  /** The path of this jar on this host. */
  def jar: String = new File(getClass.getProtectionDomain.getCodeSource.getLocation.toURI).getAbsolutePath

  /** The Spark that this jar was built for, as major.minor. */
  val SparkLine = "4.3"

  def checkSpark(running: String): Unit = if (!running.startsWith(SparkLine + ".")) throw new IllegalStateException(
    s"stagecrew $version is built for Spark $SparkLine, but this is Spark $running: " +
      s"install pyspark $SparkLine, or a stagecrew " +
      s"for Spark $running")

  private val drivers = new ConcurrentHashMap[String, DriverFacade]()

  /** For Python: the driver's part of an application; null if the plugin does not run in it. */
  def driver(application: String): DriverFacade = drivers.get(application)

  private[stagecrew] def running(application: String, facade: DriverFacade): Unit =
    { drivers.put(application, facade); () }
  private[stagecrew] def ended(facade: DriverFacade): Unit = { drivers.values.remove(facade); () }
}

/** The driver side of the plugin. It refuses everything that cannot work, before executors exist. */
final class DriverShim extends DriverPlugin {
  private var crew: DriverCrew = _
  private var facade: DriverFacade = _
  private var hook: AnyRef = _
  private var sc: SparkContext = _

  override def init(context: SparkContext, plugin: PluginContext): JMap[String, String] = {
    Shim.checkSpark(SPARK_VERSION)
    sc = context
    val conf = SparkInternals.conf(sc)
    DriverShim.configure(conf)
    crew = new DriverCrew(sc)
    crew.start(DriverShim.application(conf, crew.settings))
    facade = new DriverFacade(crew)
    Metrics.registerDriver(plugin.metricRegistry(), crew)
    Collections.singletonMap(DriverShim.Timelines, crew.timelines.toString)
  }

  override def registerMetrics(application: String, plugin: PluginContext): Unit = {
    Shim.running(application, facade)
    hook = SparkInternals.addShutdownHook(driver = true)(() => crew.drain(crew.settings.shutdownTimeoutMs))
    // An application runs without the tab if it must.
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

  /** Tells executors whether the UI or the event log shows timelines. */
  val Timelines = "timelines"

  /** Sets what the plugin needs in Spark's configuration, and refuses what cannot work. */
  def configure(conf: SparkConf): Unit = {
    conf.getOption(DaemonModuleKey).filter(_ != DaemonModule).foreach(module => throw new IllegalArgumentException(
      s"$DaemonModuleKey=$module: stagecrew must be Spark's Python daemon module; remove this setting, or the plugin"))
    if (!conf.getBoolean(UseDaemonKey, defaultValue = true)) throw new IllegalArgumentException(
      s"$UseDaemonKey=false: stagecrew works inside Spark's Python daemon; remove this setting")
    if (conf.getBoolean(UnifiedKey, defaultValue = false))
      throw new IllegalArgumentException(TaskAttempts.UnifiedMessage)
    Settings.unknown(conf).foreach(key =>
      Log.log.warn(s"$key is not a setting of stagecrew ${Shim.version}; check its spelling"))
    conf.set(DaemonModuleKey, DaemonModule)
    trackPartitions(conf)
  }

  /** Wraps the user's ShuffleDataIO, which books shuffle outputs, and has tasks report cached blocks. */
  private def trackPartitions(conf: SparkConf): Unit = {
    if (SparkInternals.oldFetch(conf)) Log.log.warn(
      "spark.shuffle.useOldFetchProtocol names outputs by partition, not by attempt: " +
        s"partitions are not tracked, and not " +
        "released when a topology ends")
    else if (!SparkInternals.sortsShuffles(conf)) Log.log.warn(
      s"spark.shuffle.manager=${conf.get("spark.shuffle.manager")} does not write through Spark's ShuffleDataIO: its " +
        "partitions are not tracked, and not released when a topology ends")
    conf.getOption(TrackedShuffleDataIO.Key).filter(_ != TrackedIO)
      .foreach(conf.set(TrackedShuffleDataIO.DelegateKey, _))
    conf.set(TrackedShuffleDataIO.Key, TrackedIO)
    if (!conf.contains(BlockStatusesKey)) conf.set(BlockStatusesKey, "true")
    else if (!conf.getBoolean(BlockStatusesKey, defaultValue = true)) Log.log.warn(
      s"$BlockStatusesKey=false: cached blocks are not tracked, and release='all' finds none; remove this setting")
    ()
  }

  /** The application's topology as the configuration alone describes it. */
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

/** The executor side of the plugin. `init` returns at once and never throws: Spark would relaunch executors without
  * end. A failure in it fails the tasks. */
final class ExecutorShim extends ExecutorPlugin {
  @volatile private var crew: ExecutorCrew = _
  @volatile private var notRunning: NotRunning = _
  private var hook: AnyRef = _
  private var added = false // whether this executor put the jar on the PYTHONPATH

  override def init(plugin: PluginContext, extra: JMap[String, String]): Unit = {
    val env = SparkEnv.get
    try {
      preparePythonPath()
      crew = new ExecutorCrew(env.conf, env.executorId, Shim.version, Shim.jar,
        extra.get(DriverShim.Timelines) == "true")
      Log.contained("preparing the samples of Python processes")(
        PythonPath.assign(ExecutorShim.Sampling, crew.sampling))
      // In a local master the driver's metrics have the same names, and include this executor.
      if (env.executorId != SparkContext.DRIVER_IDENTIFIER)
        Metrics.registerExecutor(plugin.metricRegistry(), crew.ledger)
      hook = SparkInternals.addShutdownHook(driver = false)(() => end())
    } catch { case Failure(error) => notRunning = new NotRunning(env.executorId, Shim.version, error) }
  }

  /** Never throws: Spark would run the body all the same. */
  override def onTaskStart(): Unit = {
    val task = TaskContext.get()
    try if (notRunning != null) notRunning.taskStarted(task) else if (crew != null) crew.taskStarted(task) catch {
      // The rejection itself has failed, for lack of memory or stack.
      case error: Throwable =>
        SparkInternals.markInterrupted(task, s"stagecrew: this task cannot begin: ${error.getClass.getName}")
    }
  }

  override def shutdown(): Unit = {
    end()
    if (hook != null) Log.contained("removing the shutdown hook")(SparkInternals.removeShutdownHook(hook))
    // In a local master the JVM may go on with an application without the plugin.
    if (added) Log.contained("removing the jar from the PYTHONPATH")(PythonPath.remove(Shim.jar))
    Log.contained("ending the samples of Python processes")(PythonPath.assign(ExecutorShim.Sampling, ""))
  }

  private def end(): Unit = if (crew != null) crew.shutdown(crew.settings.shutdownTimeoutMs)

  /** Lets Python processes of this executor find stagecrew in the jar, wherever the jar is on this host. */
  private def preparePythonPath(): Unit = try added = PythonPath.add(Shim.jar) catch {
    case Failure(error) => Log.log.error(
      s"Python processes of executor ${SparkEnv.get.executorId} cannot find stagecrew, " +
        s"because this JVM does not allow changes " +
        s"of its environment; install stagecrew ${Shim.version} for the executors' Python, or start the JVM with " +
        "--add-opens=java.base/java.util=ALL-UNNAMED", error)
  }
}

object ExecutorShim {
  /** The environment variable that tells Python processes to sample themselves
    * (python/stagecrew/worker/sampling.py). */
  val Sampling = "STAGECREW_SAMPLING"
}

/** The calls of driver Python over py4j: simple types only, and each call is short. */
final class DriverFacade(crew: DriverCrew) {
  def version(): String = Shim.version
  def settings(): JMap[String, String] = Settings.known
  def closeTimeoutMs(): Long = crew.settings.closeTimeoutMs

  def registerApplication(frame: Array[Byte]): Unit = crew.registerApplication(described(frame))
  def begin(frame: Array[Byte]): Unit = crew.begin(described(frame))

  private def described(frame: Array[Byte]): Description = {
    if (frame.length > crew.settings.maxFrame) throw new IllegalArgumentException(
      s"the listeners take ${frame.length} bytes, more than ${Settings.MaxFrame} allows")
    Description.decode(Frames.decodeMessage(frame))
  }

  private val ends = new ConcurrentHashMap[String, java.util.concurrent.Future[Unit]]()

  /** Begins to end a topology. `awaitEnd` returns whether it has ended. */
  def end(id: String, timeoutMs: Long): Unit = { ends.computeIfAbsent(id, _ => crew.end(id, timeoutMs)); () }

  def awaitEnd(id: String, ms: Long): Boolean = Option(ends.get(id)).forall { future =>
    try { future.get(ms, TimeUnit.MILLISECONDS); ends.remove(id); true } catch { case _: TimeoutException => false }
  }

  def cancel(id: String, reason: String): Unit = crew.cancel(id, reason)

  /** The place file of the channel to the driver's coordinators. */
  def coordinationPlace(): String = crew.coordination.place.toString

  /** Keeps what a dataset (a Dataset or a JavaRDD) has stored when the topology ends. */
  def keep(id: String, dataset: AnyRef): Unit = crew.partitions.keep(id, dataset)

  def stopQueries(id: String): Unit = crew.stopQueries(id)

  /** How many tasks run at once on the current executors. */
  def slots(): Int = crew.slots

  def drain(timeoutMs: Long): Unit = crew.drain(timeoutMs)

  def activity(id: String): String = {
    val activity = crew.activity(id)
    Json.write(activity.copy(queries = activity.queries.map(run => StagecrewSql.queryName(run).getOrElse(run))))
  }

  /** Takes a STATISTICS frame. What Python asks next is answered after it. */
  def statistics(frame: Array[Byte]): Unit = crew.statistics(Frames.decodeMessage(frame))

  /** Takes the state of the stored job that Python runs: the JSON of a `RecoveryView`. */
  def recovery(body: String): Unit = crew.recovery(Json.read[RecoveryView](body))

  /** The JSON of one topology, or of all if `id` is empty, without timelines and processes, which can be long. */
  def report(id: String): String = {
    val snapshot = crew.snapshot
    val chosen = snapshot.topologies.filter(t => id.isEmpty || t.id == id).map(_.copy(spans = Vector.empty))
    Json.write(snapshot.copy(topologies = chosen, processes = Vector.empty).json)
  }
}
