package org.apache.spark.sql.execution

import scala.reflect.ClassTag
import scala.util.Try
import org.apache.spark.ShuffleDependency
import org.apache.spark.rdd.RDD
import org.apache.spark.sql.classic
import org.apache.spark.sql.execution.adaptive.{AdaptiveSparkPlanExec, QueryStageExec}
import org.apache.spark.sql.execution.columnar.{CachedRDDBuilder, InMemoryTableScanExec}
import org.apache.spark.sql.execution.exchange.{ReusedExchangeExec, ShuffleExchangeExec}
import org.apache.spark.util.LazyTry

/** A private field of Spark. */
private[spark] final class PrivateField[T, R](name: String)(implicit tag: ClassTag[T]) {
  private val found = Try {
    val field = tag.runtimeClass.getDeclaredField(name)
    field.setAccessible(true)
    field
  }

  /** Why the field cannot be read. */
  def problem: Option[String] = found.failed.toOption.map(error => s"${tag.runtimeClass.getName}.$name ($error)")

  def of(instance: T): R = found.get.get(instance).asInstanceOf[R]
}

/**
 * sql/core: CacheManager.scala, InMemoryRelation.scala, QueryExecution.scala, ShuffleExchangeExec.scala. Private lazy
 * values are read as fields, so they are never computed. A value that is not computed has not stored anything.
 */
private[spark] object StagecrewPlans {
  /** Shuffles and cached datasets of a plan, and RDDs whose lineage must be searched for more. */
  final case class Found(shuffles: Seq[Int] = Nil, caches: Seq[Int] = Nil, rdds: Seq[RDD[_]] = Nil) {
    def +(other: Found): Found = Found(shuffles ++ other.shuffles, caches ++ other.caches, rdds ++ other.rdds)
  }

  def stored(dataset: classic.Dataset[_]): Found = {
    val plan = Option(Value.of(LazyPlan.of(dataset.queryExecution))).flatMap(_.toOption)
    val executed = plan.fold(Found())(of)
    val cached = dataset.sparkSession.sharedState.cacheManager.lookupCachedData(dataset).toSeq
    cached.map(data => of(data.cachedRepresentation.cacheBuilder)).foldLeft(executed)(_ + _)
  }

  /** Removes a dataset from SQL's cache. Returns whether it was cached. */
  def uncache(rdd: Int): Boolean = classic.SparkSession.getDefaultSession.exists { session =>
    val manager = session.sharedState.cacheManager
    val matching =
      Cached.of(manager).filter(data => buffers(data.cachedRepresentation.cacheBuilder).exists(_.id == rdd))
    matching.foreach(data => manager.uncacheQuery(session, data.plan, cascade = false, blocking = true))
    matching.nonEmpty
  }

  private def of(plan: SparkPlan): Found = {
    val own = plan match {
      case adaptive: AdaptiveSparkPlanExec => of(adaptive.executedPlan)
      case stage: QueryStageExec => of(stage.plan)
      case reused: ReusedExchangeExec => of(reused.child)
      case scan: InMemoryTableScanExec => of(scan.relation.cacheBuilder)
      case shuffle: ShuffleExchangeExec =>
        Found(shuffles = Option(Dependency.of(shuffle)).map(_.shuffleId).toSeq)
      case scan: RDDScanExec => Found(rdds = Seq(scan.rdd))
      case scan: ExternalRDDScanExec[_] => Found(rdds = Seq(scan.rdd))
      case _ => Found()
    }
    (plan.children ++ plan.subqueries).map(of).foldLeft(own)(_ + _)
  }

  private def of(builder: CachedRDDBuilder): Found =
    buffers(builder).fold(Found())(rdd => Found(caches = Seq(rdd.id), rdds = Seq(rdd)))

  private def buffers(builder: CachedRDDBuilder): Option[RDD[_]] = Option(Buffers.of(builder))

  private val LazyPlan = new PrivateField[QueryExecution, LazyTry[SparkPlan]]("lazyExecutedPlan")
  private val Value = new PrivateField[LazyTry[SparkPlan], Try[SparkPlan]]("tryT")
  private val Cached = new PrivateField[CacheManager, IndexedSeq[CachedData]]("cachedData")
  private val Dependency = new PrivateField[ShuffleExchangeExec, ShuffleDependency[_, _, _]]("shuffleDependency")
  private val Buffers = new PrivateField[CachedRDDBuilder, RDD[_]]("_cachedColumnBuffers")

  /** The private fields that this Spark does not have. */
  def missing: Seq[String] = Seq(LazyPlan, Value, Cached, Dependency, Buffers).flatMap(_.problem)
}
