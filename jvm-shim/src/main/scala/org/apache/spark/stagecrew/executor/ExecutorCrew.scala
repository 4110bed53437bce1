package org.apache.spark.stagecrew
package executor

import java.io.File
import java.nio.file.Path
import java.util.concurrent._
import com.fasterxml.jackson.databind.node.ObjectNode
import scala.jdk.CollectionConverters._
import org.apache.spark.{SparkConf, SparkEnv, TaskContext}
import driver._, listeners._, partitions._, spark._, wire._

/**
 * One executor's part of the plugin: it holds the parts, carries out the driver's messages, and ends everything.
 *
 * Task threads start attempts and wait for opens (`TaskAttempts`). Each link to a Python process has a thread
 * (`PythonLinks`). `loop` is the one thread that closes and reports. RPC threads only hand over.
 */
final class ExecutorCrew(
    private[stagecrew] val conf: SparkConf, private[stagecrew] val executor: String, version: String, jar: String,
    timelines: Boolean) extends ThreadLoop("stagecrew-executor") with Handler {
  import ExecutorCrew._

  val settings = new Settings(conf)
  val ledger = new Ledger(timelines = timelines)
  private[stagecrew] val table = new TopologyTable

  private val pool = Executors.newCachedThreadPool(daemon("stagecrew-hook"))
  private lazy val watchdog = Executors.newSingleThreadScheduledExecutor(daemon("stagecrew-watchdog"))
  private val self: Peer = Rpc.endpoint(s"stagecrew-$executor", this)
  private lazy val driver: Peer = Rpc.driver(DriverCrew.EndpointName)
  private[stagecrew] lazy val host: String =
    Option(SparkEnv.get).flatMap(env => Option(env.blockManager.blockManagerId)).map(_.host).getOrElse("")
  private lazy val application: String = SparkEnv.get.conf.getAppId
  private lazy val configuration: Map[String, String] = {
    val secret = SparkInternals.redactionPattern(conf)
    SparkEnv.get.conf.getAll.toMap.filter { case (key, _) => secret.findFirstIn(key).isEmpty }
  }

  private[stagecrew] val links = new PythonLinks(this)
  private[stagecrew] val attempts = new TaskAttempts(this)
  private[stagecrew] val descriptions =
    new Descriptions(executor, () => host, table, pool, bytes => askDriverSync(bytes, AskMs))
  private[stagecrew] val processes = new Processes(ledger, links.nameOf, () => System.nanoTime())
  private[stagecrew] val agent =
    new Agent(() => place, settings, jar, text => Log.log.info(s"executor $executor $text"))
  private[stagecrew] val sides = new ExecutorListeners(settings, ledger, processes, agent, pool,
    description => Where(application, description.name, description.id, executor, host, configuration.asJava))
  private[stagecrew] val partitions = new Partitions(attempts.ownerOf, ledger, pool, new Partitions.Disk {
    override def delete(output: Output): Boolean = SparkInternals.deleteOutput(output)
    override def has(block: CachedBlock): Boolean = SparkInternals.hasBlock(block)
    override def outputsOf(shuffles: Set[Int]): Seq[Output] = SparkInternals.outputsOf(shuffles)
  })
  private[stagecrew] val samples = new SampleLog(executor, () => host)
  private[stagecrew] val reports = new ExecutorReports(this)
  private[stagecrew] val closings = new Closings(executor, table, processes, sides, pool, this)(
    reports.release, (topology, unclosed, taken) =>
      reports.of(topology, unclosed, taken.getOrElse(Taken())), reports.closed)
  /** The evaluations, from the first bound function on. */
  @volatile private[stagecrew] var evaluations = Option.empty[Evaluations]

  private val lock = new Object
  private var server = Option.empty[(Channels, File)]
  @volatile private var abandoned = false // the driver is gone

  ledger.samples = Some(samples)
  Partitions.serve(partitions)
  every(settings.reportIntervalMs)("a report to the driver")(reports.report())

  def taskStarted(task: TaskContext): Unit = attempts.started(task)

  // -- The channel to Python processes

  private[stagecrew] def startEvaluations(): Evaluations = lock.synchronized {
    if (evaluations.isEmpty) evaluations = Some(Evaluations.on(executor, settings, attempts))
    evaluations.get
  }

  /** The place file of the channel, which is made at the first call. */
  private[stagecrew] def place: Path = lock.synchronized {
    if (server.isEmpty) {
      val folder = try SparkInternals.temporaryFolder(conf) catch {
        case Failure(error) => throw new java.io.IOException(
          s"executor $executor (host $host) cannot create a folder for the channel to its Python processes; check " +
            s"its local directories (spark.local.dir): ${TaskRejection.text(error)}", error)
      }
      val channels = try new Channels(folder.toPath, settings, version, () => welcome, links) catch {
        case error: Throwable => Log.contained(s"deleting $folder")(SparkInternals.delete(folder)); throw error
      }
      server = Some(channels -> folder)
    }
    server.get._1.place
  }

  /** How often Python processes sample themselves, in seconds, and the place file; empty if they must not. */
  def sampling: String =
    if (settings.processesIntervalMs == 0) "" else s"${settings.processesIntervalMs / 1000.0} $place"

  private def welcome: String = {
    val node = Json.obj().put("application", application).put("executor", executor).put("host", host)
      .put("openTimeout", settings.openTimeoutMs / 1000.0).put("closeTimeout", settings.closeTimeoutMs / 1000.0)
    Json.write(node.set[ObjectNode]("configuration", Json.parse(Json.write(configuration))))
  }

  // -- The driver

  private[stagecrew] def sendToDriver(message: Array[Byte]): Unit = driver.send(Rpc.withSender(self, message))

  private[stagecrew] def askDriver(message: Array[Byte])(done: Either[Throwable, Array[Byte]] => Unit): Unit =
    driver.ask(Rpc.withSender(self, message), AskMs)(done)

  private[stagecrew] def askDriverSync(message: Array[Byte], timeoutMs: Long): Array[Byte] =
    driver.askSync(Rpc.withSender(self, message), timeoutMs)

  override def receive(message: Array[Byte], from: Option[Peer], address: String, reply: Reply): Unit = {
    val frame = Frames.decodeMessage(message)
    frame.kind match {
      case "END_TOPOLOGY" =>
        val (topology, timeoutMs) = (frame.text("topology"), frame.long("timeout"))
        descriptions.ended(topology)
        inLoop(reports.end(topology, timeoutMs, Json.read[Release](frame.text("body")), Some(reply)))
      case "UNPERSISTED" => inLoop {
        partitions.unpersisted(frame.text("topology"), Json.read[Datasets](frame.text("body")).caches.toSet)
        reply.answer(reports.of(frame.text("topology")))
      }
      case other => reply.fail(new FrameException(s"the driver does not send $other"))
    }
  }

  override def disconnected(address: String): Unit = if (address == Rpc.driverAddress(conf)) {
    abandoned = true
    Log.contained("deleting what topologies have stored")(partitions.abandon())
  }

  // -- The end of the executor

  /** Closes everything that is open, and waits for it within the timeout. A second call waits for the first. */
  def shutdown(timeoutMs: Long): Unit = endOnce(timeoutMs) {
    val deadline = System.nanoTime() + timeoutMs * 1000000L
    def left: Long = math.max(0L, (deadline - System.nanoTime()) / 1000000L)
    def end(topologies: Seq[String]): Unit = {
      val latches = topologies.map(closings.latch)
      topologies.foreach(id => inLoop(closings.end(id, left, None)))
      latches.foreach(_.await(left, TimeUnit.MILLISECONDS))
    }
    // A task of the JVM cannot be ended: after half of the time the others close without it.
    schedule(timeoutMs / 2)(closings.force())
    val (application, inner) = descriptions.ids.partition(_ == Description.Application)
    // Attempts are being killed, or never end: their workers are asked to end, and close their open listeners.
    processes.busy.foreach(links.terminate)
    end(inner)
    end(application)
    agent.stop()
    agent.await(left)
    if (abandoned) Log.contained("deleting what topologies have stored")(partitions.abandon())
    partitions.awaitDeletions(left)
    reports.last(math.max(left, LastReportMs))
    Partitions.stop(partitions)
    loop.shutdownNow()
    watchdog.shutdownNow()
    pool.shutdown()
    lock.synchronized(server).foreach { case (channels, folder) =>
      channels.close()
      Log.contained(s"deleting $folder")(SparkInternals.delete(folder))
    }
    Log.contained("stopping the endpoint")(Rpc.stopEndpoint(self))
  }

  /** Runs something on a thread of its own after this time. The loop writes to links: a process that hangs could
    * delay it. */
  private[stagecrew] def watch(ms: Long)(f: => Unit): Unit =
    watchdog.schedule((() => Log.contained("ending overdue processes")(f)): Runnable, ms + 10, TimeUnit.MILLISECONDS)
}

object ExecutorCrew {
  /** How long an attempt that was interrupted or failed is remembered after its end, for a worker that begins it
    * late; and the blocks of a topology that has closed here, for the driver to unpersist their datasets. */
  private[stagecrew] val RememberMs = 60000L

  /** How long an executor waits for a reply of the driver. */
  private[stagecrew] val AskMs = 30000L
  private val LastReportMs = 500L

  private[stagecrew] def daemon(name: String): ThreadFactory = body => {
    val thread = new Thread(body, name)
    thread.setDaemon(true)
    thread
  }
}
