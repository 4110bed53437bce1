package org.apache.spark.stagecrew

import java.util.concurrent.{CountDownLatch, Executor, TimeUnit}
import org.scalatest.concurrent.Eventually._
import org.scalatest.funsuite.AnyFunSuite
import org.scalatest.time.{Seconds, Span}

class OnceSuite extends AnyFunSuite {
  test("if the pool starts no thread, all callers get the error, and the next caller tries again") {
    val (entered, refuses) = (new CountDownLatch(1), new CountDownLatch(1))
    @volatile var works = false
    val pool: Executor = call => if (works) call.run() else {
      entered.countDown()
      refuses.await(60, TimeUnit.SECONDS)
      throw new OutOfMemoryError("unable to create native thread")
    }
    val once = new Once[String](pool)
    @volatile var errors = Set.empty[Throwable]
    def caller() = new Thread(() => try { once.of("key")("value"); () } catch {
      case error: Throwable => OnceSuite.this.synchronized(errors += error)
    })
    val (first, second) = (caller(), caller())
    Seq(first, second).foreach(_.setDaemon(true))
    first.start()
    assert(entered.await(10, TimeUnit.SECONDS))
    second.start()
    eventually(timeout(Span(10, Seconds)))(assert(second.getState == Thread.State.WAITING))
    refuses.countDown()
    Seq(first, second).foreach(_.join(10000))
    assert(!first.isAlive && !second.isAlive && errors.map(_.getMessage) == Set("unable to create native thread"))
    works = true
    assert(once.of("key")("value") == "value")
  }
}
