"""``python -m keras_gradguard``: the same as the command ``gradguard``."""

import sys

from keras_gradguard.cli import main

sys.exit(main())
