package org.apache.spark.stagecrew

import org.scalatest.OneInstancePerTest
import org.scalatest.funsuite.AnyFunSuite
import scala.util.Random
import org.apache.spark.stagecrew.partitions.DatasetUsage
import org.apache.spark.stagecrew.wire.Description

/** Tests which datasets the end of a topology releases, and which topologies inherit its other datasets. */
class DatasetUsageSuite extends AnyFunSuite with OneInstancePerTest {
  private val usage = new DatasetUsage
  private val application = Description.Application

  test("the end of a topology releases the datasets that only this topology used") {
    usage.use("a", Seq(1, 2))
    usage.use("b", Seq(3))
    assert(usage.end("a") == (Seq(1, 2), Map.empty))
    assert(usage.end("a") == (Nil, Map.empty))
    assert(usage.end("b") == (Seq(3), Map.empty))
    assert(usage.isEmpty)
  }

  test("a dataset passes to another topology that uses it, and to the application only if there is no other") {
    usage.use("a", Seq(1, 2, 3))
    usage.use(application, Seq(1, 2))
    usage.use("b", Seq(2))
    assert(usage.end("a") == (Seq(3), Map(1 -> application, 2 -> "b")))
    assert(usage.end("b") == (Nil, Map(2 -> application)))
    usage.prune(_ => false)
    assert(usage.isEmpty)
  }

  test("a dataset that is no longer registered has no user") {
    usage.use("a", Seq(1, 2))
    usage.prune(_ == 2)
    assert(usage.heir(1).isEmpty)
    assert(usage.heir(2).contains("a"))
    assert(usage.end("a") == (Seq(2), Map.empty))
    assert(usage.isEmpty)
  }

  test("in 2,000 random orders, the end of the last topology that uses a dataset releases it, once") {
    (0 until 2000).foreach { seed =>
      val random = new Random(seed)
      val usage = new DatasetUsage
      var users = Map.empty[Int, Set[String]].withDefaultValue(Set.empty)
      (0 until 40).foreach { _ =>
        val topology = s"t${random.nextInt(4)}"
        if (random.nextInt(3) > 0) {
          val dataset = random.nextInt(6)
          usage.use(topology, Seq(dataset))
          users = users.updated(dataset, users(dataset) + topology)
        } else {
          val (alone, heirs) = usage.end(topology)
          val ofTopology = users.filter(_._2(topology)).keySet
          users = users.map { case (dataset, by) => dataset -> (by - topology) }.withDefaultValue(Set.empty)
          assert(alone.toSet == ofTopology.filter(users(_).isEmpty))
          assert(heirs.keySet == ofTopology.filter(users(_).nonEmpty))
          heirs.foreach { case (dataset, heir) => assert(users(dataset)(heir)) }
        }
      }
    }
  }
}
