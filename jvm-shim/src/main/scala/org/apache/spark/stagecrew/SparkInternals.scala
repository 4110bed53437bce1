// The only door to Spark's private API: each member names the Spark file (of 4.3) that it relies on, so that a new Spark
// version is this file's work. The packages are Spark's own, because that is what private[...] asks for.
package org.apache.spark {

  package scheduler {

    /** core/scheduler/DAGScheduler.scala: `activeJobs` and `stageIdToStage` are private[scheduler], owned by its loop. */
    private[spark] object StagecrewScheduler {

      /** Active jobs with one of their local properties. Read beside the scheduler's thread: may lag, repeat to be sure. */
      def activeJobs(sc: SparkContext, property: String): Map[Int, String] =
        unlessItChanges(Map.empty[Int, String]) {
          sc.dagScheduler.activeJobs.toArray.map { job =>
            job.jobId -> Option(job.properties).flatMap(p => Option(p.getProperty(property))).getOrElse("")
          }.toMap
        }

      /** The first of the active jobs that need a stage, as its `activeJobForStage` has it. */
      def jobOfStage(sc: SparkContext, stage: Int): Option[Int] =
        unlessItChanges(Option.empty[Int])(
          sc.dagScheduler.stageIdToStage.get(stage).flatMap(_.jobIds.toArray.filter(sc.dagScheduler.jobIdToActiveJob.contains).minOption))

      // The collections belong to another thread; a read during a change may fail, and is made again.
      private def unlessItChanges[T](otherwise: T)(read: => T): T =
        Iterator.continually(scala.util.Try(read).toOption).take(20).collectFirst { case Some(found) => found }
          .getOrElse(otherwise)
    }
  }

  package sql {

    /** sql/core: `SharedState.activeStreamingQueries` is private[sql]; `SQLExecution.getQueryExecution` says who runs. */
    private[spark] object StagecrewSql {
      import org.apache.spark.sql.execution.SQLExecution

      def executionRuns(id: Long): Boolean = SQLExecution.getQueryExecution(id) != null

      def stopQuery(runId: String): Unit = running(runId).foreach(_.stop())

      def queryRuns(runId: String): Boolean = running(runId).nonEmpty

      def queryName(runId: String): Option[String] =
        running(runId).map(query => Option(query.name).getOrElse(query.id.toString))

      /** The run of the query with this id. */
      def queryRun(id: String): Option[String] = find(_.id.toString == id).map(_.runId.toString)

      private type Query = org.apache.spark.sql.streaming.StreamingQuery

      private def running(runId: String): Option[Query] = find(_.runId.toString == runId)

      private def find(which: Query => Boolean): Option[Query] = {
        import scala.jdk.CollectionConverters._
        classic.SparkSession.getDefaultSession.flatMap { session =>
          session.sharedState.activeStreamingQueries.values.asScala.find(query => which(query) && query.isActive)
        }
      }
    }
  }

  package stagecrew {

    import java.util.Properties
    import scala.concurrent.ExecutionContext
    import scala.concurrent.duration._
    import scala.reflect.ClassTag
    import scala.util.{Failure, Success}
    import org.apache.spark.api.python.PythonUtils
    import org.apache.spark.rpc._
    import org.apache.spark.scheduler.{SparkListener, SparkListenerEvent, StagecrewScheduler, TaskSchedulerImpl}
    import org.apache.spark.sql.StagecrewSql
    import org.apache.spark.ui.{SparkUI, SparkUITab, UIUtils, WebUIPage}
    import org.apache.spark.util.{RpcUtils, ShutdownHookManager}
    import jakarta.servlet.http.HttpServletRequest
    import org.json4s.JValue
    import org.json4s.jackson.JsonMethods
    import scala.xml.Node

    /** The other side of an RPC connection. */
    private[stagecrew] final class Peer(val ref: RpcEndpointRef) {
      /** Sends a message that is answered: the answer, or what went wrong, reaches `done` on another thread. */
      def ask(message: Any, timeoutMs: Long)(done: Either[Throwable, Array[Byte]] => Unit): Unit =
        try {
          ref.ask[Array[Byte]](message, new RpcTimeout(timeoutMs.millis, "stagecrew"))(ClassTag(classOf[Array[Byte]]))
            .onComplete {
              case Success(reply) => done(Right(reply))
              case Failure(error) => done(Left(error))
            }(ExecutionContext.parasitic)
        } catch { case error: Exception => done(Left(error)) } // an RpcEnv that is stopped throws at once

      def askSync(message: Any, timeoutMs: Long): Array[Byte] =
        ref.askSync[Array[Byte]](message, new RpcTimeout(timeoutMs.millis, "stagecrew"))(ClassTag(classOf[Array[Byte]]))

      def send(message: Any): Unit = ref.send(message)
    }

    /** How an endpoint answers: from any thread, once. */
    private[stagecrew] trait Reply {
      def answer(bytes: Array[Byte]): Unit
      def fail(error: Throwable): Unit
    }

    /** What an endpoint does. Called on RPC threads: hand over, never wait. */
    private[stagecrew] trait Handler {
      /** `from` is the sender's endpoint, when it gave one, and its address. */
      def receive(message: Array[Byte], from: Option[Peer], address: String, reply: Reply): Unit
      def disconnected(address: String): Unit = ()
    }

    /** What a tab of the Spark UI shows: asked at each request, of which it sees nothing. */
    private[stagecrew] trait TabContent {
      def html: Seq[Node]
      def json: String
    }

    // core/ui/{WebUI,SparkUI}.scala: the tab's path and, capitalised, its name are the prefix; the page adds nothing to it.
    private final class ContentTab(ui: SparkUI, prefix: String, content: TabContent) extends SparkUITab(ui, prefix) {
      attachPage(new ContentPage(this, content))
    }

    private final class ContentPage(tab: ContentTab, content: TabContent) extends WebUIPage("") {
      override def render(request: HttpServletRequest): Seq[Node] =
        UIUtils.headerSparkPage(request, tab.name, content.html, tab)

      override def renderJson(request: HttpServletRequest): JValue = JsonMethods.parse(content.json)
    }

    private[stagecrew] object SparkInternals {

      // -- RPC: core/rpc/{RpcEnv,RpcEndpoint,RpcEndpointRef}.scala, core/util/RpcUtils.scala.
      // Messages are bytes, or a pair of the sender's endpoint and bytes: classes of ours would kill executors whose jar
      // came by spark.jars (reference: trap 1).

      def endpoint(name: String, handler: Handler): Peer = {
        val env = SparkEnv.get.rpcEnv
        new Peer(env.setupEndpoint(name, new ThreadSafeRpcEndpoint {
          override val rpcEnv: RpcEnv = env

          override def receive: PartialFunction[Any, Unit] = { case message =>
            take(message, "", new Reply {
              def answer(bytes: Array[Byte]): Unit = ()
              def fail(error: Throwable): Unit = ()
            })
          }

          override def receiveAndReply(context: RpcCallContext): PartialFunction[Any, Unit] = { case message =>
            take(message, String.valueOf(context.senderAddress), new Reply {
              def answer(bytes: Array[Byte]): Unit = context.reply(bytes)
              def fail(error: Throwable): Unit = context.sendFailure(error)
            })
          }

          override def onDisconnected(address: RpcAddress): Unit = handler.disconnected(String.valueOf(address))

          private def take(message: Any, address: String, reply: Reply): Unit = message match {
            case (from: RpcEndpointRef, bytes: Array[Byte]) => handler.receive(bytes, Some(new Peer(from)), address, reply)
            case bytes: Array[Byte] => handler.receive(bytes, None, address, reply)
            case other => reply.fail(new SparkException(s"not a message of stagecrew: ${other.getClass.getName}"))
          }
        }))
      }

      def stopEndpoint(peer: Peer): Unit = SparkEnv.get match {
        case null => ()
        case env => env.rpcEnv.stop(peer.ref)
      }

      def driver(name: String): Peer = new Peer(RpcUtils.makeDriverRef(name, SparkEnv.get.conf, SparkEnv.get.rpcEnv))

      def withSender(sender: Peer, bytes: Array[Byte]): Any = (sender.ref, bytes)

      // -- Tasks: core/TaskContext.scala

      def localProperties(task: TaskContext): Properties = task.getLocalProperties

      /** Keeps the body of the task from running: the attempt ends as killed, which Spark does not count. */
      def markInterrupted(task: TaskContext, reason: String): Unit = task.markInterrupted(reason)

      // -- The driver: core/SparkContext.scala, core/scheduler/LiveListenerBus.scala, DAGScheduler.scala, sql's shared state

      def conf(sc: SparkContext): SparkConf = sc.conf

      /** The environment of executors; the keys spark.executorEnv.* were read before plugins: core/SparkContext.scala. */
      def executorEnvironment(sc: SparkContext): scala.collection.mutable.Map[String, String] = sc.executorEnvs

      /** To the queue of executor management, which always has a listener (HeartbeatReceiver.scala) and is quick: a queue
        * of our own would cost each task's start and end another hand-over between threads. */
      def addListener(sc: SparkContext, listener: SparkListener): Unit = sc.listenerBus.addToManagementQueue(listener)

      def activeJobs(sc: SparkContext, property: String): Map[Int, String] = StagecrewScheduler.activeJobs(sc, property)
      def jobOfStage(sc: SparkContext, stage: Int): Option[Int] = StagecrewScheduler.jobOfStage(sc, stage)
      def post(sc: SparkContext, event: SparkListenerEvent): Unit = sc.listenerBus.post(event)
      def executionRuns(id: Long): Boolean = StagecrewSql.executionRuns(id)
      def queryRuns(runId: String): Boolean = StagecrewSql.queryRuns(runId)
      def queryRun(id: String): Option[String] = StagecrewSql.queryRun(id)
      def queryName(runId: String): Option[String] = StagecrewSql.queryName(runId)
      def stopQuery(runId: String): Unit = StagecrewSql.stopQuery(runId)

      /** In local mode the master says it, not the configuration: core/scheduler/TaskSchedulerImpl.scala. */
      def maxTaskFailures(sc: SparkContext): Int = sc.taskScheduler match {
        case scheduler: TaskSchedulerImpl => scheduler.maxTaskFailures
        case _ => sc.conf.getInt("spark.task.maxFailures", 4)
      }

      // -- Processes: core/util/ShutdownHookManager.scala, core/api/python/PythonUtils.scala

      /** Runs a hook before Spark's own stops the SparkContext (priority 50) and before folders are deleted (25). The
        * driver's comes before that of core/executor/Executor.scala (100), which ends the executor's plugin: in a local
        * master the executor must still answer. */
      def addShutdownHook(driver: Boolean)(hook: () => Unit): AnyRef = {
        val priority =
          if (driver) ShutdownHookManager.DEFAULT_SHUTDOWN_PRIORITY + 10
          else ShutdownHookManager.SPARK_CONTEXT_SHUTDOWN_PRIORITY + 10
        ShutdownHookManager.addShutdownHook(priority)(hook)
      }

      def removeShutdownHook(hook: AnyRef): Unit = if (!ShutdownHookManager.inShutdown()) {
        ShutdownHookManager.removeShutdownHook(hook)
      }

      def pythonPath(paths: String*): String = PythonUtils.mergePythonPaths(PythonUtils.sparkPythonPath +: paths: _*)

      /** A folder of this JVM's own, removed when it ends: core/util/Utils.scala. */
      def temporaryFolder(conf: SparkConf): java.io.File = {
        val folder = util.Utils.createTempDir(util.Utils.getLocalDir(conf), "stagecrew")
        java.nio.file.Files.setPosixFilePermissions(
          folder.toPath, java.nio.file.attribute.PosixFilePermissions.fromString("rwx------"))
        folder
      }

      def delete(folder: java.io.File): Unit = util.Utils.deleteRecursively(folder)

      // -- The Spark UI: core/ui/{SparkUI,WebUI,UIUtils}.scala

      /** Adds a tab at this path; nothing when the application has no UI. */
      def attachTab(sc: SparkContext, prefix: String, content: TabContent): Unit =
        sc.ui.foreach(ui => ui.attachTab(new ContentTab(ui, prefix, content)))

      /** A table as Spark's own pages have them; each row is a `<tr>`. */
      def table(id: String, headers: Seq[String], rows: Seq[Node]): Seq[Node] =
        UIUtils.listingTable[Node](headers, row => row, rows, id = Some(id))

      def formatDate(ms: Long): String = UIUtils.formatDate(ms)
      def formatDuration(ms: Long): String = UIUtils.formatDuration(ms)

      def redactionPattern(conf: SparkConf): scala.util.matching.Regex = conf.get(internal.config.SECRET_REDACTION_PATTERN)
    }
  }
}
