package org.apache.spark.stagecrew

import java.io.File
import java.util.{Collections, Map => JMap}
import java.util.concurrent.{ConcurrentHashMap, TimeUnit, TimeoutException}
import org.apache.spark.{SPARK_VERSION, SparkConf, SparkContext, SparkEnv, TaskContext}
import org.apache.spark.api.plugin.{DriverPlugin, ExecutorPlugin, PluginContext}

/** What both sides of the plugin need to know of this jar. */
object Shim {
  /** The version of this jar, and so of the Python package in it. */
  val version: String = {
    val in = getClass.getClassLoader.getResourceAsStream("stagecrew/_version.py")
    if (in == null) "unknown"
    else try """__version__ = "(.+)"""".r.findFirstMatchIn(new String(in.readAllBytes(), "UTF-8")).map(_.group(1)).getOrElse("unknown")
    finally in.close()
  }

  /** Where this jar lies on this host. */
  def jar: String = new File(getClass.getProtectionDomain.getCodeSource.getLocation.toURI).getAbsolutePath

  /** The Spark that this jar was built for, as major.minor. */
  val SparkLine = "4.3"

  def checkSpark(running: String): Unit = if (!running.startsWith(SparkLine + ".")) {
    throw new IllegalStateException(
      s"stagecrew $version is built for Spark $SparkLine, and this is Spark $running: install pyspark $SparkLine, or a stagecrew for Spark $running")
  }

  private val drivers = new ConcurrentHashMap[String, DriverFacade]()

  /** For Python: the driver's part of an application; null when the plugin does not run in it. */
  def driver(application: String): DriverFacade = drivers.get(application)

  private[stagecrew] def running(application: String, facade: DriverFacade): Unit = { drivers.put(application, facade); () }
  private[stagecrew] def ended(facade: DriverFacade): Unit = { drivers.values.remove(facade); () }
}

/** The plugin's driver side: everything that can be refused is refused here, before executors exist. */
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
    DriverMetrics.register(plugin.metricRegistry(), crew)
    Collections.singletonMap(DriverShim.Timelines, crew.timelines.toString)
  }

  override def registerMetrics(application: String, plugin: PluginContext): Unit = {
    Shim.running(application, facade)
    hook = SparkInternals.addShutdownHook(driver = true)(() => crew.drain(crew.settings.shutdownTimeoutMs))
    // The tab only shows: an application is not refused for want of it.
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
  val Timelines = "timelines" // what the driver tells executors: whether anybody shows them

  /** Sets what the plugin needs in Spark's configuration; refuses what cannot work. */
  def configure(conf: SparkConf): Unit = {
    conf.getOption(DaemonModuleKey).filter(_ != DaemonModule).foreach { module =>
      throw new IllegalArgumentException(
        s"$DaemonModuleKey=$module: stagecrew has to be Spark's Python daemon module; take this setting away, or the plugin")
    }
    if (!conf.getBoolean(UseDaemonKey, defaultValue = true)) {
      throw new IllegalArgumentException(s"$UseDaemonKey=false: stagecrew works inside Spark's Python daemon; take this setting away")
    }
    if (conf.getBoolean(UnifiedKey, defaultValue = false)) throw new IllegalArgumentException(ExecutorCrew.UnifiedMessage)
    Settings.unknown(conf).foreach(key => Log.log.warn(s"$key is no setting of stagecrew ${Shim.version}; is it misspelt?"))
    conf.set(DaemonModuleKey, DaemonModule)
    trackPartitions(conf)
  }

  /** Shuffle outputs are booked by the ShuffleDataIO, around that of the user, and cached blocks by what tasks say of them. */
  private def trackPartitions(conf: SparkConf): Unit = {
    if (SparkInternals.oldFetch(conf)) {
      Log.log.warn("spark.shuffle.useOldFetchProtocol names outputs by partition, not by attempt: partitions are not tracked, and not released " +
        "when a topology ends")
    } else if (!SparkInternals.sortsShuffles(conf)) {
      Log.log.warn(s"spark.shuffle.manager=${conf.get("spark.shuffle.manager")} does not write through Spark's ShuffleDataIO: its partitions are not tracked, " +
        "and not released when a topology ends")
    }
    conf.getOption(TrackedShuffleDataIO.Key).filter(_ != TrackedShuffleDataIO.getClass.getName.stripSuffix("$"))
      .foreach(conf.set(TrackedShuffleDataIO.DelegateKey, _))
    conf.set(TrackedShuffleDataIO.Key, TrackedShuffleDataIO.getClass.getName.stripSuffix("$"))
    if (!conf.contains(BlockStatusesKey)) conf.set(BlockStatusesKey, "true")
    else if (!conf.getBoolean(BlockStatusesKey, defaultValue = true)) {
      Log.log.warn(s"$BlockStatusesKey=false: cached blocks are not tracked, and release='all' finds none; take this setting away")
    }
    ()
  }

  /** The application's topology as the configuration alone describes it. */
  def application(conf: SparkConf, settings: Settings): Description = {
    val named = settings.listeners.map { target =>
      Entry(0, "name", target.substring(target.indexOf(':') + 1), target, None, None, required = true, None)
    }
    val jvm = settings.jvmListeners.map { name =>
      Entry(0, "jvm", name.substring(name.lastIndexOf('.') + 1), name, Some("jvm"), Some("application"), required = true, None)
    }
    val executable = conf.getOption("spark.pyspark.python").orElse(sys.env.get("PYSPARK_PYTHON")).getOrElse("python3")
    val environment = conf.getAll.collect { case (key, value) if key.startsWith("spark.executorEnv.") =>
      key.stripPrefix("spark.executorEnv.") -> value
    }.toMap
    val files = conf.get("spark.submit.pyFiles", "").split(",").filter(_.nonEmpty).map(path => new File(path).getName).toSeq
    Description(Description.Application, Description.Application, None,
      (jvm ++ named).zipWithIndex.map { case (entry, i) => entry.copy(index = i) }.toVector,
      PythonCommand(executable, environment, files))
  }
}

