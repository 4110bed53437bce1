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

  def queryName(runId: String): Option[String] =
    running(runId).map(query => Option(query.name).getOrElse(query.id.toString))

  /** The run id of the query with this id. */
  def queryRun(id: String): Option[String] = find(_.id.toString == id).map(_.runId.toString)

  private def running(runId: String): Option[StreamingQuery] = find(_.runId.toString == runId)

  private def find(condition: StreamingQuery => Boolean): Option[StreamingQuery] =
    classic.SparkSession.getDefaultSession.flatMap(
      _.sharedState.activeStreamingQueries.values.asScala.find(query => condition(query) && query.isActive))
}
