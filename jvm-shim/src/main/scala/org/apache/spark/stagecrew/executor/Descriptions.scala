package org.apache.spark.stagecrew
package executor

import java.util.concurrent.Executor
import org.apache.spark.TaskContext
import driver._, wire._

/**
 * What an executor knows about topologies. It asks the driver once for each, when the first task needs it; `ask` sends
 * a message and waits for the reply.
 */
final class Descriptions(
    executor: String, host: () => String, table: TopologyTable, pool: Executor, ask: Array[Byte] => Array[Byte]) {
  private val QueryProperty = "sql.streaming.queryId"
  private val RootExecutionProperty = "spark.sql.execution.root.id"
  private val described = new Once[Option[Description]](pool)
  private val executions = new Once[Option[String]](pool)

  /** The description of a topology; None if the topology has ended. */
  def describe(id: String): Option[Description] =
    known(id).orElse(if (!table.active(id)) None else found(described, id) {
    val reply = Frames.decodeMessage(ask(Frames.encode("ASK_DESCRIPTION", executor, host(), id)))
    if (reply.text("body").nonEmpty) Some(Description.decode(reply))
    else {
      table.end(id)
      table.forget(id)
      None
    }
  })

  /** A description that the driver has sent, and that is not forgotten. */
  def known(id: String): Option[Description] = described.now(id).flatten

  def ids: Seq[String] = described.keys

  /** The topology has ended. Its key belongs to the next execution: the query may run again. */
  def ended(id: String): Unit = executions.forgetAll(_.contains(id))

  def forget(id: String): Unit = {
    ended(id)
    described.forgetAll(_.exists(_.id == id))
  }

  /** A named topology and those around it, outermost first; none if it has ended. Then its tasks run under the
    * application. */
  def named(id: String): List[Description] = ancestors(id, Nil)

  private def ancestors(id: String, inner: List[Description]): List[Description] = describe(id) match {
    case None => Nil
    case Some(description) => description.parent.fold(description :: inner)(ancestors(_, description :: inner))
  }

  /** The topology of the execution that a task belongs to: streaming query, root SQL execution, or job. */
  def execution(task: TaskContext): Option[Description] = {
    val id = Option(task.getLocalProperty(QueryProperty)).map(query => asked(s"query:$query"))
      .orElse(Option(task.getLocalProperty(RootExecutionProperty)).map(id => Some(Executions.ofSql(id.toLong))))
      .getOrElse(asked(s"stage:${task.stageId()}"))
    id.flatMap(describe)
  }

  private[stagecrew] def asked(key: String): Option[String] = found(executions, key) {
    Some(Frames.decodeMessage(ask(Frames.encode("ASK_EXECUTION", executor, key))).text("topology")).filter(_.nonEmpty)
  }

  /** The driver's reply; None is not kept. */
  private def found[T](answers: Once[Option[T]], key: String)(question: => Option[T]): Option[T] = {
    val answer = answers.of(key)(question)
    if (answer.isEmpty) answers.forget(key)
    answer
  }
}
