"""``python -m tests.soak [seconds] [first seed]``: the figures of a long run."""

import sys

from tests.soak.test_soak import figures, soak

if __name__ == "__main__":
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 1800.0
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    outcomes = soak(seconds, first=first, each=lambda c, o: o.clean or print(c, o, flush=True))
    print(figures(outcomes))
    sys.exit(not all(o.clean for o in outcomes))
