package org.apache.spark.stagecrew

import java.util.concurrent.{CompletableFuture, ConcurrentHashMap, TimeUnit}
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

  private val described = new ConcurrentHashMap[String, CompletableFuture[Option[Description]]]()
  private val executions = new ConcurrentHashMap[String, String]()

  /** None for a topology that has ended. */
  def describe(id: String): Option[Description] = {
    val before = described.get(id)
    if (before != null && before.isDone && !before.isCompletedExceptionally) return before.get()
    if (!table.active(id)) return None
    val mine = new CompletableFuture[Option[Description]]()
    val first = described.putIfAbsent(id, mine)
    if (first != null) first.get(settings.channelTimeoutMs + ExecutorCrew.AskMs, TimeUnit.MILLISECONDS)
    else try {
      val reply = Frames.decodeMessage(ask(Frames.encode("ASK_DESCRIPTION", executor, host(), id)))
      val found = if (reply.text("body").isEmpty) None else Some(Description.decode(reply.text("body"), reply.blobs("blobs")))
      mine.complete(found)
      if (found.isEmpty) table.end(id)
      found
    } catch {
      case error: Throwable =>
        described.remove(id, mine)
        mine.completeExceptionally(error)
        throw error
    }
  }

  /** What was asked for before, and is not forgotten. */
  def known(id: String): Option[Description] =
    Option(described.get(id)).filter(_.isDone).flatMap(future => try future.get() catch { case NonFatal(_) => None })

  def ids: Seq[String] = described.keySet.asScala.toSeq

  def forget(id: String): Unit = {
    executions.values.remove(id)
    described.remove(id)
    ()
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
    def asked(key: String): Option[String] = Option(executions.computeIfAbsent(key, _ => {
      val reply = Frames.decodeMessage(ask(Frames.encode("ASK_EXECUTION", executor, key)))
      reply.text("topology") match { case "" => null; case id => id }
    }))
    val id = Option(task.getLocalProperty(QueryProperty)).map(id => asked(s"query:$id"))
      .orElse(Option(task.getLocalProperty(RootExecutionProperty)).map(id => Some(Description.ExecutionPrefix + "sql-" + id)))
      .getOrElse(asked(s"stage:${task.stageId()}"))
    id.flatMap(describe)
  }
}

object Descriptions {
  private val QueryProperty = "sql.streaming.queryId"
  private val RootExecutionProperty = "spark.sql.execution.root.id"
}
