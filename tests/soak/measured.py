"""What the last long runs of the soak printed, for the page of what is supported."""

FIGURES = (
    "The last runs, on two busy cores from SEED=1000, 2000 and 4000: 161 configurations, 1792 "
    "guarded\nsteps, 0 differences, 0 false alarms, 0 leftovers, and 22 more that Keras itself "
    "refuses, in the\nsame words. A configuration that fails is printed with its seed."
)
