"""One check of everything that Keras expects of a layer, in the manner of Keras' own tests."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf


def structure(outputs: Any) -> list[Any]:
    return keras.tree.flatten(outputs)


def model_around(layer: Any, data: dict[str, np.ndarray]) -> keras.Model:
    """Return a functional model whose inputs are the call arguments of the layer, in order."""
    inputs = {
        name: keras.Input(value.shape[1:], name=name, dtype=value.dtype.name)
        for name, value in data.items()
    }
    first, *others = inputs
    outputs = layer(inputs[first], **{name: inputs[name] for name in others})
    return keras.Model(list(inputs.values()) if others else inputs[first], outputs)


def assert_same(a: Any, b: Any, tolerance: float = 0.0) -> None:
    for one, other in zip(structure(a), structure(b), strict=True):
        one, other = keras.ops.convert_to_numpy(one), keras.ops.convert_to_numpy(other)
        assert one.dtype == other.dtype
        np.testing.assert_allclose(
            one.astype("float64"), other.astype("float64"), rtol=tolerance, atol=tolerance
        )


def gradients(run: Callable[[], Any], variables: list[Any]) -> list[np.ndarray]:
    values = [v.value for v in variables]
    with tf.GradientTape() as tape:
        loss = sum(tf.reduce_sum(tf.cast(out, "float32") ** 2) for out in structure(run()))
    return [tf.convert_to_tensor(g).numpy() for g in tape.gradient(loss, values)]


def check_layer(
    make: Callable[..., Any],
    data: dict[str, np.ndarray],
    *,
    weights: int,
    folder: Path,
    half_is_cast: bool = True,
    export: bool = True,
) -> None:
    """Check build, call, config, mask, dtype policies, graph mode, XLA, saving and cloning.

    Args:
        make: Makes the layer; takes ``dtype`` as a keyword.
        data: Call arguments, the first one positional, with a batch axis.
        weights: How many weights the layer should have.
        folder: Where files may be written.
        half_is_cast: Whether float outputs follow the compute dtype.
        export: Whether to write and read a SavedModel.
    """
    layer = make()
    first, *others = data
    kwargs = {name: data[name] for name in others}

    # Call, and what was promised about its shape and dtype.
    outputs = layer(data[first], **kwargs)
    assert layer.built
    assert len(layer.weights) == weights
    for weight in layer.weights:
        assert weight.path.startswith(layer.name)
    specs = layer.compute_output_spec(
        keras.KerasTensor(data[first].shape, dtype=data[first].dtype),
        **{n: keras.KerasTensor(v.shape, dtype=v.dtype) for n, v in kwargs.items()},
    )
    shape_arguments = [v.shape for v in data.values()]
    promised = layer.compute_output_shape(*shape_arguments)
    leaves = structure(specs)
    for out, spec in zip(structure(outputs), leaves, strict=True):
        assert all(s is None or s == o for s, o in zip(spec.shape, out.shape, strict=True))
        assert keras.backend.standardize_dtype(out.dtype) == spec.dtype
    flat = [promised] if isinstance(promised[0], int | None) else list(promised)
    assert [tuple(s.shape) for s in leaves] == [tuple(s) for s in flat]

    # Config round trip: every argument comes back, also through the serialiser.
    config = layer.get_config()
    again = type(layer).from_config(copy.deepcopy(config))
    assert again.get_config() == config
    stored = keras.saving.serialize_keras_object(layer)
    assert stored["registered_name"].startswith("keras_gradguard>")
    assert keras.saving.deserialize_keras_object(stored).get_config() == config
    again.build_from_config(layer.get_build_config())
    again.set_weights(layer.get_weights())
    assert_same(again(data[first], **kwargs), outputs)

    # Graph mode and XLA give the same values and gradients.
    variables = list(layer.trainable_variables)
    plain = gradients(lambda: layer(data[first], **kwargs), variables)
    for jit in (False, True):
        if jit and not layer.supports_jit:
            continue
        run = tf.function(lambda: layer(data[first], **kwargs), jit_compile=jit, autograph=False)
        assert_same(run(), outputs, tolerance=1e-5)
        both = tf.function(
            lambda: gradients_in_graph(lambda: layer(data[first], **kwargs), variables),
            jit_compile=jit,
            autograph=False,
        )()
        for expected, found in zip(plain, both, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)

    # Dtype policies.
    for policy, compute in (
        ("mixed_float16", "float16"),
        ("mixed_bfloat16", "bfloat16"),
        ("float64", "float64"),
    ):
        half = make(dtype=policy)
        out = structure(half(data[first], **kwargs))[0]
        expected = compute if half_is_cast else data[first].dtype.name
        assert keras.backend.standardize_dtype(out.dtype) == expected
        assert all(
            w.dtype == ("float64" if policy == "float64" else "float32")
            for w in half.trainable_weights
        )
        assert np.isfinite(keras.ops.convert_to_numpy(keras.ops.cast(out, "float32"))).all()

    # In a functional model: predict, save, load, weights only, clone, copy, pickle.
    model = model_around(layer, data)
    values = list(data.values()) if others else data[first]
    assert_same(model(values), outputs, tolerance=1e-6)
    expected = model(values)
    path = folder / "model.keras"
    model.save(path)
    weights_path = folder / "model.weights.h5"
    model.save_weights(weights_path)
    copies = {
        "load_model": keras.models.load_model(path),
        "clone_model": keras.models.clone_model(model),
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
    }
    copies["clone_model"].load_weights(weights_path)
    for how, other in copies.items():
        assert other is not model, how
        assert_same(other(values), expected)
    if export:
        model.export(folder / "exported", verbose=False)
        exported = tf.saved_model.load(folder / "exported")  # its variables die with it
        served = exported.serve(keras.tree.map_structure(tf.constant, values))
        assert_same(served, expected, tolerance=1e-5)


def gradients_in_graph(run: Callable[[], Any], variables: list[Any]) -> list[Any]:
    values = [v.value for v in variables]
    with tf.GradientTape() as tape:
        loss = sum(tf.reduce_sum(tf.cast(out, "float32") ** 2) for out in structure(run()))
    return tape.gradient(loss, values)
