"""State handles: each reference points to a complete state, and a write that did not happen leaves no state."""

from __future__ import annotations

import pytest

from support.handle_contract import *  # noqa: F403 (pytest collects its tests here)
from support.handle_faults import model_world, quick_folder, sqlite_world


@pytest.fixture(params=["model", "sqlite"])
def world(request):
    with quick_folder() as folder:
        if request.param == "model":
            yield model_world(folder)
            return
        with sqlite_world(f"{folder}/states") as sqlite:
            yield sqlite
