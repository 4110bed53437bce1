"""A short form of `make soak`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parent.parent / "soak.py"


@pytest.mark.long
def test_a_long_session_does_not_grow(tmp_path):
    """After 400 uses of operators and 60 topologies, threads, files and memory of all processes have not grown."""
    command = [sys.executable, str(SOAK), "--uses", "400", "--topologies", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])["grew"] == []
