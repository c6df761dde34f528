"""``python -m benchmarks [--quick]``: run every benchmark of this folder, one after another."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

# Arguments that make a benchmark take a minute; a script that is not listed knows --quick.
QUICK = {
    "layers.py": ["--rounds", "3"],
    "xla_difference.py": [],
    "tensorboard_scale.py": ["--variables", "30", "--steps", "2000", "--runs", "1"],
}


def main() -> int:
    """Return the number of benchmarks that failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a minute each instead of the full run"
    )
    quick = parser.parse_args().quick
    failed = 0
    for script in sorted(HERE.glob("[!_]*.py")):
        arguments = QUICK.get(script.name, ["--quick"]) if quick else []
        print(f"\n=== {script.name} {' '.join(arguments)}", flush=True)
        done = subprocess.run(
            [sys.executable, str(script), *arguments], cwd=HERE.parent, check=False
        )
        failed += done.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
