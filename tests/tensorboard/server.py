"""A TensorBoard server in a process of its own, with the GradGuard tab, on a free port."""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import sys
import time
import types
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main(arguments: list[str]) -> None:
    """Run TensorBoard; the tab is added by hand where the package is not installed."""
    if arguments[0] == "--without-tensorflow":
        # The module by which TensorBoard is told to do without: starts in a second, not in ten.
        sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")
        arguments = arguments[1:]
    from tensorboard import default, program

    from keras_gradguard.tensorboard.plugin.loader import GradGuardLoader

    plugins = [*default.get_static_plugins(), *default.get_dynamic_plugins()]
    if not any(getattr(p, "__name__", "") == "GradGuardLoader" for p in plugins):
        plugins.append(GradGuardLoader)
    board = program.TensorBoard(plugins=plugins)
    board.configure(("tensorboard", *arguments))
    raise SystemExit(board.main())


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(
    log_dir: Path,
    *,
    fast: bool = False,
    prefix: str = "",
    poll: int = 1,
    tensorflow: bool = False,
) -> Iterator[str]:
    """Yield the address of a server that is ready to answer, with or without TensorFlow."""
    port = free_port()
    command = [
        sys.executable,
        "-c",
        "from tests.tensorboard import server; import sys; server.main(sys.argv[1:])",
        *([] if tensorflow else ["--without-tensorflow"]),
        "--logdir",
        log_dir.name,  # relative: TensorBoard shows it, and pictures go into the docs
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--reload_interval",
        str(poll),
        "--load_fast",
        "true" if fast else "false",
    ]
    if prefix:
        command += ["--path_prefix", prefix]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
    }
    log = log_dir.parent / f"server_{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=log_dir.parent, env=environment, stdout=output, stderr=output
        )
    address = f"http://127.0.0.1:{port}{prefix}"
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                urllib.request.urlopen(f"{address}/data/environment", timeout=5).read()
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"TensorBoard did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:  # a loader with gigabytes in hand
            process.kill()
            process.wait()
