"""``MultiWorkerMirroredStrategy``: two real processes that talk over loopback."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


def free_ports(n):
    sockets = [socket.socket() for _ in range(n)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def train(tmp_path, kind, guarded):
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(2)]}
    workers = []
    for index in range(2):
        config = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        environment = {
            **os.environ,
            "TF_CONFIG": json.dumps(config),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONPATH": str(_ROOT),
        }
        arguments = [kind, guarded, str(tmp_path / f"{guarded}{index}")]
        workers.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.everywhere.worker", *arguments],
                env=environment,
                cwd=_ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    results = []
    try:
        for worker in workers:
            out, err = worker.communicate(timeout=240)
            lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
            assert lines, err[-3000:]
            results.append(json.loads(lines[0].removeprefix("RESULT ")))
    finally:
        for worker in workers:
            worker.kill()
    return results


def shows(feature, **more):
    return pytest.mark.shows("Distribution", feature, **more)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            "healthy",
            marks=[shows("MultiWorkerMirroredStrategy, a custom loop"), pytest.mark.slow],
            id="healthy",
        ),
        pytest.param(
            "dead",
            marks=shows(
                "MultiWorkerMirroredStrategy: same alarm, same step, only the chief writes",
                same=None,
            ),
            id="dead",
        ),
    ],
)
def test_two_workers(tmp_path, kind):
    chief, other = train(tmp_path, kind, "guarded")
    assert chief["weights"] == other["weights"]
    assert (chief["error"], chief["step"]) == (other["error"], other["step"])
    assert other["files"] == []
    assert any("tfevents" in name for name in chief["files"])
    if kind == "dead":
        # Both stop at the same step, so that none waits for the other for ever.
        assert chief["error"] == "ZeroGradientError"
    else:
        assert chief["error"] is None
        assert chief["seen"] == other["seen"] == 24
        plain, _ = train(tmp_path, kind, "plain")
        assert plain["weights"] == chief["weights"]


@shows(
    "MultiWorkerMirroredStrategy, fit",
    refused="Keras: ValueError, Attempt to convert a value (PerReplica) with an unsupported type",
)
@pytest.mark.slow
@pytest.mark.parametrize("guarded", ["plain", "guarded"])
def test_fit_with_two_workers_is_refused_by_keras(tmp_path, guarded):
    for worker in train(tmp_path, "fit", guarded):
        assert "unsupported type" in worker["error"]
        assert "PerReplica" in worker["error"]
