package org.apache.spark.scheduler

import org.apache.spark.SparkContext
import scala.util.Try

/** core/scheduler/DAGScheduler.scala: `activeJobs` and `stageIdToStage` are private[scheduler], and only its event loop
  * changes them. */
private[spark] object StagecrewScheduler {
  /** The active jobs, each with its value of a local property. The result may be out of date, because the scheduler's
    * thread changes the jobs. It is empty if the jobs could not be read consistently. */
  def activeJobs(sc: SparkContext, property: String): Map[Int, String] =
    readConsistently(sc.dagScheduler.activeJobs.toArray.map(job => job.jobId -> local(job, property)).toMap)
      .getOrElse(Map.empty)

  /** The shuffles that each active job needs, with the job's value of a local property. Throws if they cannot be read.
    * The caller must then not delete anything, because any shuffle may be in use. */
  def shufflesInUse(sc: SparkContext, property: String): Seq[(String, Seq[Int])] = readConsistently {
    val stages = sc.dagScheduler.stageIdToStage.values.toArray.collect { case stage: ShuffleMapStage => stage }.toSeq
    sc.dagScheduler.activeJobs.toArray.toSeq.map { job =>
      local(job, property) -> stages.filter(_.jobIds.contains(job.jobId)).map(_.shuffleDep.shuffleId)
    }
  }.getOrElse(throw new IllegalStateException("Spark's stages changed during each of 20 reads"))

  /** The id of the next task attempt. All task attempts that have begun have smaller ids. 0 if the scheduler is not
    * Spark's own. */
  def nextTaskAttempt(sc: SparkContext): Long = sc.taskScheduler match {
    case scheduler: TaskSchedulerImpl => scheduler.nextTaskId.get
    case _ => 0
  }

  /** The first active job that needs a stage, like `activeJobForStage`. None if there is none, or if it could not be
    * read consistently. */
  def jobOfStage(sc: SparkContext, stage: Int): Option[Int] = readConsistently(sc.dagScheduler.stageIdToStage.get(stage)
    .flatMap(_.jobIds.toArray.filter(sc.dagScheduler.jobIdToActiveJob.contains).minOption)).flatten

  private def local(job: ActiveJob, property: String): String =
    Option(job.properties).flatMap(p => Option(p.getProperty(property))).getOrElse("")

  // Another thread changes the collections, and a concurrent read may fail or be incomplete. So two reads must be
  // equal.
  private def readConsistently[T](read: => T): Option[T] = Iterator.continually(Try(read).toOption).take(20).sliding(2)
    .collectFirst { case Seq(Some(first), Some(second)) if first == second => first }
}
