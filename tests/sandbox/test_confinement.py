"""What a confined process may do, tried in one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_TRIES = """
import sys, threading
from pathlib import Path
from conformance import environment
from conformance.sandbox import confinement

environment.NVIDIA_DRIVER = sys.argv[1]
print(confinement.confine_process([Path(sys.argv[2])]))
for place in ("/proc/self/task", "/proc/self"):
    name = Path(place, str(threading.get_native_id()) if place.endswith("task") else "", "comm")
    try:
        name.write_text("named")
        print("named")
    except PermissionError:
        print("refused")
try:
    Path(sys.argv[1] + ".made").write_text("")
    print("made")
except PermissionError:
    print("refused")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Landlock is Linux's")
@pytest.mark.parametrize("nvidia", [False, True])
def test_threads_are_written_about_where_an_nvidia_driver_does(nvidia: bool, tmp_path: Path) -> None:
    """Without it no GPU comes up: the driver ends with `CUDA_ERROR_OPERATING_SYSTEM`."""
    driver, scratch = tmp_path / "driver", tmp_path / "scratch"
    scratch.mkdir()
    if nvidia:
        driver.touch()
    done = subprocess.run(
        [sys.executable, "-c", _TRIES, str(driver), str(scratch)], capture_output=True, text=True, check=True
    )
    confined, *tried = done.stdout.splitlines()
    if not confined.startswith("confined"):
        pytest.skip(confined)
    assert tried == ["named" if nvidia else "refused", "refused", "refused"]
