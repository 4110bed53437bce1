"""Sinks, commit logs and helper functions that several tests of commits use."""

from __future__ import annotations

from stagecrew.errors import CommitConflict
from stagecrew.operators.commit_log import MemoryCommitLog
from stagecrew.operators.commits import commit
from support.commit_trials import SCHEMA, SinkWrapper


def trials_in(make, tmp_path):
    """Returns `make_trial(name)`, which creates a trial in a new folder with this name in `tmp_path`."""

    def make_trial(name):
        (tmp_path / name).mkdir()
        return make(tmp_path / name)

    return make_trial


class RefusingSink(SinkWrapper):
    """A sink whose `commit` always raises CommitConflict."""

    def commit(self, staging, messages):
        raise CommitConflict("this sink refuses every commit")


class CallsBefore(SinkWrapper):
    """A sink that calls a function once, before a method is first used: `CallsBefore(sink, commit=function)`."""

    def __init__(self, sink, **functions):
        super().__init__(sink)
        self._functions = functions

    def __getattr__(self, name):
        method, function = getattr(self._sink, name), self._functions.pop(name, None)

        def call_both(*args):
            if function is not None:
                function()
            return method(*args)

        return method if function is None else call_both


class FailingLog:
    """A commit log that raises an error instead of writing a record with one of the given states."""

    def __init__(self, commit_log, error, *states):
        self._log, self._error, self._states, self.read = commit_log, error, states, commit_log.read

    def write(self, key, record, version):
        if record["state"] in self._states:
            raise self._error
        return self._log.write(key, record, version)


def commit_and_restore_old_log(trial, tasks):
    """Commits. Then replaces the commit log with a copy from before the record of the decision was written.

    Returns the visible rows, and everything that exists in the sink (`trial.state()`).
    """
    copy = MemoryCommitLog()

    def run(staging):
        version, record = trial.commit_log.read("c")
        for number in range(version):  # the copy gets the log's version number
            copy.write("c", record, number)
        return tasks.run(trial.make_sink(), staging)

    commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, run)
    trial.commit_log = copy
    return sorted(trial.visible()), trial.state()
