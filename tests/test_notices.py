"""What stands in the terminal: warnings at the user's line, whole progress bars, a last line."""

import io
import logging
import re
import sys
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_gradguard import GradientGuard, GradientGuardWarning, Policy
from keras_gradguard.findings import Finding
from keras_gradguard.notices import Console, summary, warn

X = np.random.default_rng(0).random((80, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
LAST = r"GradGuard: [\d ]+ steps? seen, \d+ findings?.*"


def model(bias=0.0):
    keras.utils.set_random_seed(0)
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "relu", name="out")])
    made.layers[0].bias.assign([bias])
    made.compile(keras.optimizers.SGD(0.01), "mse")
    return made


def mild(**settings):
    policy = Policy(zero_gradient="warn", bad_contract="ignore")
    return GradientGuard(log_dir=None, policy=policy, diagnose=False, **settings)


def found(symptom):
    return Finding(symptom=symptom, summary="It is.")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        pytest.param((4690, ()), "4 690 steps seen, 0 findings", id="the usual"),
        pytest.param((1, ()), "1 step seen, 0 findings", id="one step"),
        pytest.param((1234567, ()), "1 234 567 steps seen, 0 findings", id="millions"),
        pytest.param(
            (0, [found("vanishing")]), "0 steps seen, 1 finding (vanishing)", id="one finding"
        ),
        pytest.param(
            (9, [found("vanishing"), found("non_finite"), found("vanishing")]),
            "9 steps seen, 3 findings (vanishing x 2, non_finite)",
            id="several",
        ),
        pytest.param((9, (), 2), "9 steps seen, 0 findings, 2 steps skipped", id="skipped"),
    ],
)
def test_summary(arguments, text):
    assert summary(*arguments) == f"GradGuard: {text}"


@pytest.mark.parametrize(
    ("verbose", "lines"), [(0, 0), (1, 1), (2, 1), ("auto", 1)], ids=lambda v: str(v)
)
def test_fit_ends_with_one_line_unless_it_is_silent(verbose, lines, capsys):
    model().fit(X, Y, epochs=2, batch_size=10, verbose=verbose, callbacks=[mild()])
    out, err = capsys.readouterr()
    said = [line for line in out.splitlines() if "GradGuard" in line]
    assert said == ["GradGuard: 16 steps seen, 0 findings"] * lines
    assert err == ""
    assert not lines or out.splitlines()[-1] == said[0]


def test_keras_told_to_log_has_the_line_in_the_log(capsys, caplog):
    keras.config.disable_interactive_logging()
    try:
        with caplog.at_level(logging.INFO, "keras_gradguard"):
            model().fit(X, Y, batch_size=10, verbose=2, callbacks=[mild()])
    finally:
        keras.config.enable_interactive_logging()
    assert "GradGuard" not in capsys.readouterr().out
    assert "GradGuard: 8 steps seen, 0 findings" in caplog.messages


