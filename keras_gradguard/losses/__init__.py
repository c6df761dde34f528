"""Losses on sequences and their lengths that have a gradient."""

from __future__ import annotations

from keras_gradguard.losses.length_loss import LengthLoss
from keras_gradguard.losses.padded_sequence_loss import PaddedSequenceLoss

__all__ = ["LengthLoss", "PaddedSequenceLoss"]
