"""What a zero gradient may come from, as causes."""

from __future__ import annotations

from typing import Any

from keras_gradguard.diagnosis.facts import Facts
from keras_gradguard.diagnosis.opgraph import Op
from keras_gradguard.findings import Cause, Evidence

ENOUGH_EXAMPLES = 8


def names_in(model: Any) -> set[str]:
    """Return the names of all layers of a model."""
    from keras_gradguard.diagnosis.sandbox import all_layers

    return {la.name for la in all_layers(model)}


def logits_loss(op: Op) -> str:
    """Return the loss to use on logits in place of a squashed output."""
    if op.type == "Softmax":
        return "SparseCategoricalCrossentropy(from_logits=True)"
    return "BinaryCrossentropy(from_logits=True)"


def weights_zero() -> Cause:
    """Return the cause for sample weights that are all 0."""
    return Cause(
        name="zero_sample_weight",
        score=0.9,
        where=("loss", "sample_weight"),
        evidence=(Evidence(name="weight_sum", value=0.0, text="every weight of the loss is 0"),),
        fix="Check how the weights are built: print(sample_weight.sum()) per batch.",
    )


def all_masked(op: Op) -> Cause:
    """Return the cause for a mask that leaves nothing out of the loss but zeros."""
    return Cause(
        name="all_masked",
        score=0.92,
        where=("loss", "data"),
        evidence=(
            Evidence(
                name="masked_fraction",
                value=1.0,
                text="the mask of the loss is 0 for every position of this batch",
            ),
        ),
        fix="Check `mask_value` (Masking) or the padding value (Embedding(mask_zero=True) takes 0 "
        "for padding, so real tokens must count from 1), and that the mask is not turned round.",
        source=op.source,
    )


def one_unit_softmax(place: str, source: str | None = None) -> Cause:
    """Return the cause ``softmax_over_one_unit``."""
    return Cause(
        name="softmax_over_one_unit",
        score=0.98,
        where=(place,),
        evidence=(
            Evidence(
                name="units",
                value=1,
                text=f"the softmax of '{place}' runs over an axis of size 1, so its output is 1 "
                "for every input and its derivative is 0",
            ),
        ),
        fix=f"For two classes give '{place}' one unit with sigmoid and use binary_crossentropy, or "
        "two units with softmax and sparse_categorical_crossentropy.",
        source=source,
    )


def one_column_crossentropy(place: str, source: str | None = None) -> Cause:
    """Return the cause ``wrong_loss_for_labels`` for a categorical loss on one column."""
    return Cause(
        name="wrong_loss_for_labels",
        score=0.96,
        where=("loss", place),
        evidence=(
            Evidence(
                name="columns",
                value=1,
                text=f"a categorical cross-entropy compares classes along the last axis, and the "
                f"output of '{place}' has a single column: the loss is 0 whatever the model says",
            ),
        ),
        fix=f"With one unit in '{place}' use binary_crossentropy (and sigmoid); for a categorical "
        "loss give it one unit per class and one-hot labels.",
        source=source,
    )


def missing_activation(facts: Facts, low: float, high: float, maker: Op | None = None) -> Cause:
    """Return the cause ``missing_activation``: raw outputs in a loss on probabilities."""
    place = maker.layer if maker is not None and maker.layer else None
    if place is None:
        view = facts.view
        outputs = facts.outputs
        if view is not None and outputs:
            place = next((o.layer for o in view.ops.producers(outputs[0], 50) if o.layer), None)
    place = place or "output"
    return Cause(
        name="missing_activation",
        score=0.95,
        where=("loss", place),
        evidence=(
            Evidence(
                name="output_range",
                value=high if high > 1 else low,
                text=f"the loss expects probabilities, but the output of '{place}' runs from "
                f"{low:.4g} to {high:.4g}; outside [0, 1] the loss clips and its gradient is 0",
            ),
        ),
        fix=f"Say that '{place}' gives logits: BinaryCrossentropy(from_logits=True) (or the "
        f"categorical one), or give '{place}' activation='sigmoid' (one unit) or 'softmax'; "
        "keras_gradguard.layers.LogitsOutput keeps the two together.",
    )


def embedding_collapse(facts: Facts) -> Cause | None:
    """Return ``embedding_collapse`` when an output is one vector for all examples."""
    trace = facts.trace
    if trace is None or not facts.outputs:
        return None
    from keras_gradguard.diagnosis.activations import constant_outputs
    from keras_gradguard.diagnosis.labels import compared_directly

    hit = constant_outputs(facts)
    if hit is None or compared_directly(facts):
        return None
    name, units, examples = hit
    return Cause(
        name="embedding_collapse",
        score=0.9,
        where=(name, "loss"),
        evidence=(
            Evidence(
                name="distinct_embeddings",
                value=1,
                text=f"'{name}' gives one and the same vector of {units} numbers for all "
                f"{examples} examples: every distance is 0 and the loss sits at its margin",
            ),
        ),
        fix="Lower the learning rate, normalise the embeddings (keras.layers.UnitNormalization), "
        "mine semi-hard instead of the hardest negatives, and make sure that batches hold "
        "several classes.",
    )
