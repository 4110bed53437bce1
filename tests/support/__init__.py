"""Helpers that several test modules share. The folder `tests` is on `sys.path`, so `from support.cli import ...` works.

* Any test: `waiting`, `processes`, `journal` (processes record events in a file), `cli` (the `stagecrew` command),
  `hidden_proc` (with `hide_proc`: runs tests as on a system without /proc), `requirements` (the script `bootstrap`),
  `build_scripts` (the scripts in `build`).
* Real Spark: `spark_home`, `sessions`, `clusters`, `driver_scripts` (with `script_prelude`), `jvm_listeners`,
  `spark_storage`, `shuffle_datasets`, `coordination`, `event_logs`, `web_pages`, `docs_blocks`.
* Kubernetes, simulated: `kubernetes`.
* Servers: `zookeeper`, `postgres`, `s3`, `hdfs`; network faults: `tcp_proxy`, `network_namespaces`.
* Commits and sinks: `commit_trials` (fault injection), `commit_schedules`, `commits`, `local_sinks`, `server_trials`,
  `sink_targets` (with Spark).
* Coordination store and state handles: `model_store`, `store_process`, `handle_faults`, `handle_contract`.
* Leadership and jobs: `candidate_process`, `driver_processes` (with `kill_points`), `example_jobs`, `simulated_jobs`.
* Random job programs: `job_programs`, `job_program_strategy`, `job_program_histories` (simulated),
  `job_programs_on_spark`, `simulated_spark`.
* Operators without Spark: `operator_fakes`. A channel without Spark: `fake_channel`.
"""
