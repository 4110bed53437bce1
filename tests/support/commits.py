"""Sinks, commit logs and helper functions that the tests of commits share."""

from __future__ import annotations

from stagecrew.errors import CommitConflict
from stagecrew.operators.commit_log import MemoryCommitLog
from stagecrew.operators.commits import commit
from support.commit_trials import SCHEMA, SinkWrapper


def trials_in(make, tmp_path):
    """Returns a function that creates a trial in a new folder with the given name."""

    def make_trial(name):
        (tmp_path / name).mkdir()
        return make(tmp_path / name)

    return make_trial


class RefusingSink(SinkWrapper):
    """A sink whose `commit` always raises CommitConflict."""

    def commit(self, staging, messages):
        raise CommitConflict("never")


class StepBefore(SinkWrapper):
    """A sink that runs a function before the first call of a method: `StepBefore(sink, commit=function)`."""

    def __init__(self, sink, **steps):
        super().__init__(sink)
        self._steps = steps

    def __getattr__(self, name):
        method, step = getattr(self._sink, name), self._steps.pop(name, None)

        def step_then_call(*args):
            if step is not None:
                step()
            return method(*args)

        return method if step is None else step_then_call


class FailingLog:
    """A commit log that raises an error instead of writing a record with one of the given states."""

    def __init__(self, commit_log, error, *states):
        self._log, self._error, self._states, self.read = commit_log, error, states, commit_log.read

    def write(self, key, record, version):
        if record["state"] in self._states:
            raise self._error
        return self._log.write(key, record, version)


def commit_and_restore_old_log(trial, tasks):
    """Commits, then replaces the log with a copy taken before the decision. Returns the visible rows and the state."""
    copy = MemoryCommitLog()

    def run(staging):
        version, record = trial.commit_log.read("c")
        for number in range(version):
            copy.write("c", record, number)
        return tasks.run(trial.make_sink(), staging)

    commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, run)
    trial.commit_log = copy
    return sorted(trial.visible()), trial.state()
