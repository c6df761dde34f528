"""The command line, on scripts that know nothing of a guard."""

import json
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest

from keras_gradguard import cli
from keras_gradguard.findings import Finding

ROOT = Path(__file__).parent.parent
DATA = """
import numpy as np
rng = np.random.default_rng(0)
x = rng.normal(size=(320, 4)).astype("float32")
y = (x[:, :1] > 0).astype("float32")
"""
MODEL = """
import keras
keras.utils.set_random_seed(0)
def make(last="sigmoid", bias=0.0):
    model = keras.Sequential([
        keras.Input((4,)),
        keras.layers.Dense(8, activation="relu", name="hidden"),
        keras.layers.Dense(1, activation=last, name="answer"),
    ])
    model.layers[-1].bias.assign([bias])
    return model
"""
LOOP = """
import tensorflow as tf
optimizer = keras.optimizers.Adam(0.01)
loss_fn = keras.losses.MeanSquaredError()
def step(model, x, y):
    with tf.GradientTape() as tape:
        loss = loss_fn(y, model(x, training=True))
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    return loss
"""
BASE = DATA + MODEL

# name: (script, arguments, exit code, words on stdout, words on stderr)
SCRIPTS = {
    "healthy fit": (
        BASE + "m = make(); m.compile('adam', 'binary_crossentropy')\n"
        "m.fit(x, y, epochs=2, verbose=0); print('done')",
        [], 0, ["done"], [],
    ),
    "dead output in fit": (
        BASE + "m = make('relu', -100.0); m.compile('sgd', 'mse')\n"
        "m.fit(x, y, epochs=9, verbose=0); print('done')",
        [], 3, [], ["exactly zero", "answer", "script.py:", "m.fit(x, y, epochs=9"],
    ),
    "dead output in an eager loop": (
        BASE + LOOP + "m = make('relu', -100.0)\n"
        "for i in range(40): step(m, x, y)\nprint('done')",
        [], 3, [], ["exactly zero"],
    ),
    "dead output in a tf.function loop": (
        BASE + LOOP + "m = make('relu', -100.0); step = tf.function(step)\n"
        "for i in range(40): step(m, x, y)\nprint('done')",
        [], 3, [], ["exactly zero"],
    ),
    "healthy tf.function loop": (
        BASE + LOOP + "m = make(); step = tf.function(step)\n"
        "for i in range(40): step(m, x, y)\nprint('done')",
        [], 0, ["done"], [],
    ),
    "train_on_batch": (
        BASE + "m = make('relu', -100.0); m.compile('sgd', 'mse')\n"
        "for i in range(60): m.train_on_batch(x, y)\nprint('done')",
        [], 3, [], ["exactly zero"],
    ),
    "argparse and main": (
        BASE + """
import argparse
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int)
    parser.add_argument("name")
    options = parser.parse_args()
    m = make(); m.compile("adam", "binary_crossentropy")
    m.fit(x, y, epochs=options.epochs, verbose=0)
    print("trained", options.name, options.epochs, __file__)
if __name__ == "__main__":
    main()
""",
        ["--epochs", "2", "digits"], 0, ["trained digits 2", "script.py"], [],
    ),
    "sys.exit with a number": ("import sys; print('bye'); sys.exit(7)", [], 7, ["bye"], []),
    "sys.exit with text": ("import sys; sys.exit('no data here')", [], 1, [], ["no data here"]),
    "sys.exit after a fault": (
        BASE + "import sys\nm = make('relu', -100.0); m.compile('sgd', 'mse')\n"
        "m.fit(x, y, epochs=9, verbose=0); sys.exit(0)",
        [], 3, [], ["exactly zero"],
    ),
    "an error of the script": (
        "def f():\n    return {}['missing']\nf()",
        [], 1, [], ["Traceback", 'script.py", line 2', "KeyError: 'missing'"],
    ),
    "an error that the script swallows": (
        BASE + "m = make('relu', -100.0); m.compile('sgd', 'mse')\n"
        "try: m.fit(x, y, epochs=9, verbose=0)\nexcept Exception: print('went on')",
        [], 3, ["went on"], ["1 finding"],
    ),
    "environment set in the script": (
        "import os, sys\nassert 'tensorflow' not in sys.modules and 'keras' not in sys.modules\n"
        "os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'\n" + BASE
        + "m = make('relu', -100.0); m.compile('sgd', 'mse'); m.fit(x, y, epochs=9, verbose=0)",
        [], 3, [], ["exactly zero"],
    ),
    "processes that load data": (
        DATA + """
import multiprocessing
def load(i):
    return x[i * 32:(i + 1) * 32] * 2
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        parts = pool.map(load, range(10))
    import keras
    m = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, activation="sigmoid")])
    m.compile("adam", "binary_crossentropy")
    m.fit(np.concatenate(parts), y, verbose=0)
    print("loaded", len(parts))
""",
        [], 0, ["loaded 10"], [],
    ),
    "a PyDataset with worker processes": (
        BASE + """
class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 10
    def __getitem__(self, i):
        return x[i * 32:(i + 1) * 32], y[i * 32:(i + 1) * 32]
if __name__ == "__main__":
    m = make(); m.compile("adam", "binary_crossentropy")
    m.fit(Batches(workers=2, use_multiprocessing=True), epochs=2, verbose=2)
    print("done")
""",
        [], 0, ["done", "GradGuard: 20 steps seen, 0 findings"], [],
    ),
    "a script with a guard of its own": (
        BASE + "from keras_gradguard.guard import GradientGuard\n"
        "m = make('relu', -100.0); m.compile('sgd', 'mse')\n"
        "m.fit(x, y, epochs=9, verbose=0, callbacks=[GradientGuard(log_dir=None)])",
        [], 3, [], ["exactly zero"],
    ),
    "other functions before and beside the training": (
        BASE + LOOP + """
m = make()
@tf.function
def scale(a): return a / 2
@tf.function
def evaluate(a, b): return loss_fn(b, m(a))
for i in range(30): evaluate(scale(x), y)
step = tf.function(step)
for i in range(30): step(m, x, y); evaluate(x, y)
print("done")
""",
        [], 0, ["done"], [],
    ),
    "fit and then a loop": (
        BASE + LOOP + """
m = make(); m.compile(optimizer, loss_fn); m.fit(x, y, verbose=0)
step = tf.function(step)
for i in range(30): step(m, x, y)
m.fit(x, y, verbose=0)
print("done")
""",
        [], 0, ["done"], [],
    ),
    "mixed precision in a loop": (
        BASE + LOOP + """
m = make()
optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))
@tf.function
def step(model, x, y):
    with tf.GradientTape() as tape:
        loss = loss_fn(y, model(x, training=True))
        scaled = optimizer.scale_loss(loss)
    grads = tape.gradient(scaled, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    return loss
for i in range(30): step(m, x, y)
print("done", int(optimizer.inner_optimizer.iterations))
""",
        [], 0, ["done 30"], [],
    ),
    "two models and optimizers in turn": (
        BASE + LOOP + """
a, b = make(), make("relu", -100.0)
second = keras.optimizers.SGD(0.01)
@tf.function
def both():
    loss = step(a, x, y)
    with tf.GradientTape() as tape:
        other = loss_fn(y, b(x, training=True))
    second.apply_gradients(zip(tape.gradient(other, b.trainable_variables), b.trainable_variables))
    return loss + other
for i in range(40): both()
""",
        [], 3, [], ["exactly zero"],
    ),
}  # fmt: skip


