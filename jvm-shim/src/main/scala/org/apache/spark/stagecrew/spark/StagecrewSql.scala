package org.apache.spark.sql

import scala.jdk.CollectionConverters._
import org.apache.spark.sql.execution.SQLExecution
import org.apache.spark.sql.streaming.StreamingQuery

/** sql/core: `SharedState.activeStreamingQueries` is private[sql]. `SQLExecution.getQueryExecution` returns running SQL
  * executions. */
private[spark] object StagecrewSql {
  def executionRuns(id: Long): Boolean = SQLExecution.getQueryExecution(id) != null

  def queryRuns(runId: String): Boolean = running(runId).nonEmpty

  def stopQuery(runId: String): Unit = running(runId).foreach(_.stop())

  /** The name or id of a query, or its run id if it has ended. */
  def queryName(run: String): String = running(run).fold(run)(query => Option(query.name).getOrElse(query.id.toString))

  /** The run id of the query with this id. A query that is being stopped has one until its last batch has ended. */
  def queryRun(id: String): Option[String] = find(_.id.toString == id).map(_.runId.toString)

  private def running(runId: String): Option[StreamingQuery] = find(q => q.runId.toString == runId && q.isActive)

  private def find(condition: StreamingQuery => Boolean): Option[StreamingQuery] =
    classic.SparkSession.getDefaultSession.flatMap(
      _.sharedState.activeStreamingQueries.values.asScala.find(condition))
}
