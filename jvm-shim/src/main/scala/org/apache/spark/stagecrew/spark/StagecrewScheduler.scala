package org.apache.spark.scheduler

import org.apache.spark.SparkContext
import scala.util.Try

/** core/scheduler/DAGScheduler.scala: `activeJobs` and `stageIdToStage` are private[scheduler], and owned by its
  * loop. */
private[spark] object StagecrewScheduler {
  /** The active jobs with one of their local properties. Read from another thread: the result may be out of date. */
  def activeJobs(sc: SparkContext, property: String): Map[Int, String] =
    readConsistently(sc.dagScheduler.activeJobs.toArray.map(job => job.jobId -> local(job, property)).toMap)
      .getOrElse(Map.empty)

  /** The shuffles that each active job needs, with the job's local property. Throws if they cannot be read: then
    * nothing is known to be unused, and nothing may be deleted. */
  def shufflesInUse(sc: SparkContext, property: String): Seq[(String, Seq[Int])] = readConsistently {
    val stages = sc.dagScheduler.stageIdToStage.values.toArray.collect { case stage: ShuffleMapStage => stage }.toSeq
    sc.dagScheduler.activeJobs.toArray.toSeq.map { job =>
      local(job, property) -> stages.filter(_.jobIds.contains(job.jobId)).map(_.shuffleDep.shuffleId)
    }
  }.getOrElse(throw new IllegalStateException("Spark's stages changed during each of twenty reads"))

  /** The id of the next attempt: every attempt that has begun has a smaller one. 0 if the scheduler is not Spark's
    * own. */
  def nextAttempt(sc: SparkContext): Long = sc.taskScheduler match {
    case scheduler: TaskSchedulerImpl => scheduler.nextTaskId.get
    case _ => 0
  }

  /** The first active job that needs a stage, as in `activeJobForStage`. */
  def jobOfStage(sc: SparkContext, stage: Int): Option[Int] = readConsistently(sc.dagScheduler.stageIdToStage.get(stage)
    .flatMap(_.jobIds.toArray.filter(sc.dagScheduler.jobIdToActiveJob.contains).minOption)).flatten

  private def local(job: ActiveJob, property: String): String =
    Option(job.properties).flatMap(p => Option(p.getProperty(property))).getOrElse("")

  // The collections belong to another thread. A read during a change may fail, or miss something: two must be equal.
  private def readConsistently[T](read: => T): Option[T] = Iterator.continually(Try(read).toOption).take(20).sliding(2)
    .collectFirst { case Seq(Some(one), Some(other)) if one == other => one }
}
