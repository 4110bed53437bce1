package stagecrew;

import org.apache.spark.api.plugin.DriverPlugin;
import org.apache.spark.api.plugin.ExecutorPlugin;
import org.apache.spark.api.plugin.SparkPlugin;
import org.apache.spark.stagecrew.driver.DriverShim;
import org.apache.spark.stagecrew.executor.ExecutorShim;
import org.apache.spark.stagecrew.spark.JarCheck;

/** The class that {@code spark.plugins} names. */
public final class StagecrewPlugin implements SparkPlugin {
  @Override
  public DriverPlugin driverPlugin() {
    JarCheck.check(getClass().getClassLoader());
    return new DriverShim();
  }

  @Override
  public ExecutorPlugin executorPlugin() {
    return new ExecutorShim();
  }
}
