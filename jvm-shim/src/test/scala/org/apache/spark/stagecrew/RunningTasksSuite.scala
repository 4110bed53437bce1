package org.apache.spark.stagecrew

import java.util.Properties
import org.apache.spark.scheduler._
import org.scalatest.funsuite.AnyFunSuite
import org.apache.spark.stagecrew.driver.RunningTasks
import org.apache.spark.stagecrew.executor.TaskAttempts

class RunningTasksSuite extends AnyFunSuite {
  private def stage(id: Int): StageInfo =
    new StageInfo(id, 0, s"stage $id", 2, Nil, Nil, "", resourceProfileId = 0)

  private def submitted(id: Int, topology: String): SparkListenerStageSubmitted = {
    val properties = new Properties
    if (topology.nonEmpty) properties.setProperty(TaskAttempts.TopologyProperty, topology)
    SparkListenerStageSubmitted(stage(id), properties)
  }

  private def task(id: Long, executor: String): TaskInfo =
    new TaskInfo(id, id.toInt, 0, id.toInt, 1000 + id, executor, "host", TaskLocality.ANY, speculative = false)

  private def begin(tasks: RunningTasks, stage: Int, id: Long, executor: String = "1"): Unit =
    tasks.onTaskStart(SparkListenerTaskStart(stage, 0, task(id, executor)))

  private def ids(tasks: RunningTasks, topology: String): Seq[Long] =
    tasks.byTopology.getOrElse(topology, Vector.empty).map(_.started - 1000)

  test("a task of a topology is listed from its start to its end, with its executor and its attempt") {
    val tasks = new RunningTasks
    tasks.onStageSubmitted(submitted(3, "a"))
    Seq(8L, 7L).foreach(begin(tasks, 3, _))
    assert(ids(tasks, "a") == Seq(7, 8))
    val first = tasks.byTopology("a").head
    assert((first.executor, first.kind, first.name, first.ended) == (("1", "task", "stage 3.0 partition 7 attempt 7", 0)))
    tasks.onTaskEnd(SparkListenerTaskEnd(3, 0, "", null, task(7, "1"), null, null))
    assert(ids(tasks, "a") == Seq(8))
  }

  test("tasks outside of topologies are not listed") {
    val tasks = new RunningTasks
    tasks.onStageSubmitted(submitted(3, ""))
    tasks.onStageSubmitted(SparkListenerStageSubmitted(stage(4), null))
    Seq(3, 4, 5).foreach(begin(tasks, _, 7))
    assert(tasks.byTopology.isEmpty)
  }

  test("the end of a stage and the loss of an executor end their tasks, even if Spark dropped the events of the tasks") {
    val tasks = new RunningTasks
    Seq(3, 4).foreach(id => tasks.onStageSubmitted(submitted(id, "a")))
    begin(tasks, 3, 1)
    begin(tasks, 4, 2)
    begin(tasks, 4, 3, "2")
    tasks.onStageCompleted(SparkListenerStageCompleted(stage(3)))
    assert(ids(tasks, "a") == Seq(2, 3))
    tasks.onExecutorRemoved(SparkListenerExecutorRemoved(0, "2", "lost"))
    assert(ids(tasks, "a") == Seq(2))
  }

  Seq("" -> 1000, "a" -> 4000).foreach { case (topology, bound) =>
    test(s"the start and the end of a task of topology '$topology' take less than $bound ns on Spark's listener bus") {
      val tasks = new RunningTasks
      tasks.onStageSubmitted(submitted(3, topology))
      val starts = (0L until 1000L).map(id => SparkListenerTaskStart(3, 0, task(id, "1")))
      val ends = (0L until 1000L).map(id => SparkListenerTaskEnd(3, 0, "", null, task(id, "1"), null, null))
      val rounds = (0 until 300).map { _ =>
        val began = System.nanoTime()
        starts.foreach(tasks.onTaskStart)
        ends.foreach(tasks.onTaskEnd)
        (System.nanoTime() - began) / 1000
      }
      val median = rounds.drop(100).sorted.apply(100) // the first rounds compile the code
      info(s"$median ns for each task")
      assert(median < bound)
    }
  }

  test("at most a limited number of tasks is listed") {
    val tasks = new RunningTasks(2)
    tasks.onStageSubmitted(submitted(3, "a"))
    (1L to 5L).foreach(begin(tasks, 3, _))
    assert(ids(tasks, "a") == Seq(1, 2))
  }
}
