"""As many random configurations as fit into a fixed time, guarded against plain."""

import gc
import os
import time

import keras

from tests.soak.configurations import draw
from tests.soak.running import run


def soak(seconds, *, first=0, each=None):
    """Run configurations from seed ``first`` on until the time is up; at least one."""
    outcomes, end, seed = [], time.monotonic() + seconds, first
    while not outcomes or time.monotonic() < end:
        config = draw(seed)
        outcome = run(config)
        outcomes.append(outcome)
        if each is not None:
            each(config, outcome)
        seed += 1
        keras.utils.clear_session()
        gc.collect()
    return outcomes


def figures(outcomes):
    """Return the one line that sums a run up; what Keras refuses is no configuration."""
    trained = [o for o in outcomes if not o.refused]
    return (
        f"{len(trained)} configurations, {sum(o.steps for o in outcomes)} guarded steps, "
        f"{sum(bool(o.difference) for o in outcomes)} differences, "
        f"{sum(bool(o.alarms) for o in outcomes)} false alarms, "
        f"{sum(bool(o.leftovers) for o in outcomes)} leftovers, "
        f"and {len(outcomes) - len(trained)} that Keras itself refuses, in the same words"
    )


def test_random_configurations():
    bad = []

    def note(config, outcome):
        if not outcome.clean:
            bad.append((config, outcome))

    outcomes = soak(float(os.environ.get("SOAK_SECONDS", "40")), each=note)
    print(figures(outcomes))
    assert not bad, bad
