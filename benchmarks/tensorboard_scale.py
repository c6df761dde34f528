"""How the GradGuard tab scales: file size, time to the first picture, memory, answer sizes.

    python benchmarks/tensorboard_scale.py --variables 300 --steps 100000 --runs 1 3

Writes the runs with the package's own writer, serves them with TensorBoard (Python and Rust
loader), waits until the server has read them, and times the requests of the page.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from keras_gradguard import statistics
from keras_gradguard.records import Row, Sample
from keras_gradguard.tensorboard.events import EventWriter
from tests.tensorboard import runs, server


def write(log_dir: Path, variables: int, steps: int, every: int) -> tuple[int, float]:
    """Write one run; return its size in bytes and the seconds it took."""
    rng = np.random.default_rng(0)
    table = runs.table(*[f"block_{i // 4}/weight_{i % 4}" for i in range(variables)], size=512)
    scale = 10.0 ** rng.uniform(-4, 0, variables)
    counts = np.stack(
        [statistics.exponent_counts(s * rng.standard_normal(512)) for s in scale]
    ).astype(np.int32)
    ones = np.ones(variables, np.float32)
    writer = EventWriter(log_dir)
    began = time.perf_counter()
    for start in range(0, steps, 10):
        noise = np.exp(0.3 * rng.standard_normal((10, variables)))
        norms = (scale * noise).astype(np.float32)
        rows = [Row(step=start + i, norm=n, loss=1.0) for i, n in enumerate(norms)]
        writer.write_rows(table, rows)
        if start % every == 0:
            sample = Sample(step=start, histogram=counts, max_abs=ones, update=ones, weight=ones)
            writer.write_sample(table, sample)
    writer.close()
    took = time.perf_counter() - began
    return sum(p.stat().st_size for p in log_dir.rglob("*") if p.is_file()), took


def ask(address: str, route: str, **query: object) -> tuple[bytes, float]:
    """Return the answer's bytes (as sent, compressed) and the seconds it took."""
    url = f"{address}/data/plugin/{route}?{urllib.parse.urlencode(query)}"
    request = urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})
    began = time.perf_counter()
    body = urllib.request.urlopen(request, timeout=600).read()
    return body, time.perf_counter() - began


def memory(mark: str) -> int:
    """Resident memory in MB of the server for ``mark`` and of its data server."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "cmdline").read_bytes():
                lines = (process / "status").read_text().splitlines()
                total += sum(int(x.split()[1]) for x in lines if x.startswith("VmRSS"))
        except OSError:
            continue
    return total // 1024


def wait_until_read(address: str, names: list[str], steps: int) -> float:
    """Wait until the server has read all runs to their end; return the seconds."""
    began = time.perf_counter()
    for name in names:
        while True:
            try:
                body, _ = ask(address, "scalars/scalars", run=name, tag="loss")
                points = json.loads(gzip.decompress(body) if body[:1] == b"\x1f" else body)
                if points[-1][1] >= steps - 10:
                    break
            except OSError:
                pass
            time.sleep(0.5)
    return time.perf_counter() - began


def picture(address: str, run: str) -> tuple[float, int]:
    """All that the page asks for before it shows its first picture: seconds, bytes."""
    seconds, size = 0.0, 0
    for route, query in (
        ("runs", {}),
        ("table", {"run": run}),
        ("incidents", {"run": run}),
        ("matrix", {"run": run, "width": 900}),
    ):
        body, took = ask(address, f"gradguard/{route}", **query)
        seconds += took
        size += len(body)
    return seconds, size


def main() -> None:
    """Write, serve, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variables", type=int, default=300)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--sample-every", type=int, default=50)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--loader", choices=["python", "rust", "both"], default="both")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        logs = Path(directory) / "logs"
        size, took = write(logs / "0", options.variables, options.steps, options.sample_every)
        per_cell = size / options.variables / options.steps
        print(
            f"file: {size / 1e6:.0f} MB, {per_cell:.1f} bytes a variable and step; "
            f"writing took {1e6 * took / options.steps:.0f} us a step"
        )
        names = ["0/gradguard"]
        for number in range(1, options.runs):
            (logs / str(number)).symlink_to(logs / "0", target_is_directory=True)
        names = [f"{number}/gradguard" for number in range(options.runs)]
        for loader in ("python", "rust"):
            if options.loader not in (loader, "both"):
                continue
            with server.serving(logs, fast=loader == "rust", poll=600, tensorflow=True) as address:
                took = wait_until_read(address, names, options.steps)
                before = memory(str(logs))
                print(f"{loader}: read in {took:.0f} s, memory {before} MB")
                for name in names:
                    first, sent = picture(address, name)
                    again, _ = picture(address, name)
                    piece = {"from": options.steps // 2, "to": options.steps // 2 + 1000}
                    _, zoom = ask(address, "gradguard/matrix", run=name, width=900, **piece)
                    body, cell = ask(address, "gradguard/cell", run=name, variable=7, step=60_000)
                    print(
                        f"{loader}: {name}: first picture {first:.2f} s ({sent / 1e3:.0f} kB), "
                        f"again {again:.2f} s, zoomed {zoom:.2f} s, "
                        f"cell {cell:.2f} s ({len(body) / 1e3:.0f} kB)"
                    )
                after = memory(str(logs))
                print(f"{loader}: memory {after} MB ({after - before:+} MB)")


if __name__ == "__main__":
    main()
