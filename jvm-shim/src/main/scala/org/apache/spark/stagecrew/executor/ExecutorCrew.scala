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
 * The plugin on one executor: it creates the components, handles the driver's messages, and shuts everything down.
 *
 * Task threads start attempts and wait for opens (`TaskAttempts`). Each link to a Python process has its own thread
 * (`PythonLinks`). The `loop` thread closes topologies and sends reports. RPC threads enqueue work, except that they
 * deliver the driver's frames to evaluations themselves (`Evaluations`).
 */
final class ExecutorCrew(
    private[stagecrew] val conf: SparkConf, private[stagecrew] val executor: String, timelines: Boolean)
  extends ThreadLoop("stagecrew-executor") with Handler {
  import ExecutorCrew._

  val settings = new Settings(conf)
  val ledger = new Ledger(timelines = timelines)
  private[stagecrew] val table = new TopologyTable

  // The threads of the pool load classes of users: each must be created by a thread with Spark's class loader.
  private val pool = Executors.newCachedThreadPool(daemon("stagecrew-hook"))
  private lazy val watchdog = Executors.newSingleThreadScheduledExecutor(daemon("stagecrew-watchdog"))
  private val self: Peer = Rpc.endpoint(s"stagecrew-$executor", this)
  private lazy val driver: Peer = Rpc.driver(DriverCrew.EndpointName)
  private[stagecrew] lazy val host: String = SparkInternals.host
  private lazy val application: String = SparkEnv.get.conf.getAppId
  private lazy val configuration: Map[String, String] = {
    val secret = SparkInternals.redactionPattern(conf)
    SparkEnv.get.conf.getAll.toMap.filter { case (key, _) => secret.findFirstIn(key).isEmpty }
  }

  private[stagecrew] val links = new PythonLinks(this)
  private[stagecrew] val attempts = new TaskAttempts(this)
  private[stagecrew] val descriptions =
    new Descriptions(executor, () => host, table, pool, bytes => askDriverSync(bytes, ReplyTimeoutMs))
  private[stagecrew] val processes = new Processes(ledger, links.nameOf, () => System.nanoTime())
  private[stagecrew] val agent = new Agent(executor, () => addressFile, settings)
  private[stagecrew] val executorListeners = new ExecutorListeners(settings, ledger, processes, agent, pool,
    description => ListenerContext(application, description.name, description.id, executor, host, configuration.asJava))
  private[stagecrew] val partitions = new Partitions(attempts.ownerOf, ledger, pool, new Partitions.Disk {
    override def delete(output: Output): Boolean = SparkInternals.deleteOutput(output)
    override def has(block: CachedBlock): Boolean = SparkInternals.hasBlock(block)
    override def outputsOf(shuffles: Set[Int]): Seq[Output] = SparkInternals.outputsOf(shuffles)
  })
  private[stagecrew] val samples = new SampleLog(executor, () => host, taskOf = pid => for {
    attempt <- processes.attemptOf(pid).flatMap(attempts.get)
    topology <- attempt.chain.lastOption
  } yield topology -> attempt.name)
  private[stagecrew] val reports = new ExecutorReports(this)
  private[stagecrew] val closings = new Closings(executor, table, processes, executorListeners, pool, this)(
    reports.release, (topology, unclosed, released) =>
      reports.of(topology, unclosed, released.getOrElse(Deletions())), reports.closed)
  /** Created by the first attempt that may call bound functions. */
  @volatile private[stagecrew] var evaluations = Option.empty[Evaluations]

  private val lock, evaluationsLock = new Object // the second one is held while the driver is looked up
  private var server = Option.empty[Channels]
  @volatile private var driverLost = false

  ledger.samples = Some(samples)
  ledger.runningHooks = () => processes.runningHooks
  Partitions.serve(partitions)
  every(settings.reportIntervalMs)("sending a report to the driver")(reports.report())

  def taskStarted(task: TaskContext): Unit = attempts.started(task)

  // -- The channel to Python processes

  private[stagecrew] def startEvaluations(): Evaluations = evaluations.getOrElse(evaluationsLock.synchronized {
    if (evaluations.isEmpty) evaluations = Some(
      Evaluations.start(executor, settings, attempts, if (settings.directConnections) addressFile.toString else ""))
    evaluations.get
  })

  /** The address file of the channel. The first call creates the channel. */
  private[stagecrew] def addressFile: Path = lock.synchronized {
    if (server.isEmpty) server = Some(
      new Channels(() => newFolder(), settings, Shim.version, s"executor $executor", () => welcome, links))
    server.get.addressFile
  }

  private def newFolder(): File = try SparkInternals.temporaryFolder(conf) catch {
    case Failure(error) => throw new java.io.IOException(
      s"executor $executor (host $host) cannot create a folder for the channel to its Python processes; check " +
        s"its local directories (spark.local.dir): ${TaskRejection.text(error)}", error)
  }

  /** The sampling interval of Python processes in seconds, and the path of the address file. Empty if sampling is
    * off. */
  def sampling: String =
    if (settings.processesIntervalMs == 0) "" else s"${settings.processesIntervalMs / 1000.0} $addressFile"

  private def welcome: String = {
    val node = Json.obj().put("application", application).put("executor", executor).put("host", host)
      .put("openTimeout", settings.openTimeoutMs / 1000.0).put("closeTimeout", settings.closeTimeoutMs / 1000.0)
    Json.write(node.set[ObjectNode]("configuration", Json.parse(Json.write(configuration))))
  }

  // -- The driver

  /** Sends a message that needs no reply. It has no sender: the driver takes the executor's address from requests. */
  private[stagecrew] def sendToDriver(message: Array[Byte]): Unit = driver.send(message)

  private[stagecrew] def askDriver(message: Array[Byte])(done: Either[Throwable, Array[Byte]] => Unit): Unit =
    driver.ask(Rpc.withSender(self, message), ReplyTimeoutMs)(done)

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
        reply.send(reports.of(frame.text("topology")))
      }
      case other => reply.fail(new FrameException(s"the driver does not send $other"))
    }
  }

  override def disconnected(address: String): Unit = if (address == Rpc.driverAddress(conf)) {
    driverLost = true
    Log.contained("deleting the stored partitions of topologies")(partitions.driverLost())
  }

  // -- Shutdown

  /** Closes everything, and waits for it within the timeout. A second call waits for the first. */
  def shutdown(timeoutMs: Long): Unit = endOnce(timeoutMs) {
    val deadline = System.nanoTime() + timeoutMs * 1000000L
    def remainingMs: Long = math.max(0L, (deadline - System.nanoTime()) / 1000000L)
    def end(topologies: Seq[String]): Unit = {
      val latches = topologies.map(closings.latch)
      topologies.foreach(id => inLoop(closings.end(id, remainingMs, None)))
      latches.foreach(_.await(remainingMs, TimeUnit.MILLISECONDS))
    }
    // A JVM task may not react to interrupts. After half of the timeout, closing no longer waits for attempts.
    schedule(timeoutMs / 2)(closings.force())
    val (application, inner) = descriptions.ids.partition(_ == Description.Application)
    // The attempts of busy workers are being killed, or never end. After SIGTERM, workers close their open listeners.
    processes.busy.foreach(links.terminate)
    end(inner)
    end(application)
    agent.stop()
    agent.await(remainingMs)
    if (driverLost) Log.contained("deleting the stored partitions of topologies")(partitions.driverLost())
    partitions.awaitDeletions(remainingMs)
    reports.last(math.max(remainingMs, LastReportMs))
    Partitions.stop(partitions)
    loop.shutdownNow()
    watchdog.shutdownNow()
    pool.shutdown()
    lock.synchronized(server).foreach(_.close())
    Log.contained("stopping the endpoint")(Rpc.stopEndpoint(self))
  }

  /** Runs a call on the watchdog thread after a delay. The loop is not used, because it may be busy. */
  private[stagecrew] def later(ms: Long, purpose: String)(f: => Unit): Unit =
    watchdog.schedule((() => Log.contained(purpose)(f)): Runnable, ms, TimeUnit.MILLISECONDS)
}

object ExecutorCrew {
  /** How long to remember a failed attempt after its end, because a worker may begin it late. Also how long to remember
    * the blocks of a closed topology, until the driver has unpersisted their datasets. */
  private[stagecrew] val RememberMs = 60000L

  /** How long an executor waits for a reply from the driver. */
  private[stagecrew] val ReplyTimeoutMs = 30000L
  private val LastReportMs = 500L

  private[stagecrew] def daemon(name: String): ThreadFactory = body => {
    val thread = new Thread(body, name)
    thread.setDaemon(true)
    thread
  }
}
