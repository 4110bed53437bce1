package stagecrew;

import java.util.Map;

/** Where a {@link TopologyListener} runs. */
public interface TopologyContext {
  /** The id of the Spark application. */
  String application();

  /** The name of the topology; {@code application} for the topology of the whole application. */
  String topology();

  /** The generated id of the topology. */
  String topologyId();

  /** The id of the executor; {@code driver} in local mode. */
  String executor();

  /** The host of the executor. */
  String host();

  /** The executor's Spark configuration, without the keys that match {@code spark.redaction.regex}. */
  Map<String, String> configuration();
}
