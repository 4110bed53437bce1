package org.apache.spark.stagecrew

import java.util.concurrent.{CompletableFuture, ConcurrentHashMap, ExecutionException, TimeUnit}
import scala.annotation.tailrec
import scala.jdk.CollectionConverters._
import scala.util.control.NonFatal
import org.apache.spark.TaskContext

/**
 * What an executor knows of topologies: it asks the driver once for each. `ask` waits for the driver's answer.
 *
 * Used by task threads; whoever comes while one asks waits for the same answer.
 */
final class Descriptions(executor: String, host: () => String, settings: Settings, table: TopologyTable, ask: Array[Byte] => Array[Byte]) {
  import Descriptions._

  private val described = new Answers[Description]
  private val executions = new Answers[String]

  /** None for a topology that has ended. */
  def describe(id: String): Option[Description] = described.now(id).orElse {
    if (!table.active(id)) None
    else described.of(id) {
      val reply = Frames.decodeMessage(ask(Frames.encode("ASK_DESCRIPTION", executor, host(), id)))
      if (reply.text("body").isEmpty) {
        table.end(id)
        table.forget(id)
        None
      } else Some(Description.decode(reply.text("body"), reply.blobs("blobs")))
    }
  }

  /** What was asked for before, and is not forgotten. */
  def known(id: String): Option[Description] = described.now(id)

  def ids: Seq[String] = described.keys

  /** The topology has ended: what belongs to its key belongs to another now (a streaming query that runs again). */
  def ended(id: String): Unit = executions.forget(_ == id)

  def forget(id: String): Unit = {
    ended(id)
    described.forget(_.id == id)
  }

  /** A named topology and those that it lies in, outermost first; none when it has ended. */
  def named(id: String): List[Description] = ancestors(id, Nil)

  private def ancestors(id: String, inner: List[Description]): List[Description] = describe(id) match {
    case None => Nil // it has ended: the task runs under the application's topology
    case Some(description) => description.parent match {
      case None => description :: inner
      case Some(parent) => ancestors(parent, description :: inner)
    }
  }

  /** The topology of the execution that a task belongs to: streaming query, root SQL execution, or job. */
  def execution(task: TaskContext): Option[Description] = {
    val id = Option(task.getLocalProperty(QueryProperty)).map(query => asked(s"query:$query"))
      .orElse(Option(task.getLocalProperty(RootExecutionProperty)).map(id => Some(Executions.ofSql(id.toLong))))
      .getOrElse(asked(s"stage:${task.stageId()}"))
    id.flatMap(describe)
  }

  private[stagecrew] def asked(key: String): Option[String] = executions.of(key) {
    Some(Frames.decodeMessage(ask(Frames.encode("ASK_EXECUTION", executor, key))).text("topology")).filter(_.nonEmpty)
  }

  /** Answers by key, each asked for once, by the first who wants it; an answer that is none is not kept. */
  private final class Answers[T] {
    private val known = new ConcurrentHashMap[String, CompletableFuture[Option[T]]]()

    def now(key: String): Option[T] = Option(known.get(key)).filter(a => a.isDone && !a.isCompletedExceptionally).flatMap(_.get())

    @tailrec
    def of(key: String)(question: => Option[T]): Option[T] = {
      val mine = new CompletableFuture[Option[T]]()
      val first = known.putIfAbsent(key, mine)
      if (first == null) answer(key, mine)(question)
      else {
        val shared =
          try Right(first.get(settings.channelTimeoutMs + ExecutorCrew.AskMs, TimeUnit.MILLISECONDS))
          catch { case failed: ExecutionException => Left(failed.getCause) }
        shared match {
          case Right(found) => found
          case Left(_: InterruptedException) => of(key)(question) // the one who asked was killed: not our end
          case Left(cause) => throw cause
        }
      }
    }

    private def answer(key: String, mine: CompletableFuture[Option[T]])(question: => Option[T]): Option[T] =
      try {
        val found = question
        if (found.isEmpty) known.remove(key, mine)
        mine.complete(found)
        found
      } catch {
        case error: Throwable =>
          known.remove(key, mine)
          mine.completeExceptionally(error)
          throw error
      }

    def keys: Seq[String] = known.keySet.asScala.toSeq

    def forget(which: T => Boolean): Unit = {
      known.values.removeIf(answer => answer.isDone && (try answer.get().exists(which) catch { case NonFatal(_) => false }))
      ()
    }
  }
}

object Descriptions {
  private val QueryProperty = "sql.streaming.queryId"
  private val RootExecutionProperty = "spark.sql.execution.root.id"
}
