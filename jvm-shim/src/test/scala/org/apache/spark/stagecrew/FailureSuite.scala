package org.apache.spark.stagecrew

import org.scalatest.funsuite.AnyFunSuite

class FailureSuite extends AnyFunSuite {
  private def failed(error: Throwable): Boolean = error match {
    case Failure(same) => same eq error
    case _ => false
  }

  test("exceptions and missing methods are failures, but errors that end a JVM or a thread are not") {
    assert(failed(new IllegalStateException) && failed(new NoSuchMethodError) && failed(new NoClassDefFoundError))
    assert(!failed(new OutOfMemoryError) && !failed(new InterruptedException) && !failed(new ThreadDeath))
  }

  test("`contained` does not throw failures, but throws everything else") {
    Log.contained("a test")(throw new NoSuchMethodError)
    intercept[InterruptedException](Log.contained("a test")(throw new InterruptedException))
  }
}
