package org.apache.spark.stagecrew
package driver

import scala.collection.mutable
import wire._

/**
 * Which execution (root SQL execution, RDD job or streaming query) a stage or a query belongs to, and whether it still
 * runs.
 *
 * Spark's listener bus reports starts and ends late, or not at all if a queue is full: then Spark's own books are read.
 * Used by the driver's loop only; `later` runs something in it after a delay in milliseconds.
 */
private[stagecrew] final class Executions(books: Executions.Books, later: Long => (=> Unit) => Unit) {
  import Executions._

  private val queries = mutable.HashMap.empty[String, String] // query id -> run id
  private val jobsOfStage = mutable.HashMap.empty[Int, Set[Int]] // running jobs
  private val waitingForStage = mutable.HashMap.empty[Int, List[Option[String] => Unit]]

  def jobStarted(job: Int, stages: Seq[Int]): Unit = stages.foreach { stage =>
    jobsOfStage(stage) = jobsOfStage.getOrElse(stage, Set.empty) + job
    waitingForStage.remove(stage).foreach(_.foreach(_.apply(jobOf(stage))))
  }

  def jobEnded(job: Int): Unit =
    jobsOfStage.mapValuesInPlace((_, jobs) => jobs - job).filterInPlace((_, jobs) => jobs.nonEmpty)

  /** The execution of a stage. The tasks of a shared stage belong to the first running job
    * (core/scheduler/DAGScheduler.scala). */
  private def jobOf(stage: Int): Option[String] =
    jobsOfStage.get(stage).flatMap(_.filter(books.jobRuns).minOption).map(ofJob)

  /** Forgets jobs whose end the bus has dropped. */
  def prune(): Unit = jobsOfStage.valuesIterator.flatten.toSet.filterNot(books.jobRuns).foreach(jobEnded)

  /** Whether a running job has this stage. */
  def hasStage(stage: Int): Boolean = jobsOfStage.contains(stage)

  def queryStarted(id: String, run: String): Unit = queries(id) = run

  /** A query that was started again meanwhile keeps its new run. */
  def queryEnded(id: String, run: String): Unit = if (queries.get(id).contains(run)) queries -= id

  /** Finds the execution of `stage:<number>` or `query:<id>`, now or later; None if it has none. */
  def find(key: String)(answer: Option[String] => Unit): Unit = key.split(":", 2) match {
    case Array("query", id) => answer(queries.get(id).orElse(books.queryRun(id)).map(ofQuery))
    case Array("stage", number) =>
      val stage = number.toInt
      jobOf(stage) match {
        case None =>
          waitingForStage(stage) = answer :: waitingForStage.getOrElse(stage, Nil)
          later(EventMs) {
            waitingForStage.remove(stage).foreach { waiting =>
              val found = books.jobOfStage(stage).map(ofJob)
              waiting.foreach(_.apply(found))
            }
          }
        case known => answer(known)
      }
    case _ => answer(None)
  }

  /** Whether an execution may begin: the bus or Spark's books know that it runs. */
  def mayBegin(id: String): Boolean = runs(id) || (parts(id) match {
    case Array("query", run) => queries.values.exists(_ == run)
    case _ => false
  })

  /** Whether an execution runs according to Spark's books. */
  def runs(id: String): Boolean = parts(id) match {
    case Array("sql", number) => books.sqlRuns(number.toLong)
    case Array("query", run) => books.queryRuns(run)
    case Array("job", number) => books.jobRuns(number.toInt)
    case _ => false
  }
}

private[stagecrew] object Executions {
  /** Spark's own books. */
  trait Books {
    def jobOfStage(stage: Int): Option[Int]
    def jobRuns(job: Int): Boolean
    def sqlRuns(execution: Long): Boolean
    def queryRuns(run: String): Boolean
    def queryRun(id: String): Option[String]
  }

  /** How long to wait for the event of a job's start. */
  val EventMs = 500L

  def ofJob(job: Int): String = s"${Description.ExecutionPrefix}job-$job"
  def ofSql(execution: Long): String = s"${Description.ExecutionPrefix}sql-$execution"
  def ofQuery(run: String): String = s"${Description.ExecutionPrefix}query-$run"

  /** The name of an execution in the UI. */
  def name(id: String): String = parts(id).mkString(" ")

  private def parts(id: String): Array[String] = id.stripPrefix(Description.ExecutionPrefix).split("-", 2)
}
