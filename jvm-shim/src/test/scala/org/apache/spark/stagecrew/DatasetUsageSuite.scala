package org.apache.spark.stagecrew

import org.scalatest.OneInstancePerTest
import org.scalatest.funsuite.AnyFunSuite
import scala.util.Random
import org.apache.spark.stagecrew.partitions.DatasetUsage
import org.apache.spark.stagecrew.wire.Description

/** Which topologies use which datasets, and which one inherits a dataset when a topology ends. */
class DatasetUsageSuite extends AnyFunSuite with OneInstancePerTest {
  private val inventory = new DatasetUsage
  private val application = Description.Application

  test("a dataset that only one topology used is released with it") {
    inventory.use("a", Seq(1, 2))
    inventory.use("b", Seq(3))
    assert(inventory.end("a") == (Seq(1, 2), Map.empty))
    assert(inventory.end("a") == (Nil, Map.empty))
    assert(inventory.end("b") == (Seq(3), Map.empty))
    assert(inventory.isEmpty)
  }

  test("a dataset passes to another user: to a topology rather than to the application") {
    inventory.use("a", Seq(1, 2, 3))
    inventory.use(application, Seq(1, 2))
    inventory.use("b", Seq(2))
    assert(inventory.end("a") == (Seq(3), Map(1 -> application, 2 -> "b")))
    assert(inventory.end("b") == (Nil, Map(2 -> application)))
    inventory.prune(_ => false)
    assert(inventory.isEmpty)
  }

  test("a dataset that is no longer registered has no user") {
    inventory.use("a", Seq(1, 2))
    inventory.prune(_ == 2)
    assert(inventory.heir(1).isEmpty)
    assert(inventory.heir(2).contains("a"))
    assert(inventory.end("a") == (Seq(2), Map.empty))
    assert(inventory.isEmpty)
  }

  test("in 2,000 random orders, the last user of each dataset releases it, once") {
    (0 until 2000).foreach { seed =>
      val random = new Random(seed)
      val inventory = new DatasetUsage
      var users = Map.empty[Int, Set[String]].withDefaultValue(Set.empty)
      (0 until 40).foreach { _ =>
        val topology = s"t${random.nextInt(4)}"
        if (random.nextInt(3) > 0) {
          val dataset = random.nextInt(6)
          inventory.use(topology, Seq(dataset))
          users = users.updated(dataset, users(dataset) + topology)
        } else {
          val (alone, heirs) = inventory.end(topology)
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