class Interrupt(keras.callbacks.Callback):
    """Ctrl-C in the middle of a training step."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 5:
            self._model.train_function._inner = self.pressed

    def pressed(self, iterator):
        raise KeyboardInterrupt


def test_ctrl_c_leaves_a_line_too(capsys):
    with pytest.raises(KeyboardInterrupt):
        model().fit(X, Y, batch_size=10, verbose=1, callbacks=[mild(), Interrupt()])
    assert capsys.readouterr().out.splitlines()[-1] == "GradGuard: 5 steps seen, 0 findings"


def test_an_error_of_the_guard_speaks_for_itself(capsys):
    guard = GradientGuard(log_dir=None, policy=Policy(bad_contract="ignore"), diagnose=False)
    with pytest.raises(RuntimeError, match="exactly zero"):
        model(-1e3).fit(X, Y, epochs=3, batch_size=10, verbose=1, callbacks=[guard])
    out = capsys.readouterr().out
    assert "GradGuard" not in out
    assert out.endswith("\n")  # the traceback does not begin behind the bar


def test_warnings_stand_on_lines_of_their_own_and_the_bar_goes_on(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)

    def shown(message, category, filename, lineno, file=None, line=None):
        screen.write(warnings.formatwarning(message, category, filename, lineno, line))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = shown
        model(-1e3).fit(X, Y, epochs=3, batch_size=10, verbose=1, callbacks=[mild(check_every=5)])
    text = screen.getvalue()
    where = text.index(f"{__file__}:")
    assert text[where - 1] == "\n"
    assert "exactly zero" in text[where:]
    assert text.count("Epoch ") == 3
    # A bar is begun anew after the warning and comes to its end.
    bars = re.findall(r"(\d+)/8\x1b", text[where:])
    assert bars[-1] == "8"
    assert re.fullmatch(LAST, text.splitlines()[-1])


def test_a_bar_that_was_not_drawn_needs_no_room(capsys):
    console = Console(1)
    console.make_room()
    assert capsys.readouterr().out == ""
    console.bar_drawn()
    console.make_room()
    console.make_room()
    assert capsys.readouterr().out == "\n"
    console.bar_drawn()
    console.bar_closed()
    console.say("done")
    assert capsys.readouterr().out == "done\n"


# ---------------------------------------------------------------- whose line


def here():
    return sys._getframe(1).f_lineno


def test_a_warning_names_the_call_of_fit():
    made, guard = model(-1e3), mild()
    with pytest.warns(GradientGuardWarning, match="exactly zero") as caught:
        line = here() + 1
        made.fit(X, Y, epochs=3, batch_size=10, verbose=0, callbacks=[guard])
    [one] = [w for w in caught if w.category is GradientGuardWarning]
    assert (one.filename, one.lineno) == (__file__, line)
    assert one.message.finding.symptom == "zero_gradient"


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_warning_names_the_line_of_the_loop(graph):
    import tensorflow as tf

    made, guard = model(-1e3), mild()
    optimizer, loss_fn = keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError()

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, made(x, training=True))
        grads = tape.gradient(loss, made.trainable_variables)
        optimizer.apply_gradients(zip(grads, made.trainable_variables, strict=True))
        return loss

    step = tf.function(step) if graph else step
    with pytest.warns(GradientGuardWarning, match="exactly zero") as caught:
        with guard.watch(made, optimizer):
            for _ in range(12):
                guard.step(step(X, Y))
    [one] = [w for w in caught if w.category is GradientGuardWarning]
    assert one.filename == __file__
    line = Path(__file__).read_text(encoding="utf-8").splitlines()[one.lineno - 1]
    assert ("guard.step(step(X, Y))" if graph else "apply_gradients") in line


def test_code_that_is_no_file_has_lines_too():
    with pytest.warns(GradientGuardWarning, match="so it is") as caught:
        exec("\n\nsay('so it is')", {"say": lambda text: warn(GradientGuardWarning(text))})
    # The lambda above stands in this file, so it is the innermost line of the user's.
    assert caught[0].filename == __file__
    program = "from keras_gradguard.notices import warn\n\nwarn(kind('so it is'))"
    with pytest.warns(GradientGuardWarning, match="so it is") as caught:
        exec(program, {"kind": GradientGuardWarning})
    assert (caught[0].filename, caught[0].lineno) == ("<string>", 3)


def test_warnings_are_filtered_by_their_class():
    with warnings.catch_warnings():  # every other warning is an error in these tests
        warnings.simplefilter("ignore", GradientGuardWarning)
        model(-1e3).fit(X, Y, epochs=3, batch_size=10, verbose=0, callbacks=[mild()])
    with warnings.catch_warnings():
        warnings.simplefilter("error", GradientGuardWarning)
        with pytest.raises(GradientGuardWarning, match="exactly zero"):
            model(-1e3).fit(X, Y, epochs=3, batch_size=10, verbose=0, callbacks=[mild()])
