package stagecrew;

import org.apache.spark.TaskContext;

/**
 * A listener of the lifecycle of topologies in the JVM of an executor.
 *
 * <p>{@code open} runs before the first task of the topology on the executor, at most once until {@code close}. Tasks
 * that start during {@code open} wait for it and share its outcome. If it throws, no task body runs: the attempt ends,
 * {@code close} is called once, a later attempt may open again, and at the retry limit the job is cancelled with the
 * cause.
 * {@code close} runs when the topology has ended and none of its tasks is live on the executor. It does <em>not</em>
 * run in an executor that is killed with SIGKILL.
 *
 * <p>Implementations need a public constructor without parameters. Each topology has its own instance on each executor.
 *
 * <p>Source: FLINK-14184.
 */
public interface TopologyListener {
  /** Called before the first task. */
  default void open(TopologyContext context) throws Exception {}

  /** Called after the last task, even if {@code open} threw. Exceptions of {@code close} are logged and counted. */
  default void close(TopologyContext context) throws Exception {}

  /**
   * Called in the thread of each task before its body. Its result, if it is not null, is closed in the same thread when
   * the attempt has ended, however it ended. Exceptions thrown by that {@code close} are logged and counted.
   */
  default AutoCloseable decorate(TopologyContext context, TaskContext task) throws Exception {
    return null;
  }
}
