package stagecrew

import org.apache.spark.api.plugin.{DriverPlugin, ExecutorPlugin, SparkPlugin}
import org.apache.spark.stagecrew.driver.DriverShim
import org.apache.spark.stagecrew.executor.ExecutorShim

/** The class that `spark.plugins` names. */
final class StagecrewPlugin extends SparkPlugin {
  override def driverPlugin(): DriverPlugin = new DriverShim
  override def executorPlugin(): ExecutorPlugin = new ExecutorShim
}
