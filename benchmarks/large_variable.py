"""Peak memory of training one variable of 1e8 elements, with the guard and without it.

python -m benchmarks.large_variable [elements]
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys


def train(elements: int, guarded: bool) -> None:
    """Take five steps and print the peak of this process."""
    import keras
    import numpy as np

    from keras_gradguard import GradientGuard

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(elements // 4, use_bias=False)])
    model.compile("sgd", lambda y, p: keras.ops.mean(keras.ops.square(p), axis=-1))
    x = np.ones((5, 4), "float32")
    callbacks = [GradientGuard(log_dir=None)] if guarded else []
    model.fit(x, np.ones((5, 1), "float32"), batch_size=1, verbose=0, callbacks=callbacks)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"elements": elements, "guarded": guarded, "peak_gb": round(peak / 1e9, 2)}))


def main() -> None:
    elements = int(float(sys.argv[1])) if len(sys.argv) > 1 else 100_000_000
    if len(sys.argv) > 2:
        train(elements, sys.argv[2] == "guarded")
        return
    for kind in ("plain", "guarded"):
        command = [sys.executable, "-m", "benchmarks.large_variable", str(elements), kind]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
