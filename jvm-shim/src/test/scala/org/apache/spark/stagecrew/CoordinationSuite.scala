package org.apache.spark.stagecrew

import java.io.File
import java.util.concurrent.{LinkedBlockingQueue, TimeUnit}
import org.scalatest.funsuite.AnyFunSuite
import org.apache.spark.{SparkConf, SparkContext}
import org.apache.spark.stagecrew.driver.Coordination
import org.apache.spark.stagecrew.spark.{Handler, Peer, Reply, Rpc}
import org.apache.spark.stagecrew.wire.{Frame, Frames}

class CoordinationSuite extends AnyFunSuite {
  test("an executor gets LOST at once if the driver's Python is not connected") {
    val sc = new SparkContext(new SparkConf(false).setMaster("local[1]").setAppName("t").set("spark.ui.enabled", "false"))
    try {
      val coordination = new Coordination(new Settings(new SparkConf(false)), () => new File("/unused"))
      val received = new LinkedBlockingQueue[Frame]
      val executor = Rpc.endpoint("executor-1", new Handler {
        override def receive(message: Array[Byte], from: Option[Peer], address: String, reply: Reply): Unit =
          received.put(Frames.decodeMessage(message))
      })
      val driver = Rpc.driver(Coordination.EndpointName)
      driver.send(Rpc.withSender(executor, Frames.encode("ANNOUNCE", "1", "")))
      driver.send(Frames.encode("FROM", "1", Array[Byte](1)))
      val lost = received.poll(10, TimeUnit.SECONDS)
      assert(lost != null && lost.kind == "LOST" && lost.text("executor") == "driver")
      assert(lost.text("reason") == "the driver lost its connection to the coordinators")
      driver.send(Frames.encode("FROM", "2", Array[Byte](1))) // an executor that is lost gets nothing
      driver.send(Frames.encode("FROM", "1", Array[Byte](1)))
      assert(received.poll(10, TimeUnit.SECONDS) != null && received.isEmpty)
      coordination.close()
    } finally sc.stop()
  }
}
