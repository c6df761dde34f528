"""Trains small models under the guard and takes the pictures of ``docs/images``.

    python docs/build_screenshots.py [--logs DIR]

Needs scikit-learn (for its handwritten digits), selenium, chromium and chromedriver.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
LATE_RATE = 0.8  # kills the ReLUs of the second convolution, at once
sys.path.insert(0, str(ROOT))


def train(log_dir: Path, *, rate: float, late_rate: float | None, epochs: int = 12) -> None:
    """A digit classifier; from the fifth epoch on with ``late_rate``."""
    import keras
    from sklearn.datasets import load_digits

    from keras_gradguard import GradientGuard, Policy

    keras.utils.set_random_seed(7)
    images, labels = load_digits(return_X_y=True)
    relu = {"activation": "relu", "kernel_initializer": "he_normal"}
    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, name="conv", **relu),
            keras.layers.Conv2D(32, 3, name="conv_wide", **relu),
            keras.layers.Flatten(),
            keras.layers.Dense(64, name="hidden", **relu),
            keras.layers.Dense(32, name="hidden_small", **relu),
            keras.layers.Dense(10, name="digits"),
        ]
    )
    model.compile(
        keras.optimizers.SGD(rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    policy = Policy(zero_gradient="warn", exploding="warn", non_finite="stop")
    callbacks: list[Any] = [GradientGuard(log_dir=log_dir, policy=policy, sample_every=10)]
    if late_rate is not None:

        def schedule(epoch: int, current: float) -> float:
            return late_rate if epoch >= 4 else current

        callbacks.append(keras.callbacks.LearningRateScheduler(schedule))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(
            images.reshape(-1, 8, 8, 1) / 16.0,
            labels,
            batch_size=64,
            epochs=epochs,
            verbose=0,
            callbacks=callbacks,
        )


def tab(driver: Any, address: str, name: str) -> None:
    """A tab of TensorBoard's own, once it has drawn."""
    driver.get("about:blank")
    driver.get(f"{address}/?darkMode=false#{name}")
    time.sleep(8)
    driver.save_screenshot(str(IMAGES / f"tensorboard-{name.replace('_', '-')}.png"))


def press(driver: Any, text: str) -> None:
    """Click the button with this text."""
    script = "[...document.querySelectorAll('button')].find(b => b.textContent === arguments[0])"
    driver.execute_script(f"{script}.click()", text)
    time.sleep(1)


def main() -> None:
    """Train, serve, photograph."""
    from tests.tensorboard import browser, server

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logs", type=Path, help="use these runs, do not train")
    options = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        logs = options.logs or Path(directory) / "logs"
        if options.logs is None or not logs.exists():
            train(logs / "faulty", rate=0.05, late_rate=LATE_RATE)
            train(logs / "cured", rate=0.05, late_rate=None)
        with server.serving(logs) as address, browser.browsing(width=1400, height=1130) as driver:
            time.sleep(3)
            browser.open_plugin(driver, address, "faulty/gradguard")
            time.sleep(1)
            driver.save_screenshot(str(IMAGES / "gradguard-tab.png"))
            browser.choose(driver, "Compare with", "cured/gradguard")
            press(driver, "◐")
            driver.save_screenshot(str(IMAGES / "gradguard-compare-dark.png"))
            for name in ("histograms", "distributions", "custom_scalars", "scalars", "text"):
                tab(driver, address, name)


if __name__ == "__main__":
    main()
