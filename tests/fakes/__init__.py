"""Stand-ins for packages that the documentation shows and the tests do not install.

Signatures are those of mlflow 3.17 and wandb 0.31; each call is written down and checked for what
the real one would refuse.
"""
