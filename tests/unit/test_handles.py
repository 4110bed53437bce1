"""State handles: what refers to a state has it, whole, and what was not done leaves nothing."""

from __future__ import annotations

import pytest

from handlesteps import model_world, quick_folder, sqlite_world
from handlesuite import *  # noqa: F403 (its tests are collected here)


@pytest.fixture(params=["model", "sqlite"])
def world(request):
    with quick_folder() as folder:
        if request.param == "model":
            yield model_world(folder)
            return
        with sqlite_world(f"{folder}/states") as found:
            yield found