# A process of its own imports TensorFlow anew, which takes longer than what it then does. These
# only call `fit` or `train_on_batch`: nothing of another test's that is still alive takes part.
IN_THIS_PROCESS = {
    "healthy fit", "train_on_batch", "argparse and main", "sys.exit after a fault",
    "an error that the script swallows", "a script with a guard of its own",
    "story 2: a frozen base and a batch of one", "text classification", "transfer learning",
}  # fmt: skip


def run(folder, script, arguments=(), options=(), start=None):
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script), encoding="utf-8")
    return (start or in_a_process)(folder, path, arguments, options)


@pytest.fixture
def starter(monkeypatch, capsys):
    """Return how to start the script of a name: in a process of its own, or in this one."""

    def here(folder, path, arguments=(), options=()):
        monkeypatch.chdir(folder)
        capsys.readouterr()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pytest makes errors of them
            code = cli.main(["run", *options, str(path), *arguments])
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(path, code, out, err)

    return lambda name: here if name in IN_THIS_PROCESS else in_a_process


def in_a_process(folder, path, arguments=(), options=()):
    return subprocess.run(
        [sys.executable, "-m", "keras_gradguard", "run", *options, str(path), *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        check=False,
        timeout=300,
    )


# The three stories as their authors wrote them, and the examples with their mistake switched on.
FAULTY = {
    "story 1: a double sigmoid, in a loop": (
        "tests/cases/case_001_double_sigmoid_autoencoder.py", "run(steps=40)",
        ["exactly zero", "saturated_activation", "recon"],
    ),
    "story 2: a frozen base and a batch of one": (
        "tests/cases/case_002_frozen_conv_base_adam_batch_one.py", "run(steps=60)",
        ["exactly zero", "dead_relu", "head"],
    ),
    "story 3: a length that became an integer": (
        "tests/cases/case_003_length_from_dense_tf_range.py", "run()",
        ["None", "non_differentiable_op", "count_up"],
    ),
    "text classification": (
        "examples/text_classification.py", "", ["softmax_over_one_unit", "model.fit(x[:512]"],
    ),
    "a GAN": ("examples/gan.py", "", ["g_hidden", "non_differentiable_op", "step(digits)"]),
    "transfer learning": (
        "examples/transfer_learning.py", "", ["trainable_flag", "model.fit(x[:700]"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTY)
def test_faulty_programs(name, tmp_path, starter):
    program, last, words = FAULTY[name]
    path = ROOT / program
    if last:
        text = path.read_text(encoding="utf-8")
        done = run(tmp_path, f"{text}\n\n{last}\n", start=starter(name))
    else:
        done = starter(name)(tmp_path, path, ["--faulty"])
    assert done.returncode == 3, done.stderr
    for word in words:
        assert word in done.stderr
    assert "1 finding" in done.stderr
    assert "\x1b" not in done.stderr  # plain when piped


# Each is a process that imports TensorFlow; what these show, a story or an example shows too.
AGAIN = (
    "dead output in an eager loop", "dead output in a tf.function loop", "healthy tf.function loop",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in AGAIN else ()) for n in SCRIPTS]
)
def test_run(name, tmp_path, starter):
    script, arguments, code, out, err = SCRIPTS[name]
    done = run(tmp_path, script, arguments, start=starter(name))
    assert done.returncode == code, done.stderr
    for words in out:
        assert words in done.stdout
    for words in err:
        assert words in done.stderr
    if code == 3 and "swallows" not in name:
        assert "done" not in done.stdout
    assert "Traceback" not in done.stderr or "Traceback" in err
    assert [p.name for p in tmp_path.iterdir() if p.name != "__pycache__"] == ["script.py"]


def test_run_options(tmp_path):
    script = BASE + (
        "m = make('relu', -100.0); m.compile('sgd', 'mse')\n"
        "m.fit(x, y, epochs=9, verbose=0); print('done')"
    )
    options = ["--warn-only", "--report", "out.json", "--log-dir", "logs"]
    done = run(tmp_path, script, options=options)
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout
    assert "exactly zero" in done.stderr
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert report["findings"][0]["symptom"] == "zero_gradient"
    assert list((tmp_path / "logs").rglob("events.out.tfevents.*"))
    assert list((tmp_path / "logs").rglob("incidents.jsonl"))


# ---------------------------------------------------------------- without a process


@pytest.fixture
def logs(tmp_path):
    for name, symptoms in {
        "first": ["non_finite"],
        "second": ["zero_gradient", "vanishing"],
    }.items():
        folder = tmp_path / name / "gradguard"
        folder.mkdir(parents=True)
        lines = [
            Finding(symptom=s, summary=f"It is {s}.", where=(f"{name}_{s}",)).to_json()
            for s in symptoms
        ]
        (folder / "incidents.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path


def test_show(logs, capsys):
    assert cli.main(["show", str(logs)]) == 0
    out = capsys.readouterr().out
    assert "1 incident\n" in out
    assert "2 incidents\n" in out
    for words in ("first_non_finite", "second_zero_gradient", "second_vanishing", "NaN or Inf"):
        assert words in out


def test_show_survives_half_a_line(logs, capsys):
    path = logs / "first" / "gradguard" / "incidents.jsonl"
    path.write_text(path.read_text(encoding="utf-8") + '{"symptom": "non_f', encoding="utf-8")
    assert cli.main(["show", str(logs)]) == 0
    out = capsys.readouterr().out
    assert "first_non_finite" in out
    assert "1 damaged entries were left out" in out


def test_show_as_json(logs, capsys):
    assert cli.main(["show", "--json", str(logs)]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [[i["symptom"] for i in run["incidents"]] for run in runs] == [
        ["non_finite"],
        ["zero_gradient", "vanishing"],
    ]


def test_show_of_nothing(tmp_path, capsys):
    assert cli.main(["show", str(tmp_path)]) == 0
    assert "No guarded run found here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["show", "nowhere"], "no directory 'nowhere'", id="show"),
        pytest.param(["run", "nowhere.py"], "no file 'nowhere.py'", id="run"),
        pytest.param(["diagnose", "no.keras", "no.npz"], "no file 'no.keras'", id="diagnose"),
    ],
)
def test_what_is_not_there(arguments, words, capsys):
    assert cli.main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([], id="nothing"),
        pytest.param(["fly"], id="unknown command"),
        pytest.param(["run", "--check-every", "0", "x.py"], id="number too small"),
    ],
)
def test_a_wrong_call_ends_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "usage: gradguard" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "show", "diagnose"])
def test_help_shows_an_example(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert f"  gradguard {command} " in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.filterwarnings("ignore:A total of:UserWarning")
@pytest.mark.filterwarnings("ignore:Skipping variable loading:UserWarning")
@pytest.mark.parametrize(
    ("last", "code", "words"),
    [
        pytest.param("softmax", 3, "softmax_over_one_unit", id="faulty"),
        pytest.param("sigmoid", 0, "Nothing found", id="healthy"),
    ],
)
def test_diagnose(last, code, words, tmp_path, capsys):
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, activation=last)])
    # Not binary_crossentropy: Keras takes the logits behind a softmax there, and it trains.
    model.compile("adam", "mse")
    model.save(tmp_path / "model.keras")
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    np.savez(tmp_path / "data.npz", x=x, y=(x[:, :1] > 0).astype("float32"))
    report = tmp_path / "report.json"
    arguments = [str(tmp_path / "model.keras"), str(tmp_path / "data.npz")]
    assert cli.main(["diagnose", *arguments, "--report", str(report)]) == code
    assert words in capsys.readouterr().out
    assert json.loads(report.read_text(encoding="utf-8"))["ok"] is (code == 0)