/** The plugin's executor side. `init` returns at once and never throws: Spark would relaunch executors without end. What
  * goes wrong in it fails the tasks. */
final class ExecutorShim extends ExecutorPlugin {
  @volatile private var crew: ExecutorCrew = _
  @volatile private var notRunning: NotRunning = _
  private var hook: AnyRef = _
  private var added = false // whether the jar is on the PYTHONPATH because of this executor

  override def init(plugin: PluginContext, extra: JMap[String, String]): Unit = {
    val env = SparkEnv.get
    try {
      findable()
      crew = new ExecutorCrew(env.conf, env.executorId, Shim.version, Shim.jar, extra.get(DriverShim.Timelines) == "true")
      // In a local master the driver's metrics have the same names, and count this executor already.
      if (env.executorId != SparkContext.DRIVER_IDENTIFIER) ExecutorMetrics.register(plugin.metricRegistry(), crew.ledger)
      hook = SparkInternals.addShutdownHook(driver = false)(() => end())
    } catch { case Failure(error) => notRunning = new NotRunning(env.executorId, Shim.version, error) }
  }

  /** Never throws: Spark would run the body all the same. */
  override def onTaskStart(): Unit = {
    val task = TaskContext.get()
    try if (notRunning != null) notRunning.taskStarted(task) else if (crew != null) crew.taskStarted(task) catch {
      // The refusal itself has failed, for lack of memory or stack.
      case error: Throwable => SparkInternals.markInterrupted(task, s"stagecrew: this task cannot begin: ${error.getClass.getName}")
    }
  }

  override def shutdown(): Unit = {
    end()
    if (hook != null) Log.contained("removing the shutdown hook")(SparkInternals.removeShutdownHook(hook))
    // In a local master the JVM may go on with an application without the plugin.
    if (added) Log.contained("taking the jar off the PYTHONPATH")(PythonPath.remove(Shim.jar))
  }

