"""What docs/howto/forwarding.md uses of MLflow."""

import contextlib
import json

calls = []


@contextlib.contextmanager
def start_run(run_id=None):
    calls.append(("start_run", run_id))
    yield
    calls.append(("end_run", "FINISHED"))


def log_dict(dictionary, artifact_file, run_id=None):
    json.dumps(dictionary, allow_nan=False)
    assert artifact_file.endswith(".json")
    calls.append(("log_dict", artifact_file, dictionary))


def set_tag(key, value, synchronous=None):
    assert isinstance(key, str)
    calls.append(("set_tag", key, value))


def log_metric(key, value, step=None):
    calls.append(("log_metric", key, float(value)))
