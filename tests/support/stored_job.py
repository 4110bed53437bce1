"""The stored steps of a job, without a driver and a leader."""

from __future__ import annotations

import pyarrow.fs

from stagecrew.recovery.jobs.job import Job
from stagecrew.recovery.state.handles import StateHandleStore
from stagecrew.recovery.state.storage import StateStorage
from support.model_store import ModelServer

__all__ = ["StoredJob"]


class StoredJob:
    """The stored steps of one job. Each call of `run` returns the `Job` of a new run."""

    def __init__(self):
        self.store = ModelServer().session()
        self.store.ensure("steps", "commits")
        filesystem = pyarrow.fs._MockFileSystem()
        filesystem.create_dir("states")
        self.storage = StateStorage("states", filesystem)
        self.steps = StateHandleStore(self.store, self.storage, "steps")
        self.runs = 0

    def run(self, retry_timeout=0.0, id_="job"):
        self.runs += 1
        return Job(id_, self.runs, self.steps, StateHandleStore(self.store, self.storage, "commits"), retry_timeout)
