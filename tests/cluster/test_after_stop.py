"""Topologies of a stopped session raise clear errors."""

from __future__ import annotations

import pytest

import stagecrew
from support.journal import Recorder, recording_body
from support.sessions import LOCAL, Sessions


def test_topologies_of_a_stopped_session_raise_but_can_be_closed(sessions: Sessions, journal):
    """After `spark.stop()`, starting a topology or calling a wrapped function raises StagecrewError. `close` works."""
    spark = sessions.get(LOCAL)
    crew = stagecrew.crew(spark)
    new = crew.topology("new", listeners=[Recorder(journal)])
    started = crew.topology("begun", listeners=[Recorder(journal)]).start()
    calls = []
    wrapped = started.wrap(lambda: calls.append(1))
    spark.sparkContext.parallelize(range(2), 2).mapPartitions(recording_body(journal)).collect()
    sessions.stop()
    with pytest.raises(stagecrew.StagecrewError):
        wrapped()
    with pytest.raises(stagecrew.StagecrewError):
        started.wrap(lambda: calls.append(2))()
    with pytest.raises(stagecrew.StagecrewError):
        new.start()
    with pytest.raises(stagecrew.StagecrewError):
        crew.topology("another", listeners=[Recorder(journal)]).start()
    assert not calls
    started.close()
    assert len(journal.read(event="open")) == len(journal.read(event="close")) > 0
