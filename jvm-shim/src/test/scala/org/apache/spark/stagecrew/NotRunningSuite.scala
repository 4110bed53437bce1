package org.apache.spark.stagecrew

import java.util.{Map => JMap}
import java.util.concurrent.atomic.AtomicInteger
import org.scalatest.funsuite.AnyFunSuite
import org.apache.spark.{SparkConf, SparkContext, SparkEnv, SparkException}
import org.apache.spark.api.plugin.{DriverPlugin, ExecutorPlugin, PluginContext, SparkPlugin}
import org.apache.spark.stagecrew.spark.{Handler, Peer, Reply, Rpc}

/** Another plugin that registers an endpoint with the name that our plugin needs, so ours cannot start. */
final class Squatter extends SparkPlugin {
  override def driverPlugin(): DriverPlugin = null
  override def executorPlugin(): ExecutorPlugin = new ExecutorPlugin {
    override def init(plugin: PluginContext, extra: JMap[String, String]): Unit = {
      val handler = new Handler {
        def receive(message: Array[Byte], from: Option[Peer], address: String, reply: Reply): Unit = ()
      }
      Rpc.endpoint(s"stagecrew-${SparkEnv.get.executorId}", handler)
      ()
    }
  }
}

object NotRunningSuite {
  val bodies = new AtomicInteger
}

class NotRunningSuite extends AnyFunSuite {
  import NotRunningSuite.bodies

  test("if the plugin cannot start, no task body runs, the executor survives, and the error names cause and remedy") {
    val conf = new SparkConf(false).setMaster("local[2,3]").setAppName("not running").set("spark.ui.enabled", "false")
      .set("spark.driver.host", "127.0.0.1").set("spark.driver.bindAddress", "127.0.0.1")
      .set("spark.plugins", s"${classOf[Squatter].getName},stagecrew.StagecrewPlugin")
    val sc = new SparkContext(conf)
    try {
      bodies.set(0)
      val started = System.nanoTime()
      val failed = intercept[SparkException](sc.parallelize(1 to 4, 2).foreach(_ => { bodies.incrementAndGet(); () }))
      assert(failed.getMessage.contains("could not start on executor driver"))
      assert(failed.getMessage.contains("There is already an RpcEndpoint called stagecrew-driver"))
      assert(failed.getMessage.contains("spark.plugins"))
      assert(bodies.get === 0)
      assert(System.nanoTime() - started < 60e9)
      assert(!sc.isStopped && sc.statusTracker.getExecutorInfos.nonEmpty)
    } finally sc.stop()
  }
}
