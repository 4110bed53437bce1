package org.apache.spark.stagecrew
package driver

import scala.collection.mutable
import wire._

/**
 * Finds the execution (root SQL execution, RDD job or streaming query) of a stage or a query, and whether the execution
 * is still running.
 *
 * Spark's listener bus reports starts and ends late, or not at all if its queue is full. Spark's own state is then read
 * instead. Used by the driver's loop only. `schedule` runs a call in the loop after a delay in milliseconds.
 */
private[stagecrew] final class Executions(sparkState: Executions.SparkState, schedule: Long => (=> Unit) => Unit) {
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

  /** The execution of a stage. A stage that several jobs share belongs to the first running one, as in
    * core/scheduler/DAGScheduler.scala. */
  private def jobOf(stage: Int): Option[String] =
    jobsOfStage.get(stage).flatMap(_.filter(sparkState.jobRuns).minOption).map(ofJob)

  /** Forgets ended jobs whose end events were dropped. */
  def prune(): Unit = jobsOfStage.valuesIterator.flatten.toSet.filterNot(sparkState.jobRuns).foreach(jobEnded)

  /** Whether this stage belongs to a job whose end is not known yet. The job's start event may have been dropped. */
  def hasStage(stage: Int): Boolean = jobsOfStage.contains(stage) || sparkState.jobOfStage(stage).nonEmpty

  def queryStarted(id: String, run: String): Unit = queries(id) = run

  /** Forgets a run of a query, unless the query has been started again in the meantime. */
  def queryEnded(id: String, run: String): Unit = if (queries.get(id).contains(run)) queries -= id

  /** Finds the execution of `stage:<number>` or `query:<id>`, and passes it to `reply`, immediately or later. `reply`
    * gets None if there is no execution. */
  def find(key: String)(reply: Option[String] => Unit): Unit = key.split(":", 2) match {
    // The events of the last run's end and of this run's start may be late.
    case Array("query", id) => reply(sparkState.queryRun(id).orElse(queries.get(id)).map(ofQuery))
    case Array("stage", number) =>
      val stage = number.toInt
      jobOf(stage) match {
        case None =>
          waitingForStage(stage) = reply :: waitingForStage.getOrElse(stage, Nil)
          schedule(EventMs) {
            waitingForStage.remove(stage).foreach { waiting =>
              val found = sparkState.jobOfStage(stage).map(ofJob)
              waiting.foreach(_.apply(found))
            }
          }
        case known => reply(known)
      }
    case _ => reply(None)
  }

  /** Whether the topology of an execution may begin: the execution is running according to Spark's own state, or, for a
    * query, according to the listener bus. */
  def mayBegin(id: String): Boolean = runs(id) || queries.values.exists(ofQuery(_) == id)

  /** Whether an execution is running according to Spark's own state. */
  def runs(id: String): Boolean = parts(id) match {
    case Array("sql", number) => sparkState.sqlRuns(number.toLong)
    case Array("query", run) => sparkState.queryRuns(run)
    case Array("job", number) => sparkState.jobRuns(number.toInt)
    case _ => false
  }
}

private[stagecrew] object Executions {
  /** Spark's own state of jobs, SQL executions and streaming queries. */
  trait SparkState {
    def jobOfStage(stage: Int): Option[Int]
    def jobRuns(job: Int): Boolean
    def sqlRuns(execution: Long): Boolean
    def queryRuns(run: String): Boolean
    def queryRun(id: String): Option[String]
  }

  /** How long to wait for the start event of a job before Spark's own state is read. */
  val EventMs = 500L

  def ofJob(job: Int): String = s"${Description.ExecutionPrefix}job-$job"
  def ofSql(execution: Long): String = s"${Description.ExecutionPrefix}sql-$execution"
  def ofQuery(run: String): String = s"${Description.ExecutionPrefix}query-$run"

  /** The name of an execution in the UI. */
  def name(id: String): String = parts(id).mkString(" ")

  private def parts(id: String): Array[String] = id.stripPrefix(Description.ExecutionPrefix).split("-", 2)
}
