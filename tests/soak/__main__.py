"""``python -m tests.soak [seconds] [first seed]``: the figures of a long run."""

import sys

from tests.soak.test_soak import figures, soak


def say(config, outcome):
    if not outcome.clean:
        print("NOT CLEAN", config, outcome, flush=True)
    elif outcome.refused:
        print("refused by Keras:", config.seed, outcome.refused.splitlines()[0], flush=True)


if __name__ == "__main__":
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 1800.0
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    outcomes = soak(seconds, first=first, each=say)
    print(figures(outcomes), f"(seeds {first} to {first + len(outcomes) - 1})")
    sys.exit(not all(o.clean for o in outcomes))
