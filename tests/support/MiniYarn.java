import java.io.File;
import java.io.FileOutputStream;
import java.io.OutputStream;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.util.List;
import java.util.Map;

import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.yarn.conf.YarnConfiguration;
import org.apache.hadoop.yarn.server.MiniYARNCluster;
import org.apache.hadoop.yarn.server.api.ApplicationInitializationContext;
import org.apache.hadoop.yarn.server.api.ApplicationTerminationContext;
import org.apache.hadoop.yarn.server.api.AuxiliaryService;
import org.apache.spark.network.TransportContext;
import org.apache.spark.network.server.TransportServer;
import org.apache.spark.network.shuffle.ExternalBlockHandler;
import org.apache.spark.network.util.MapConfigProvider;
import org.apache.spark.network.util.TransportConf;

/**
 * A real resource manager and a real node manager in one process: `MiniYarn FOLDER SHUFFLE_PORT`. Writes the
 * configuration for clients to FOLDER/conf, and ends when its input ends.
 */
public final class MiniYarn {

  /**
   * Spark's shuffle service on the node. PySpark does not contain Spark's own class for YARN. That class starts this
   * block handler and this server too.
   */
  public static final class ShuffleService extends AuxiliaryService {
    private ExternalBlockHandler blocks;
    private TransportServer server;

    public ShuffleService() {
      super("spark_shuffle");
    }

    @Override
    protected void serviceInit(Configuration configuration) throws Exception {
      TransportConf conf = new TransportConf("shuffle", new MapConfigProvider(Map.of()));
      blocks = new ExternalBlockHandler(conf, null);
      int port = configuration.getInt("spark.shuffle.service.port", 0);
      server = new TransportContext(conf, blocks).createServer(port, List.of());
      super.serviceInit(configuration);
    }

    @Override
    protected void serviceStop() throws Exception {
      server.close();
      blocks.close();
      super.serviceStop();
    }

    @Override
    public void initializeApplication(ApplicationInitializationContext context) {}

    @Override
    public void stopApplication(ApplicationTerminationContext context) {
      blocks.applicationRemoved(context.getApplicationId().toString(), true);
    }

    @Override
    public ByteBuffer getMetaData() {
      return ByteBuffer.allocate(0);
    }
  }

  private MiniYarn() {}

  public static void main(String[] arguments) throws Exception {
    File folder = new File(arguments[0]);
    YarnConfiguration configuration = new YarnConfiguration();
    Map<String, String> settings = Map.ofEntries(
        Map.entry("fs.defaultFS", "file:///"),
        Map.entry("hadoop.tmp.dir", folder + "/tmp"),
        Map.entry("yarn.nodemanager.aux-services", "spark_shuffle"),
        Map.entry("yarn.nodemanager.aux-services.spark_shuffle.class", ShuffleService.class.getName()),
        Map.entry("yarn.nodemanager.disk-health-checker.max-disk-utilization-per-disk-percentage", "100"),
        Map.entry("yarn.nodemanager.pmem-check-enabled", "false"),
        Map.entry("yarn.nodemanager.vmem-check-enabled", "false"),
        Map.entry("yarn.nodemanager.resource.cpu-vcores", "16"),
        Map.entry("yarn.nodemanager.resource.memory-mb", "8192"),
        Map.entry("yarn.minicluster.control-resource-monitoring", "false"),
        Map.entry("yarn.scheduler.minimum-allocation-mb", "128"),
        Map.entry("yarn.scheduler.capacity.root.queues", "default"),
        Map.entry("yarn.scheduler.capacity.root.default.capacity", "100"),
        Map.entry("yarn.scheduler.capacity.maximum-am-resource-percent", "1.0"),
        Map.entry("spark.shuffle.service.port", arguments[1]));
    settings.forEach(configuration::set);
    MiniYARNCluster cluster = new MiniYARNCluster("yarn", 1, 1, 1);
    cluster.init(configuration);
    cluster.start();
    if (!cluster.waitForNodeManagersToConnect(60_000)) {
      throw new IllegalStateException("the node manager did not register within a minute");
    }
    File target = new File(folder, "conf");
    Files.createDirectories(target.toPath());
    File file = new File(target, "yarn-site.xml.new");
    try (OutputStream out = new FileOutputStream(file)) {
      cluster.getConfig().writeXml(out);
    }
    Files.move(file.toPath(), new File(target, "yarn-site.xml").toPath());
    while (System.in.read() >= 0) {
      // waits for the end of the input
    }
    cluster.stop();
    System.exit(0);
  }
}
