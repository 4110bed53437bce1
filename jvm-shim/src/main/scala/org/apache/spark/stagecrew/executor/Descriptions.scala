package org.apache.spark.stagecrew
package executor

import java.util.concurrent.Executor
import org.apache.spark.TaskContext
import driver._, wire._

/**
 * The descriptions of topologies on an executor. Each one is requested from the driver once, when the first task needs
 * it. `askDriver` sends a message and waits for the reply.
 */
final class Descriptions(
    executor: String, host: () => String, table: TopologyTable, pool: Executor, askDriver: Array[Byte] => Array[Byte]) {
  private val QueryProperty = "sql.streaming.queryId"
  private val RootExecutionProperty = "spark.sql.execution.root.id"
  private val described = new Once[Option[Description]](pool)
  private val executions = new Once[Option[String]](pool)

  /** The description of a topology; None if the topology has ended. */
  def describe(id: String): Option[Description] =
    known(id).orElse(if (!table.active(id)) None else cached(described, id) {
    val reply = Frames.decodeMessage(askDriver(Frames.encode("ASK_DESCRIPTION", executor, host(), id)))
    if (reply.text("body").nonEmpty) Some(Description.decode(reply))
    else {
      table.end(id)
      table.forget(id)
      None
    }
  // The topology may have closed here before the reply arrived.
  }).filterNot(_ => table.isClosed(id) && { described.forget(id); true })

  /** A description that the driver has sent, if it is still cached. */
  def known(id: String): Option[Description] = described.computed(id).flatten

  def ids: Seq[String] = described.keys

  /** The topology of an execution has ended. Its key is forgotten, because a streaming query with the same id may be
    * started again. */
  def ended(id: String): Unit = executions.forgetAll(_.contains(id))

  def forget(id: String): Unit = {
    ended(id)
    described.pending(id).foreach(_.whenComplete((_, _) => described.forget(id)))
    described.forgetAll(_.exists(_.id == id))
  }

  /** A named topology and the topologies around it, outermost first, including those that are closing here. Empty if
    * one of them has closed here: a late task of it runs under the application topology. */
  def named(id: String): List[Description] = ancestors(id, Nil)

  private def ancestors(id: String, inner: List[Description]): List[Description] = describe(id) match {
    case None => Nil
    case Some(description) => description.parent.fold(description :: inner)(ancestors(_, description :: inner))
  }

  /** The topology of a task's execution: its streaming query, root SQL execution, or job. The tasks of
    * `DataFrame.toLocalIterator` run after the end of their SQL execution, so they belong to their job. */
  def execution(task: TaskContext): Option[Description] =
    Option(task.getLocalProperty(QueryProperty)).map(query => executionOf(s"query:$query")).getOrElse(
      Option(task.getLocalProperty(RootExecutionProperty)).flatMap(id => describe(Executions.ofSql(id.toLong)))
        .orElse(executionOf(s"stage:${task.stageId()}")))

  /** The topology of the execution of a query or stage. If the execution has ended, its id is not cached, because a
    * streaming query may have been started again. */
  private[stagecrew] def executionOf(key: String): Option[Description] =
    executionId(key).flatMap(describe).orElse { executions.forget(key); None }

  private[stagecrew] def executionId(key: String): Option[String] = cached(executions, key) {
    val reply = askDriver(Frames.encode("ASK_EXECUTION", executor, key))
    Some(Frames.decodeMessage(reply).text("topology")).filter(_.nonEmpty)
  }

  /** The driver's reply, from the cache if possible. None is not cached. */
  private def cached[T](replies: Once[Option[T]], key: String)(request: => Option[T]): Option[T] =
    replies.of(key)(request).orElse { replies.forget(key); None }
}
