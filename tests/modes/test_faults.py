"""What goes wrong beside the training: disks, clocks, signals, threads, names."""

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_gradguard.errors import GradientGuardWarning
from keras_gradguard.tensorboard import events
from tests.modes.twice import (
    assert_nothing_left,
    compiled,
    data,
    fitted,
    guard,
    row,
    shows,
)
from tests.training import assert_same


@contextlib.contextmanager
def small_disk(directory, size="128k"):
    """A real file system of a fixed size."""
    directory.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", directory],
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)  # even with a file open


def fill(directory):
    with contextlib.suppress(OSError), (directory / "other").open("wb") as file:
        for _ in range(64):
            file.write(bytes(4096))
            file.flush()


def read_only(directory):
    subprocess.run(["mount", "-o", "remount,ro", directory], check=True)


class At(keras.callbacks.Callback):
    """Does something before a step."""

    def __init__(self, step, action):
        super().__init__()
        self._step, self._action = step, action

    def on_train_batch_begin(self, batch, logs=None):
        if int(self.model.optimizer.iterations.numpy()) == self._step:
            self._action()


def train(callbacks, **kwargs):
    model = compiled()
    x, y = data(160)
    return model, fitted(model, callbacks, x=x, y=y, shuffle=False, **kwargs)


def told_once(callbacks, **kwargs):
    """Train, and return what was warned of, which has to be one thing about the log."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = train(callbacks, **kwargs)
    told = [str(w.message) for w in caught if w.category is GradientGuardWarning]
    assert len(told) == 1
    assert "training goes on" in told[0]
    return result, told[0]


TROUBLES = [
    row("Faults", "the disk fills up", 6, fill, "No space", id="full"),
    # Linux makes no disk read-only that has a file open for writing.
    row("Faults", "the disk becomes read-only", 0, read_only, "Read-only", id="read_only"),
]


@pytest.mark.parametrize(("step", "trouble", "words"), TROUBLES)
def test_a_disk_in_trouble_costs_the_log_and_nothing_else(tmp_path, step, trouble, words):
    plain = train([])
    disk = tmp_path / "disk"
    with small_disk(disk):
        seen = guard(log_dir=str(disk))
        result, told = told_once([seen, At(step, lambda: trouble(disk))])
    assert words in told
    assert_same(plain, result)
    assert seen.steps_seen == 20
    assert_nothing_left(plain[0], result[0])


@shows("Faults", "the log directory is deleted while training")
def test_a_directory_that_is_deleted(tmp_path):
    logs = tmp_path / "logs"
    seen = guard(log_dir=str(logs))
    result, _ = told_once([At(12, lambda: shutil.rmtree(logs)), seen])
    assert_same(train([]), result)
    assert seen.steps_seen == 20
    assert not logs.exists()


@shows("Faults", "an error inside the guard's own writer")
def test_a_fault_of_the_writer_itself(tmp_path, monkeypatch, caplog):
    def broken(*args):
        raise RuntimeError("the writer is broken")

    monkeypatch.setattr(events.EventWriter, "_write_sample", broken)
    seen = guard(log_dir=str(tmp_path))
    result, told = told_once([seen])
    assert "RuntimeError: the writer is broken" in told
    assert "please report" in told
    assert "in broken" in caplog.text  # the traceback
    assert_same(train([]), result)
    assert seen.steps_seen == 20


@shows("Faults", "the clock goes back", same=None)
def test_a_clock_that_goes_back(tmp_path, monkeypatch):
    clock = [2e9]
    monkeypatch.setattr(events.time, "time", lambda: clock[0])
    model, seen = compiled(), guard(log_dir=str(tmp_path))
    fitted(model, [seen])
    clock[0] -= 7200
    fitted(model, [seen])
    from tests.tensorboard import runs

    assert len(list(tmp_path.iterdir())) == 1
    steps = [s for s, t, _, _ in runs.values(tmp_path / "gradguard") if t == "loss"]
    assert steps == sorted(steps)
    assert steps[-1] == 11
    times = [e.wall_time for e in runs.events(tmp_path / "gradguard")]
    assert times == sorted(times)


@shows("Faults", "Ctrl-C in the middle of a batch", same=None)
@pytest.mark.skipif(os.name == "nt", reason="signals are sent in another way there")
def test_a_real_interrupt_between_two_batches():
    x, y = data()

    def stream():
        sent_at = None
        for _ in range(1000):
            # Batches are fetched ahead: wait until some were trained on. Python drops an interrupt
            # that reaches it in a destructor; if training goes on, press the keys again.
            now = seen.steps_seen
            if now and (sent_at is None or now > sent_at + 50):
                sent_at = now
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)
            yield x[:8], y[:8]

    plain, model, seen = compiled(), compiled(), guard()
    fitted(plain)
    with pytest.raises(KeyboardInterrupt):
        fitted(model, [seen], x=stream())
    fitted(model)  # the next fit is a plain one
    assert_nothing_left(plain, model)
    assert 0 < seen.steps_seen < 1000


class BoomError(Exception):
    """Raised by the user's own function."""


