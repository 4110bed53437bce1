"""Helpers that several test modules share. The folder `tests` is on the path: `from support.sessions import Sessions`.

* Any test: `waiting`, `processes`, `journal` (processes record events in a file), `cli` (the `stagecrew` command).
* Real Spark: `spark_home`, `sessions`, `clusters`, `driver_scripts` (with `script_prelude`), `jvm_listeners`,
  `spark_storage`, `coordination`, `event_logs`, `web_pages`, `docs_blocks`.
* Servers: `zookeeper`, `postgres`, `s3`, `hdfs`; networks that fail: `tcp_proxy`, `network_namespaces`.
* Commits and sinks: `commit_trials` (fault injection), `commit_schedules`, `local_sinks`, `sink_targets` (with Spark).
* Coordination store and state handles: `model_store`, `store_process`, `handle_faults`, `handle_contract`.
* Leadership and jobs: `candidate_process`, `driver_processes` (with `kill_points`), `example_jobs`, `simulated_jobs`.
* Random job programs: `job_programs`, `job_program_strategy`, `job_program_histories` (simulated),
  `job_programs_on_spark`, `simulated_spark`.
* Operators without Spark: `operator_fakes`.
"""
