"""What belonged to a session that has stopped says so."""

from __future__ import annotations

import pytest

import stagecrew
from support.journal import Recorder, recording_body
from support.sessions import LOCAL, Sessions


def test_a_topology_after_the_stop_of_its_session(sessions: Sessions, journal):
    """After spark.stop(), topology(), start() and a wrapped function raise an error of stagecrew's, and close() does not."""
    spark = sessions.get(LOCAL)
    crew = stagecrew.crew(spark)
    new = crew.topology("new", listeners=[Recorder(journal)])
    begun = crew.topology("begun", listeners=[Recorder(journal)]).start()
    ran = []
    wrapped = begun.wrap(lambda: ran.append(1))
    spark.sparkContext.parallelize(range(2), 2).mapPartitions(recording_body(journal)).collect()
    sessions.stop()
    with pytest.raises(stagecrew.StagecrewError):
        wrapped()
    with pytest.raises(stagecrew.StagecrewError):
        begun.wrap(lambda: ran.append(2))()
    with pytest.raises(stagecrew.StagecrewError):
        new.start()
    with pytest.raises(stagecrew.StagecrewError):
        crew.topology("another", listeners=[Recorder(journal)]).start()
    assert not ran
    begun.close()
    assert len(journal.read(event="open")) == len(journal.read(event="close")) > 0