@shows("Faults", "an error in the user's on_finding", same=None)
def test_an_error_in_on_finding():
    def boom(finding):
        raise BoomError(finding.symptom)

    plain, model = compiled(), compiled()
    x, y = data()
    x[:] = np.nan
    fitted(plain, x=x, y=y)
    with pytest.raises(BoomError, match="non_finite"):
        fitted(model, [guard(on_finding=boom)], x=x, y=y)
    assert_nothing_left(plain, model)


@shows("Faults", "two guards on one model")
def test_two_guards_write_to_two_directories(tmp_path):
    both = [guard(log_dir=str(tmp_path)), guard(log_dir=str(tmp_path))]
    assert_same(train([]), train(both))
    assert [g.steps_seen for g in both] == [20, 20]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gradguard", "gradguard_1"]


def meeting(first, second):
    """Fit two models in two threads at the same time, and return their errors."""
    inside, done = threading.Event(), threading.Event()
    errors = {}

    def waits():
        inside.set()
        assert done.wait(60)

    def run(name, callbacks):
        try:
            model = compiled()
            fitted(model, callbacks)
        except Exception as error:
            errors[name] = error
        finally:
            if name == "second":
                done.set()

    one = threading.Thread(target=run, args=("first", [*first, At(2, waits)]))
    one.start()
    assert inside.wait(60)
    two = threading.Thread(target=run, args=("second", second))
    two.start()
    for thread in (one, two):
        thread.join(120)
    return errors


@shows("Faults", "one guard on two models in two threads", refused="RuntimeError: one guard each")
def test_the_same_guard_in_two_threads_is_refused():
    shared = guard()
    errors = meeting([shared], [shared])
    assert set(errors) == {"second"}
    assert isinstance(errors["second"], RuntimeError)
    assert "guard of its own" in str(errors["second"])
    assert shared.steps_seen == 6
    # Afterwards it is free again, in any thread.
    model = compiled()
    fitted(model, [shared])
    assert shared.steps_seen == 6


@shows("Faults", "two guards on two models in two threads", same=None)
def test_a_guard_each_in_two_threads():
    first, second = guard(), guard()
    assert meeting([first], [second]) == {}
    assert (first.steps_seen, second.steps_seen) == (6, 6)
    assert first.findings == second.findings == ()


def test_a_fit_left_by_an_exception_in_a_thread_does_not_block_the_guard():
    shared = guard()

    def boom():
        raise BoomError

    def run():
        with contextlib.suppress(BoomError):
            fitted(compiled(), [shared, At(2, boom)])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(120)
    model = compiled()
    fitted(model, [shared])
    assert shared.steps_seen == 6


NAMES = [
    "../out",
    "a/../b",
    "a/b",
    "a//b",
    "é ü 漢字",
    "🙂",
    "x" * 300,
    "..",
    "con",
    "a\\b",
    "tab\t",
]


@shows("Faults", "names with slashes, dots, any unicode, of any length", same=None)
def test_names_of_variables_stay_inside_the_log_directory(tmp_path):
    logs = tmp_path / "logs"
    seen = guard(log_dir=str(logs), sample_every=1)
    variables = [tf.Variable(tf.ones([2]), name=n) for n in NAMES]
    # The same path twice, and one that looks like the mark of a double.
    variables += [tf.Variable(tf.ones([2]), name=n) for n in ("a/b", "a/b#1")]
    for step in range(3):
        grads = [tf.ones([2]) * (step + 1) for _ in variables]
        seen.check(grads, variables, loss=1.0)
        seen.step()
    seen._loop.observer.judge()
    seen._loop.observer.close()
    assert [p.name for p in tmp_path.iterdir()] == ["logs"]
    assert [p.name for p in logs.iterdir()] == ["gradguard"]
    from tests.tensorboard import runs

    found = {t for _, t, _, _ in runs.values(logs / "gradguard") if t.startswith("gradient_norm/")}
    assert len(found) == len(variables)
    assert all(t.isprintable() for t in found)
