"""Run by `make dist` in an environment that has nothing but the package: does it do its work?"""

import importlib.util
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import keras
import numpy as np

import keras_gradguard
from keras_gradguard import GradientGuard
from keras_gradguard.errors import ZeroGradientError

assert "site-packages" in keras_gradguard.__file__, keras_gradguard.__file__
assert keras_gradguard.__version__ == metadata.version("keras-gradguard")

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, activation="relu")])
model.layers[0].bias.assign([-1e3])
model.compile("sgd", "mse")
x, y = np.ones((64, 4), "float32"), np.ones((64, 1), "float32")
cause = None
guard = GradientGuard("wheel-logs")
try:
    model.fit(x, y, batch_size=4, callbacks=[guard], verbose=0)
except ZeroGradientError as error:
    cause = error.finding.cause
assert cause == "dead_relu_output", cause
assert list(Path("wheel-logs/gradguard").glob("events.out.tfevents.*"))

# No extra is installed here: what needs one names it.
assert importlib.util.find_spec("matplotlib") is None
refused = ""
try:
    guard.plot()
except ImportError as error:
    refused = str(error)
assert "keras-gradguard[plot]" in refused, refused

command = Path(sys.executable).with_name("gradguard")
subprocess.run([command, "--version"], check=True)
subprocess.run([command, "show", "wheel-logs"], check=True)
print("The package works: version", keras_gradguard.__version__)
