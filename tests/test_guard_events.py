"""What a guarded run leaves on disk, read back with TensorBoard's own reader."""

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from keras_gradguard import GradientGuard, GradientGuardError, GradientGuardWarning
from tests.training import train


def adam():
    return keras.optimizers.Adam(0.01)


def read(directory):
    events = EventAccumulator(str(directory), size_guidance={"tensors": 0})
    events.Reload()
    tags = events.Tags()["tensors"]
    return {
        tag: {e.step: tensor_util.make_ndarray(e.tensor_proto) for e in events.Tensors(tag)}
        for tag in tags
    }


class TrueGradients(keras.callbacks.Callback):
    """An oracle that shares nothing with the tap: the gradients of an eager run, as they are."""

    def on_train_begin(self, logs=None):
        self.steps = []
        optimizer, original = self._model.optimizer, self._model.optimizer.apply

        def apply(grads, variables=None):
            self.steps.append([np.array(g) for g in grads])
            return original(grads, variables)

        vars(optimizer)["apply"] = apply


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One guarded eager run with its oracle, sampled on every step."""
    log_dir = tmp_path_factory.mktemp("logs")
    oracle = TrueGradients()
    guard = GradientGuard(log_dir=log_dir, sample_every=1, check_every=4)
    model, _ = train("mlp", adam, [oracle, guard], run_eagerly=True, epochs=2)
    names = ["/".join(v.path.split("/")[1:]) for v in model.trainable_variables]
    return read(log_dir / "gradguard"), oracle.steps, names, log_dir


def test_norms_are_those_of_the_true_gradients(run):
    events, steps, names, _ = run
    for column, name in enumerate(names):
        points = events[f"gradient_norm/{name}"]
        assert sorted(points) == list(range(len(steps)))
        for step, value in points.items():
            expected = np.linalg.norm(steps[step][column].astype(np.float64))
            assert value == pytest.approx(expected, rel=1e-5)


def test_zero_fractions_and_histogram_counts_are_exact(run):
    events, steps, names, _ = run
    for column, name in enumerate(names):
        for step, true in enumerate(steps):
            gradient = true[column]
            zeros = events[f"gradient_zero_fraction/{name}"][step]
            assert zeros == pytest.approx(np.mean(gradient == 0), abs=1e-6)
            table = events[f"gradient_log10/{name}"][step]
            assert table[:, 2].sum() == gradient.size
            sizes = np.log10(np.abs(gradient[gradient != 0]))
            assert table[-1, 1] >= sizes.max() - 1e-5
            assert np.isfinite(table).all()


def test_steps_are_the_optimizers_and_the_run_is_its_own(run):
    _, _, _, log_dir = run
    assert [p.name for p in log_dir.iterdir()] == ["gradguard"]


def test_graph_mode_writes_the_same_norms(run, tmp_path):
    eager = run[0]
    train("mlp", adam, [GradientGuard(log_dir=tmp_path, sample_every=1)], epochs=2)
    graph = read(tmp_path / "gradguard")
    norms = [[e[t] for t in sorted(e) if t.startswith("gradient_norm/")] for e in (graph, eager)]
    assert len(norms[0]) == 6
    for ours, theirs in zip(*norms, strict=True):  # the names of two models are numbered on
        assert sorted(ours) == sorted(theirs)
        for step in ours:
            assert ours[step] == pytest.approx(theirs[step], rel=1e-3, abs=1e-6)


def dead():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(3, activation="relu", name="hidden"),
            layers.Dense(
                1, activation="relu", name="out", bias_initializer=keras.initializers.Constant(-9.0)
            ),
        ]
    )
    model.compile(adam(), "mse")
    return model


X, Y = np.ones((64, 4), "float32"), np.ones((64, 1), "float32")


def test_the_incident_is_in_the_text_tab_and_beside_it(tmp_path):
    with pytest.raises(GradientGuardError) as caught:
        dead().fit(X, Y, batch_size=4, verbose=0, callbacks=[GradientGuard(log_dir=tmp_path)])
    lines = (tmp_path / "gradguard" / "incidents.jsonl").read_text("utf-8").splitlines()
    written = json.loads(lines[-1])
    finding = caught.value.finding
    assert written["message"] == finding.message
    assert written["cause"] == finding.cause == "dead_relu_output"
    texts = b"".join(
        np.ravel(v)[0] if np.ravel(v).size else b""
        for points in read(tmp_path / "gradguard").values()
        for v in points.values()
        if v.dtype == object
    )
    assert b"dead_relu_output" in texts


def test_a_second_fit_of_the_same_model_goes_on_in_the_same_run(tmp_path):
    guard = GradientGuard(log_dir=tmp_path, sample_every=2)
    model, _ = train("mlp", adam, [guard])
    model.fit(*_mlp_data(), batch_size=16, verbose=0, callbacks=[guard])
    assert [p.name for p in tmp_path.iterdir()] == ["gradguard"]
    tag = next(t for t in read(tmp_path / "gradguard") if t.startswith("gradient_norm/"))
    assert sorted(read(tmp_path / "gradguard")[tag]) == [0, 2, 4, 6, 8, 10]


def test_another_model_in_the_same_log_dir_gets_its_own_run(tmp_path):
    for _ in range(2):
        train("mlp", adam, [GradientGuard(log_dir=tmp_path)])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gradguard", "gradguard_1"]


def _mlp_data():
    from tests.training import data

    return data("mlp")


def test_beside_the_tensorboard_callback_both_are_complete(tmp_path):
    board = keras.callbacks.TensorBoard(tmp_path, histogram_freq=1, update_freq=1)
    train("mlp", adam, [board, GradientGuard(log_dir=tmp_path, sample_every=1)], epochs=2)
    assert {p.name for p in tmp_path.iterdir()} == {"train", "gradguard"}
    assert any(t.startswith("gradient_norm/") for t in read(tmp_path / "gradguard"))
    assert any("epoch_loss" in t for t in read(tmp_path / "train"))


KILLED = """
import os, sys
sys.path.insert(0, {root!r})
import keras
from keras_gradguard import GradientGuard
from tests.training import data, mlp
model = mlp()
model.compile("adam", "sparse_categorical_crossentropy")
x, y = data("mlp")
class Tell(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch, flush=True)
model.fit(x, y, batch_size=16, epochs=100_000, verbose=0,
          callbacks=[GradientGuard({log_dir!r}, sample_every=1), Tell()])
