"""Measures calls of an actor from a task in other frameworks: `peers.py ray|dask`. Reads JSON lines like `driver.py`.

Ray and Dask are installed only for this (`pip install --group bench`).
"""

import sys
import time

from serving import serve

PAYLOAD = b"x" * 100


class Echo:
    """An actor that returns its argument."""

    def call(self, payload):
        """Returns the payload."""
        return payload


def timed(call, warm_up, count):
    """Returns the seconds of each of these consecutive calls."""
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(count):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return times


class Ray:
    """Ray: an actor, called from remote functions."""

    def __init__(self):
        import ray

        self.ray = ray
        ray.init(num_cpus=3, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        self.actor = ray.remote(Echo).remote()

        @ray.remote
        def task(actor, count):
            return timed(lambda: ray.get(actor.call.remote(PAYLOAD)), 200, count)

        self.task = task

    def requests(self, tasks, count):
        """Returns the seconds of each call, from concurrent tasks."""
        found = self.ray.get([self.task.remote(self.actor, count) for _ in range(tasks)])
        return {"seconds": [one for times in found for one in times]}

    def stop(self):
        """Stops Ray."""
        self.ray.shutdown()
        return {}


class Dask:
    """Dask: an actor on one worker, called from tasks on the others."""

    def __init__(self):
        from distributed import Client, LocalCluster

        self.cluster = LocalCluster(n_workers=3, threads_per_worker=1, processes=True, dashboard_address=None)
        self.client = Client(self.cluster)
        self.workers = list(self.client.scheduler_info()["workers"])
        self.actor = self.client.submit(Echo, actor=True, workers=[self.workers[0]]).result()

    def requests(self, tasks, count):
        """See `Ray.requests`."""

        def task(actor, number):
            return timed(lambda: actor.call(PAYLOAD).result(), 100, count)

        futures = [
            self.client.submit(task, self.actor, n, workers=[self.workers[1 + n % 2]], pure=False) for n in range(tasks)
        ]
        return {"seconds": [one for future in futures for one in future.result()]}

    def stop(self):
        """Stops Dask."""
        self.client.close()
        self.cluster.close()
        return {}


if __name__ == "__main__":
    serve({"ray": Ray, "dask": Dask}[sys.argv[1]])
