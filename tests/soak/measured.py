"""What the last long runs of the soak and of the matrix printed, for docs/support.md."""

FIGURES = (
    "The last runs, on two busy cores from SEED=1000, 2000 and 4000: 161 configurations, 1792 "
    "guarded\nsteps, 0 differences, 0 false alarms, 0 leftovers, and 22 more that Keras itself "
    "refuses, in the\nsame words. A configuration that fails is printed with its seed."
)

# set, Python, TensorFlow, Keras, NumPy, TensorBoard, tests, passed, failed, skipped
VERSIONS = (
    ("py3.11-oldest", "3.11.7", "2.16.1", "3.7.0", "1.26.4", "2.16.2", "core", 1005, 0, 4),
    ("py3.12-oldest", "3.12.1", "2.16.1", "3.7.0", "1.26.4", "2.16.2", "middle", 196, 0, 0),
    ("py3.12-newest", "3.12.1", "2.21.0", "3.15.1", "2.5.5", "2.21.0", "middle", 196, 0, 0),
    ("py3.13-newest", "3.13.0", "2.21.0", "3.15.1", "2.5.5", "2.21.0", "core", 1100, 0, 1),
)