  private def end(): Unit = if (crew != null) crew.shutdown(crew.settings.shutdownTimeoutMs)

  /** Python processes of this executor find stagecrew in the jar, wherever the jar is on this host. */
  private def findable(): Unit = try added = PythonPath.add(Shim.jar) catch {
    case Failure(error) => Log.log.error(s"Python processes of executor ${SparkEnv.get.executorId} do not find stagecrew, because this JVM does not let " +
      s"its environment be changed; install stagecrew ${Shim.version} for the executors' Python, or give the JVM --add-opens=java.base/java.util=ALL-UNNAMED", error)
  }
}

/** What Python calls over py4j: simple types only, each call short. */
final class DriverFacade(crew: DriverCrew) {
  def version(): String = Shim.version
  def settings(): JMap[String, String] = Settings.known
  def closeTimeoutMs(): Long = crew.settings.closeTimeoutMs

  private def message(bytes: Array[Byte]): Description = {
    val frame = Frames.decodeMessage(bytes)
    if (bytes.length > crew.settings.maxFrame) {
      throw new IllegalArgumentException(s"the listeners take ${bytes.length} bytes, more than ${Settings.MaxFrame} allows")
    }
    Description.decode(frame.text("body"), frame.blobs("blobs"))
  }

  def registerApplication(frame: Array[Byte]): Unit = crew.registerApplication(message(frame))

  def begin(frame: Array[Byte]): Unit = crew.begin(message(frame))

  private val ends = new ConcurrentHashMap[String, java.util.concurrent.Future[Unit]]()

  /** Begins to end a topology; `awaitEnd` says when it is over. */
  def end(id: String, timeoutMs: Long): Unit = { ends.computeIfAbsent(id, _ => crew.end(id, timeoutMs)); () }

  def awaitEnd(id: String, ms: Long): Boolean = Option(ends.get(id)).forall { future =>
    try { future.get(ms, TimeUnit.MILLISECONDS); ends.remove(id); true } catch { case _: TimeoutException => false }
  }

  def cancel(id: String, reason: String): Unit = crew.cancel(id, reason)

  /** The file by which driver Python finds the channel of its coordinators. */
  def coordinationPlace(): String = crew.coordination.place.toString

  /** What this dataset (a Dataset or a JavaRDD) has stored stays when the topology ends. */
  def keep(id: String, dataset: AnyRef): Unit = crew.partitions.keep(id, dataset)

  def stopQueries(id: String): Unit = crew.stopQueries(id)

  /** How many tasks run at once on the executors that are here now. */
  def slots(): Int = crew.slots

  def drain(timeoutMs: Long): Unit = crew.drain(timeoutMs)

  def activity(id: String): String = {
    val activity = crew.activity(id)
    val node = Json.obj()
    val jobs = node.putArray("jobs")
    activity.jobs.foreach(job => jobs.add(job))
    val executions = node.putArray("executions")
    activity.executions.foreach(execution => executions.add(execution))
    node.set[com.fasterxml.jackson.databind.JsonNode]("queries",
      Json.arr(activity.queries.map(run => SparkInternals.queryName(run).getOrElse(run))))
    Json.write(node)
  }

  /** What Python says of coordinators: a STATISTICS frame. It is known before whatever is asked for next. */
  def statistics(frame: Array[Byte]): Unit = crew.statistics(Frames.decodeMessage(frame))

  /** What it says of the stored job that it runs, as JSON of a `RecoveryView`. */
  def recovery(body: String): Unit = crew.recovery(RecoveryView.of(Json.parse(body)))

  /** All that is known of one topology, or of all when `id` is empty; but for timelines and processes, which can be long. */
  def report(id: String): String = {
    val snapshot = crew.snapshot
    val chosen = snapshot.topologies.filter(t => id.isEmpty || t.id == id).map(_.copy(spans = Vector.empty))
    Json.write(snapshot.copy(topologies = chosen, processes = Vector.empty).json)
  }
}
