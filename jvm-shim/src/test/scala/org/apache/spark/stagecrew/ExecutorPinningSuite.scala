package org.apache.spark.stagecrew

import org.scalatest.OneInstancePerTest
import org.scalatest.funsuite.AnyFunSuite
import scala.collection.mutable
import org.apache.spark.stagecrew.driver.ExecutorPinning

/** Tests that executors are pinned while topologies are closing on them, even if events are dropped. */
class ExecutorPinningSuite extends AnyFunSuite with OneInstancePerTest {
  private val pins = mutable.HashMap.empty[String, Int].withDefaultValue(0)
  private var dropped = false
  private val pinning: ExecutorPinning = new ExecutorPinning(
    (executor, begins) => pins(executor) += (if (begins) 1 else -1), () => if (!dropped) pinning.notifySpark())

  test("an executor is pinned as long as any topology is closing on it") {
    pinning.closingBegins("a", Seq("1", "2"))
    pinning.closingBegins("b", Seq("2"))
    assert(pins == Map("1" -> 1, "2" -> 2))
    pinning.closingEnds("a", "2")
    pinning.closingEnds("a", "2")
    assert(pins == Map("1" -> 1, "2" -> 1))
    pinning.closingEnds("b", "2")
    pinning.closingEnds("a", "1")
    assert(pins == Map("1" -> 0, "2" -> 0))
  }

  test("the next event or reminder makes up for a dropped event") {
    pinning.closingBegins("a", Seq("1"))
    dropped = true
    pinning.closingEnds("a", "1")
    pinning.closingBegins("b", Seq("2"))
    assert(pins == Map("1" -> 1))
    dropped = false
    pinning.remind()
    assert(pins == Map("1" -> 0, "2" -> 1))
    pinning.remind()
    pinning.notifySpark()
    pinning.closingEnds("b", "2")
    assert(pins == Map("1" -> 0, "2" -> 0))
  }
}
