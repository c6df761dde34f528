"""The page of what is supported says what the tests show, no more and no less."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_page_is_up_to_date():
    # In a process of its own: collecting the distributed tests splits the CPU in two.
    checked = subprocess.run(
        [sys.executable, "docs/build_support.py", "--check"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
