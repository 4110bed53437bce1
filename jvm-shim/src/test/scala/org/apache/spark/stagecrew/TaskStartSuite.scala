package org.apache.spark.stagecrew

import java.util.concurrent.atomic.AtomicInteger
import org.scalatest.funsuite.AnyFunSuite
import org.apache.spark.{SparkConf, SparkContext, SparkException, TaskContext}
import org.apache.spark.api.plugin.{DriverPlugin, ExecutorPlugin, SparkPlugin}
import stagecrew.{TopologyContext, TopologyListener}
import org.apache.spark.stagecrew.driver.DriverShim

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

  /** The plugin, which keeps both of its parts. */
  final class KeptPlugin extends SparkPlugin {
    private val plugin = new _root_.stagecrew.StagecrewPlugin
    override def driverPlugin(): DriverPlugin = {
      onDriver = plugin.driverPlugin()
      onDriver
    }
    override def executorPlugin(): ExecutorPlugin = {
      onExecutor = plugin.executorPlugin()
      onExecutor
    }
  }
  @volatile var onDriver: DriverPlugin = _
  @volatile var onExecutor: ExecutorPlugin = _

  val Starts = 100000L
}

/** Every failure before the body of a task fails the attempt, although Spark only logs what `onTaskStart` throws. */
class TaskStartSuite extends AnyFunSuite {
  import TaskStartSuite._

  Seq(classOf[FailingOpen] -> classOf[Unspeakable].getName, classOf[FailingDecorate] -> classOf[Unspeakable].getName,
    classOf[Overflowing] -> "too deep").foreach { case (listener, cause) =>
    test(s"no body runs and the action fails with the cause: ${listener.getSimpleName}") {
      run("stagecrew.StagecrewPlugin", Settings.JvmListeners -> listener.getName) { sc =>
        bodies.set(0)
        val failed = intercept[SparkException](sc.parallelize(1 to 2, 2).foreach(_ => { bodies.incrementAndGet(); () }))
        assert(failed.getMessage.contains(cause) && failed.getMessage.contains(listener.getSimpleName))
        assert(bodies.get === 0)
      }
    }
  }

  test("after a failed open, the driver still knows the address of the executor") {
    run(classOf[KeptPlugin].getName, Settings.JvmListeners -> classOf[FailingOpen].getName) { sc =>
      intercept[SparkException](sc.parallelize(1 to 2, 2).foreach(_ => ()))
      val executors = onDriver.asInstanceOf[DriverShim].crew.executors
      assert(executors.nonEmpty && executors.values.forall(_.address.nonEmpty))
    }
  }

  test("the start of a task without listeners takes less than two microseconds") {
    run(classOf[KeptPlugin].getName) { sc =>
      val rounds = sc.parallelize(Seq(1), 1).map { _ =>
        (0 until 30).map { _ =>
          val began = System.nanoTime()
          var n = 0
          while (n < Starts) { onExecutor.onTaskStart(); n += 1 }
          (System.nanoTime() - began) / Starts
        }
      }.first()
      val median = rounds.drop(10).sorted.apply(10) // the first rounds compile the code
      info(s"$median ns for each task")
      assert(median < 2000)
    }
  }

  private def run(plugin: String, settings: (String, String)*)(body: SparkContext => Unit): Unit = {
    val sc = new SparkContext(new SparkConf(false).setMaster("local[2,3]").setAppName("task start")
      .set("spark.ui.enabled", "false")
      .set("spark.driver.host", "127.0.0.1").set("spark.driver.bindAddress", "127.0.0.1")
      .set("spark.plugins", plugin).setAll(settings))
    try body(sc) finally sc.stop()
  }
}
