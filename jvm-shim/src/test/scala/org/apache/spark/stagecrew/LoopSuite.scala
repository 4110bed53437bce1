package org.apache.spark.stagecrew

import java.util.concurrent.TimeUnit
import java.util.concurrent.atomic.AtomicInteger
import org.scalatest.concurrent.Eventually._
import org.scalatest.funsuite.AnyFunSuite
import org.scalatest.time.{Seconds, Span}

class LoopSuite extends AnyFunSuite {
  private final class Periodic extends ThreadLoop("suite") {
    val calls = new AtomicInteger
    every(5)("counting") {
      if (calls.incrementAndGet() % 2 == 1) throw new OutOfMemoryError("a moment without memory")
    }
    def stop(): Boolean = { loop.shutdownNow(); loop.awaitTermination(10, TimeUnit.SECONDS) }
  }

  test("a periodic call continues after any error, until the loop ends") {
    val periodic = new Periodic
    eventually(timeout(Span(10, Seconds)))(assert(periodic.calls.get >= 5))
    assert(periodic.stop()) // its thread has ended, so no call can follow
  }
}
