package org.apache.spark.stagecrew
package executor

import java.util.{Map => JMap}
import org.apache.spark.{SparkEnv, TaskContext}
import org.apache.spark.api.plugin.{ExecutorPlugin, PluginContext}
import driver._, spark._

/** The executor side of the plugin. `init` returns immediately and never throws, because Spark would relaunch the
  * executors forever. If `init` fails, the tasks fail. */
final class ExecutorShim extends ExecutorPlugin {
  @volatile private var crew: ExecutorCrew = _
  @volatile private var notRunning: NotRunning = _
  /** The environment variable that makes Python processes sample themselves (python/stagecrew/worker/sampling.py). */
  private val Sampling = "STAGECREW_SAMPLING"
  private var hook: AnyRef = _
  private var addedJar = false // whether this executor put the jar on the PYTHONPATH

  override def init(plugin: PluginContext, extra: JMap[String, String]): Unit = {
    val env = SparkEnv.get
    try {
      preparePythonPath()
      crew = new ExecutorCrew(env.conf, env.executorId, extra.get(DriverShim.Timelines) == "true")
      Log.contained("switching on the samples of Python processes")(PythonPath.assign(Sampling, crew.sampling))
      // With a local master, the driver's metrics have the same names and include this executor.
      if (!SparkInternals.isDriver(env.executorId))
        Metrics.registerExecutor(plugin.metricRegistry(), crew.ledger)
      hook = SparkInternals.addShutdownHook(driver = false)(() => end())
    } catch { case Failure(error) => notRunning = new NotRunning(env.executorId, Shim.version, error) }
  }

  /** Never throws: Spark would log the exception and run the body of the task. */
  override def onTaskStart(): Unit = {
    val task = TaskContext.get()
    try if (notRunning != null) notRunning.taskStarted(task) else if (crew != null) crew.taskStarted(task) catch {
      // The rejection itself has failed, for example with an OutOfMemoryError or a StackOverflowError.
      case error: Throwable =>
        SparkInternals.markInterrupted(task, s"stagecrew: this task could not be started: ${error.getClass.getName}")
    }
  }

  override def shutdown(): Unit = {
    end()
    if (hook != null) Log.contained("removing the shutdown hook")(SparkInternals.removeShutdownHook(hook))
    // With a local master, the same JVM may later run another application without the plugin.
    if (addedJar) Log.contained("removing the jar from the PYTHONPATH")(PythonPath.remove(Shim.jar))
    Log.contained("switching off the samples of Python processes")(PythonPath.assign(Sampling, ""))
  }

  private def end(): Unit = if (crew != null) crew.shutdown(crew.settings.shutdownTimeoutMs)

  /** Puts the jar on the PYTHONPATH of this executor's Python processes, so that they can import stagecrew. */
  private def preparePythonPath(): Unit = try addedJar = PythonPath.add(Shim.jar) catch {
    case Failure(error) => Log.log.error(
      s"Python processes of executor ${SparkEnv.get.executorId} cannot import stagecrew, because this JVM does not " +
        s"allow changes to its environment; install stagecrew ${Shim.version} for the executors' Python, or start " +
        "the JVM with --add-opens=java.base/java.util=ALL-UNNAMED", error)
  }
}
