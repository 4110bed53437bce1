package org.apache.spark.stagecrew

import java.util.concurrent.atomic.AtomicInteger
import org.scalatest.funsuite.AnyFunSuite
import org.apache.spark.{SparkConf, SparkContext, SparkException, TaskContext}
import stagecrew.{TopologyContext, TopologyListener}

object TaskStartSuite {
  val bodies = new AtomicInteger

  /** An exception that cannot be printed, because its own methods throw. */
  final class Unspeakable extends RuntimeException {
    override def getMessage: String = throw new IllegalStateException("no message")
  }
  final class FailingOpen extends TopologyListener {
    override def open(context: TopologyContext): Unit = throw new Unspeakable
  }
  final class FailingDecorate extends TopologyListener {
    override def decorate(context: TopologyContext, task: TaskContext): AutoCloseable = throw new Unspeakable
  }
  final class Overflowing extends TopologyListener {
    override def decorate(context: TopologyContext, task: TaskContext): AutoCloseable =
      throw new StackOverflowError("too deep")
  }
}

/** Every failure before the body of a task fails the attempt, although Spark only logs what `onTaskStart` throws. */
class TaskStartSuite extends AnyFunSuite {
  import TaskStartSuite._

  Seq(classOf[FailingOpen] -> classOf[Unspeakable].getName, classOf[FailingDecorate] -> classOf[Unspeakable].getName,
    classOf[Overflowing] -> "too deep").foreach { case (listener, cause) =>
    test(s"no body runs and the action fails with the cause: ${listener.getSimpleName}") {
      val sc = new SparkContext(new SparkConf(false).setMaster("local[2,3]").setAppName("task start")
        .set("spark.ui.enabled", "false")
        .set("spark.driver.host", "127.0.0.1").set("spark.driver.bindAddress", "127.0.0.1")
        .set("spark.plugins", "stagecrew.StagecrewPlugin").set(Settings.JvmListeners, listener.getName))
      try {
        bodies.set(0)
        val failed = intercept[SparkException](sc.parallelize(1 to 2, 2).foreach(_ => { bodies.incrementAndGet(); () }))
        assert(failed.getMessage.contains(cause) && failed.getMessage.contains(listener.getSimpleName))
        assert(bodies.get === 0)
      } finally sc.stop()
    }
  }
}
