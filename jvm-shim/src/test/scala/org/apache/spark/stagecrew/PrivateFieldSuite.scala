package org.apache.spark.sql.execution

import org.apache.spark.util.LazyTry
import org.scalatest.funsuite.AnyFunSuite
import scala.util.Try

class PrivateFieldSuite extends AnyFunSuite {
  test("a private field that Spark lacks is named, and reading it fails") {
    val field = new PrivateField[LazyTry[Int], Try[Int]]("gone")
    assert(field.problem.exists(_.contains("org.apache.spark.util.LazyTry.gone")))
    intercept[NoSuchFieldException](field.of(LazyTry(1)))
  }

  test("a lazy value is read only if Spark has computed it, even with an error") {
    val field = new PrivateField[LazyTry[Int], Try[Int]]("tryT")
    assert(field.problem.isEmpty)
    val (computed, failed, untouched) = (LazyTry(1), LazyTry[Int](throw new IllegalStateException), LazyTry(2))
    computed.get
    intercept[IllegalStateException](failed.get)
    assert(field.of(computed).toOption.contains(1) && field.of(failed).isFailure && field.of(untouched) == null)
  }

  test("this Spark has all private fields that the shim reads") {
    assert(StagecrewPlans.missing.isEmpty)
  }
}
