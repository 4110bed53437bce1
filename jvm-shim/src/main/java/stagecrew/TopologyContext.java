package stagecrew;

import java.util.Map;

/** What a {@link TopologyListener} is told about where it runs. */
public interface TopologyContext {
  /** The id of the Spark application. */
  String application();

  /** The name that the user gave the topology; {@code application} for the application's own. */
  String topology();

  /** The generated id of the topology. */
  String topologyId();

  /** The id of the executor; {@code driver} in local mode. */
  String executor();

  /** The host of the executor. */
  String host();

  /** The executor's Spark configuration, without the keys that {@code spark.redaction.regex} hides. */
  Map<String, String> configuration();
}