def test_diagnose_says_what_the_file_holds(tmp_path, capsys):
    (tmp_path / "model.keras").write_bytes(b"")
    np.savez(tmp_path / "data.npz", images=np.zeros(3))
    arguments = [str(tmp_path / "model.keras"), str(tmp_path / "data.npz")]
    assert cli.main(["diagnose", *arguments]) == 2
    assert "It holds: images" in capsys.readouterr().err


def test_nothing_stays_hooked(tmp_path):
    import keras
    from tensorflow.python.eager.polymorphic_function import polymorphic_function

    from keras_gradguard.unmodified import Guards, run_script

    base = next(c for c in keras.optimizers.Optimizer.__mro__ if "apply" in vars(c))
    places = [
        (keras.Model, "fit"), (keras.Model, "train_on_batch"), (base, "apply"), (base, "__init__"),
        (keras.optimizers.LossScaleOptimizer, "apply"),
        (polymorphic_function.Function, "__call__"),
    ]  # fmt: skip
    before = [getattr(owner, name) for owner, name in places]
    own = "fit" in vars(keras.Model)
    argv, path, main = sys.argv, list(sys.path), sys.modules["__main__"]
    (tmp_path / "script.py").write_text("import keras\nraise ValueError('x')", encoding="utf-8")
    with pytest.raises(ValueError, match="x"):
        run_script(tmp_path / "script.py", ["a"], Guards(log_dir=None))
    assert [getattr(owner, name) for owner, name in places] == before
    assert ("fit" in vars(keras.Model)) == own
    assert (sys.argv, sys.path, sys.modules["__main__"]) == (argv, path, main)
