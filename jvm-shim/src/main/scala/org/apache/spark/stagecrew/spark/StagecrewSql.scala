package org.apache.spark.sql

import scala.jdk.CollectionConverters._
import org.apache.spark.sql.execution.SQLExecution
import org.apache.spark.sql.streaming.StreamingQuery

/** sql/core: `SharedState.activeStreamingQueries` is private[sql]; `SQLExecution.getQueryExecution` knows what runs. */
private[spark] object StagecrewSql {
  def executionRuns(id: Long): Boolean = SQLExecution.getQueryExecution(id) != null

  def queryRuns(runId: String): Boolean = running(runId).nonEmpty

  def stopQuery(runId: String): Unit = running(runId).foreach(_.stop())

  def queryName(runId: String): Option[String] =
    running(runId).map(query => Option(query.name).getOrElse(query.id.toString))

  /** The run of the query with this id. */
  def queryRun(id: String): Option[String] = find(_.id.toString == id).map(_.runId.toString)

  private def running(runId: String): Option[StreamingQuery] = find(_.runId.toString == runId)

  private def find(which: StreamingQuery => Boolean): Option[StreamingQuery] =
    classic.SparkSession.getDefaultSession.flatMap(
      _.sharedState.activeStreamingQueries.values.asScala.find(query => which(query) && query.isActive))
}
