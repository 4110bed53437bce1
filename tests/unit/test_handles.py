"""State handles: each reference has a complete state, and a write that was not done leaves no state."""

from __future__ import annotations

import pytest

from handlesteps import model_world, quick_folder, sqlite_world
from handlesuite import *  # noqa: F403 (pytest collects its tests here)


@pytest.fixture(params=["model", "sqlite"])
def world(request):
    with quick_folder() as folder:
        if request.param == "model":
            yield model_world(folder)
            return
        with sqlite_world(f"{folder}/states") as sqlite:
            yield sqlite
