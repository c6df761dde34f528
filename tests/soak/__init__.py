"""Random configurations of training, each run plain and guarded."""
