"""``python -m benchmarks``: run everything and write ``docs/benchmarks.md``.

python -m benchmarks            # all, about 20 minutes on a quiet machine with two cores
python -m benchmarks --quick    # three lines of JSON, under 3 minutes
python -m benchmarks --rounds 1 # to see that everything runs
python -m benchmarks --only fit_overhead.py  # one script's part of it, the rest kept
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import _report  # noqa: E402 (scripts of this folder import each other by name)

FIRST = ("mlp", "conv", "transformer")
OTHERS = ("wide_mlp", "embedding", "lstm")
PAIR = ("--contestants", "plain", "guard")
SAMPLED = (*PAIR, "guard, sample_every=1")


def plan(rounds: int) -> list[tuple[str, ...]]:
    """Return the commands; every line of JSON they print is a result."""
    many, few = ("--rounds", str(rounds)), ("--rounds", str(min(rounds, 3)))
    return [
        ("fit_overhead.py", *many, "--workloads", *FIRST),
        ("fit_overhead.py", *many, *SAMPLED, "--workloads", *OTHERS),
        ("fit_overhead.py", *many, *PAIR, "--workloads", "deep"),
        ("fit_overhead.py", *many, *SAMPLED, "--mode", "xla", "--workloads", *FIRST, *OTHERS),
        ("fit_overhead.py", *many, *PAIR, "--mode", "mirrored", "--workloads", *FIRST),
        ("fit_overhead.py", *many, "--mode", "loop", "--workloads", *FIRST),
        ("whole_process.py", "--workloads", "mlp", "conv"),
        ("whole_process.py", *SAMPLED, "--workloads", "wide_mlp"),
        ("first_step.py", *few, "--workloads", "mlp"),
        ("first_step.py", "--rounds", "1", "--workloads", "deep"),
        ("pieces.py", "--rounds", str(rounds)),
        ("scaling.py", *many),
        ("xla_difference.py",),
        ("layers.py", *many),
        ("tensorboard_scale.py", "--variables", "30", "--steps", "2000", "--runs", "1"),
    ]


def run(command: tuple[str, ...]) -> tuple[list[dict[str, Any]], list[str], bool]:
    """Run one script; return its lines of JSON, its other lines, and whether it went well."""
    print(f"\n=== {' '.join(command)}", flush=True)
    began = time.monotonic()
    rows, text = [], []
    with subprocess.Popen(
        [sys.executable, str(HERE / command[0]), *command[1:]],
        cwd=HERE.parent,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if line.startswith("{"):
                rows.append({"command": shlex.join(command), **json.loads(line)})
            else:
                text.append(line.rstrip())
    print(f"({time.monotonic() - began:.0f} s)", flush=True)
    return rows, text, process.returncode == 0


def main() -> int:
    """Return the number of scripts that failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="the guard on three workloads only")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", help="run one script only, and keep the results of the others")
    options = parser.parse_args()
    if options.quick:
        return subprocess.run(
            [sys.executable, str(HERE / "fit_overhead.py"), "--quick"], check=False
        ).returncode
    commands = [c for c in plan(options.rounds) if options.only in (None, c[0])]
    results = _report.load() if options.only else _report.Results()
    failed = 0
    for command in commands:
        rows, text, well = run(command)
        results.replace(shlex.join(command), rows, text)
        failed += not well
        _report.write(results)
    return failed


if __name__ == "__main__":
    sys.exit(main())
