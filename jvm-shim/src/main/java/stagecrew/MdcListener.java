package stagecrew;

import java.util.LinkedHashMap;
import java.util.Map;
import org.apache.spark.TaskContext;
import org.slf4j.MDC;

/**
 * Gives the log records of a task's thread the keys {@code stagecrew.application}, {@code stagecrew.topology}, {@code
 * stagecrew.stage}, {@code stagecrew.partition} and {@code stagecrew.attempt}: {@code %X{stagecrew.topology}} in a
 * log4j2 pattern. Register it with {@code spark.stagecrew.jvmListeners=stagecrew.MdcListener}.
 *
 * <p>In a nested topology, the keys name the inner topology if it also has this listener. Threads that a task starts
 * have no keys.
 */
public final class MdcListener implements TopologyListener {
  @Override
  public AutoCloseable decorate(TopologyContext context, TaskContext task) {
    Map<String, String> before = new LinkedHashMap<>();
    put(before, "stagecrew.application", context.application());
    put(before, "stagecrew.topology", context.topology());
    put(before, "stagecrew.stage", Integer.toString(task.stageId()));
    put(before, "stagecrew.partition", Integer.toString(task.partitionId()));
    put(before, "stagecrew.attempt", Long.toString(task.taskAttemptId()));
    return () -> before.forEach((key, value) -> {
      if (value == null) {
        MDC.remove(key);
      } else {
        MDC.put(key, value);
      }
    });
  }

  private static void put(Map<String, String> before, String key, String value) {
    before.put(key, MDC.get(key));
    MDC.put(key, value);
  }
}
