package org.apache.spark.stagecrew

import org.scalatest.OneInstancePerTest
import org.scalatest.funsuite.AnyFunSuite
import scala.collection.mutable
import org.apache.spark.stagecrew.driver.ExecutorPinning

/** Who is busy with the end of topologies, as Spark counts it, when events are dropped. */
class ExecutorPinningSuite extends AnyFunSuite with OneInstancePerTest {
  private val running = mutable.HashMap.empty[String, Int].withDefaultValue(0)
  private var dropped = false
  private val busy: ExecutorPinning = new ExecutorPinning((executor, begins) => running(executor) += (if (begins) 1 else -1), () => if (!dropped) busy.notifySpark())

  test("an executor is pinned while a topology closes there, for each topology") {
    busy.begins("a", Seq("1", "2"))
    busy.begins("b", Seq("2"))
    assert(running == Map("1" -> 1, "2" -> 2))
    busy.ends("a", "2")
    busy.ends("a", "2")
    assert(running == Map("1" -> 1, "2" -> 1))
    busy.ends("b", "2")
    busy.ends("a", "1")
    assert(running == Map("1" -> 0, "2" -> 0))
  }

  test("the next event, or a reminder, makes up for a dropped event") {
    busy.begins("a", Seq("1"))
    dropped = true
    busy.ends("a", "1")
    busy.begins("b", Seq("2"))
    assert(running == Map("1" -> 1))
    dropped = false
    busy.remind()
    assert(running == Map("1" -> 0, "2" -> 1))
    busy.remind()
    busy.notifySpark()
    busy.ends("b", "2")
    assert(running == Map("1" -> 0, "2" -> 0))
  }
}