"""


@pytest.mark.shows("Faults", "kill -9: the log is whole up to the last flush", same=None)
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_after_kill_9_everything_up_to_the_last_flush_is_there(tmp_path):
    root = str(Path(__file__).parent.parent)
    code = textwrap.dedent(KILLED.format(root=root, log_dir=str(tmp_path)))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        for line in process.stdout:
            if line.startswith("epoch 5"):
                break
    finally:
        process.kill()
        process.wait()
    time.sleep(0.1)
    events = read(tmp_path / "gradguard")
    tag = next(t for t in events if t.startswith("gradient_norm/"))
    assert sorted(events[tag])[:12] == list(range(12))


@pytest.mark.shows("Faults", "a log directory that cannot be made", same=None)
def test_a_directory_that_cannot_be_written_warns_once_and_training_goes_on(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.warns(GradientGuardWarning) as caught:
        _, history = train("mlp", adam, [GradientGuard(log_dir=blocked / "logs")])
    assert len([w for w in caught if w.category is GradientGuardWarning]) == 1
    assert len(history["loss"]) == 3


def test_no_log_dir_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train("mlp", adam, [GradientGuard(log_dir=None)])
    assert list(tmp_path.iterdir()) == []


def test_the_step_of_a_restored_optimizer_goes_on(tmp_path):
    model, _ = train("mlp", adam)
    assert int(model.optimizer.iterations) == 9
    x, y = _mlp_data()
    model.fit(x, y, batch_size=16, verbose=0, callbacks=[GradientGuard(tmp_path, sample_every=1)])
    tag = next(t for t in read(tmp_path / "gradguard") if t.startswith("gradient_norm/"))
    assert sorted(read(tmp_path / "gradguard")[tag]) == [9, 10, 11]
    assert tf.executing_eagerly()


def test_a_picture_of_the_gradient_flow_comes_on_request(tmp_path):
    pictures = {}
    for images in (False, True):
        train("mlp", adam, [GradientGuard(tmp_path / str(images), images=images)], epochs=1)
        events = read(tmp_path / str(images) / "gradguard")
        pictures[images] = [
            v for points in events.values() for v in points.values()
            if v.dtype == object and any(b"\x89PNG" in item for item in np.ravel(v))
        ]  # fmt: skip
    assert not pictures[False]
    assert pictures[True]


def test_layer_outputs_are_written_when_asked_for(tmp_path):
    guard = GradientGuard(log_dir=tmp_path, sample_every=2, activations=True)
    model, _ = train("mlp", adam, [guard], epochs=2)
    found = read(tmp_path / "gradguard")
    names = [la.name for la in model.layers]
    for name in names:
        assert sorted(found[f"activation_log10/{name}"]) == [0, 2, 4]
        tables = found[f"activation_log10/{name}"]
        # The counts are those of the whole batch of that step: 16, 16 or the last 8 examples.
        units = model.get_layer(name).units
        assert [tables[s][:, 2].sum() / units for s in (0, 2, 4)] == [16, 8, 16]
        assert 0 <= found[f"activation_dead_fraction/{name}"][4] <= 1
    assert f"activation_saturated_fraction/{names[0]}" not in found  # a relu has no flat end
    assert f"activation_saturated_fraction/{names[1]}" in found
    train("mlp", adam, [GradientGuard(log_dir=tmp_path / "without", sample_every=2)])
    assert not any(tag.startswith("activation") for tag in read(tmp_path / "without/gradguard"))
