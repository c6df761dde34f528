"""DynamicRepeatDense: a Dense layer applied n times, with n per example and learnable."""

from __future__ import annotations

import numbers
from typing import Any, ClassVar, Literal

import keras
from keras import ops

from keras_gradguard.layers._repeats import (
    ClipCounter,
    match_repeats,
    refuse_bad,
    whole_number,
)
from keras_gradguard.layers._rows import (
    boundary_weights,
    recurrent_rows,
    row_mask,
    row_positions,
    whole_weights,
)

Tensor = Any
LengthGradient = Literal["boundary", "none"]
LENGTH_GRADIENTS: tuple[LengthGradient, ...] = ("boundary", "none")


@keras.saving.register_keras_serializable(package="keras_gradguard")
class DynamicRepeatDense(keras.layers.Layer):
    """A Dense layer applied ``n`` times: a sequence whose length has a gradient.

    Every example gets its own ``n``, from the data, from another layer, or
    predicted by this layer. Row ``i`` of an example is::

        row_i    = activation(features @ kernel + bias)                        # feedback=False
        row_i    = activation(concat(features, row_{i-1}) @ kernel + bias)     # feedback=True
        value_i  = clip(n - i, 0, 1) * row_i                                   # "boundary"
        value_i  = row_i if i < round(n) else 0                                # "none"

    with ``row_{-1} = 0`` and one kernel for all rows. There are ``ceil(n)`` rows
    (``round(n)`` for ``"none"``), zero padded to the longest of the batch, or to
    ``max_repeats``; the padding is masked. Without feedback the rows of an example
    are equal before they are weighted and are computed once.

    **Gradient in n.** With ``"boundary"`` the values are continuous in ``n``
    and ``d value_i / dn`` is ``row_i`` for the row that holds the boundary
    (``i < n < i + 1``), else 0. At a whole ``n`` it is the mean of both sides, as
    a central difference would measure. So the last row alone tells ``n``
    whether to grow or to shrink; a loss on the returned lengths (``LengthLoss``)
    gives a gradient at any distance. With ``"none"``, and for integer ``repeats``,
    the values give no gradient to ``n``.

    **The predicted n** is ``min_repeats + softplus(features @ w + b)`` with a
    Dense(1) head of the layer's own, in float32 at least: positive and with a
    non-zero derivative everywhere.

    **Bad n.** Without ``max_repeats`` an ``n`` that is NaN, negative or needs more than
    ``MAX_ROWS`` rows or ``MAX_VALUES`` values raises ``ValueError``, in graph mode
    ``tf.errors.InvalidArgumentError``; the layer does not compile under XLA
    (``supports_jit`` is False). With ``max_repeats`` every shape is static and XLA works,
    but cannot raise: ``n`` is clipped to ``[min_repeats, max_repeats]``, clipped examples
    are counted in training (``clipped_repeats``), and one warning is given: at once in
    eager mode, at the end of the epoch in ``fit``. A NaN ``n`` gives NaN values. In both
    cases an ``n`` below ``min_repeats`` counts as ``min_repeats``.

    Args:
        units: Size of a row, a positive integer.
        max_repeats: Most rows per example, or None for no limit. Makes all shapes
            static.
        min_repeats: Fewest rows per example.
        activation: Of a row, before it is weighted. None is linear.
        use_bias: Whether rows have a bias.
        feedback: Whether a row also sees the row before it (unweighted).
        length_gradient: ``"boundary"`` or ``"none"``.
        return_lengths: Return ``(values, lengths)`` also when ``repeats`` is given.
        predict_repeats: True creates the Dense(1) head, False does not. None
            decides when the layer is built: it is created if no ``repeats``
            are given then.
        kernel_initializer: Of the kernel, ``[features, units]``, with feedback
            ``[features + units, units]``.
        bias_initializer: Of the bias, ``[units]``.
        kernel_regularizer: Of the kernel.
        bias_regularizer: Of the bias.
        kernel_constraint: Of the kernel.
        bias_constraint: Of the bias.
        **kwargs: Of ``keras.layers.Layer``.

    Call arguments:
        inputs: ``[batch, features]`` float, or with more leading dimensions.
        repeats: ``[batch]`` or ``[batch, 1]``, float or integer: rows per example.
            A single number applies to all examples. None: the layer predicts them.
            Kept in float32 under mixed precision; integers mean whole rows.
        training: Whether clipped lengths are counted.

    Returns:
        ``values``: ``[batch, rows, units]`` in the compute dtype with a Keras
        mask ``[batch, rows]``. With predicted repeats, or ``return_lengths=True``,
        ``(values, lengths)``; ``lengths`` is ``[batch]``, float32 (float64 under a
        float64 policy): n as given or predicted, before rounding and clipping, so
        that a loss on it can also bring back an ``n`` beyond ``max_repeats``.

    Raises:
        ValueError: An argument is out of its range, or shapes do not fit.

    Example:
    >>> import keras
    >>> layer = DynamicRepeatDense(2, kernel_initializer="ones")
    >>> layer(keras.ops.ones((1, 3)), repeats=keras.ops.array([2.5])).numpy().tolist()
    [[[3.0, 3.0], [3.0, 3.0], [1.5, 1.5]]]
    >>> values, lengths = DynamicRepeatDense(2, max_repeats=4)(keras.ops.ones((8, 3)))
    >>> values.shape, lengths.shape
    (TensorShape([8, 4, 2]), TensorShape([8]))
    """

    MAX_ROWS: ClassVar[int] = 1_000_000
    MAX_VALUES: ClassVar[int] = 2**29

    def __init__(
        self,
        units: int,
        max_repeats: int | None = None,
        min_repeats: int = 0,
        activation: Any = None,
        use_bias: bool = True,
        feedback: bool = False,
        length_gradient: LengthGradient = "boundary",
        return_lengths: bool = False,
        predict_repeats: bool | None = None,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        # `repeats` must not be cut to half precision: bfloat16 cannot tell 9.3
        # from 9.25. `call` casts what may be cast.
        self.autocast = False
        self.units = whole_number("units", units, 1)
        self.max_repeats = (
            None if max_repeats is None else whole_number("max_repeats", max_repeats, 1)
        )
        self.min_repeats = whole_number("min_repeats", min_repeats, 0)
        if self.max_repeats is not None and self.min_repeats > self.max_repeats:
            raise ValueError(
                f"`min_repeats` must be at most `max_repeats`. Received: "
                f"min_repeats={min_repeats}, max_repeats={max_repeats}"
            )
        if length_gradient not in LENGTH_GRADIENTS:
            raise ValueError(
                f"`length_gradient` must be one of {LENGTH_GRADIENTS}. "
                f"Received: length_gradient={length_gradient!r}"
            )
        self.activation = keras.activations.get(activation)
        self.use_bias = use_bias
        self.feedback = feedback
        self.length_gradient = length_gradient
        self.return_lengths = return_lengths
        self.predict_repeats = predict_repeats
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        self.supports_jit = self.max_repeats is not None
        self.supports_masking = True
        self.kernel: Any = None
        self.bias: Any = None
        self.length_head: Any = None
        self._clip_counter: ClipCounter | None = None

    # Building ---------------------------------------------------------------

    def build(self, inputs_shape: Any, repeats_shape: Any = None) -> None:
        """Create the kernel, the bias and, if n is to be predicted, the head."""
        features = inputs_shape[-1]
        if features is None or len(inputs_shape) < 2:
            raise ValueError(
                f"Layer '{self.name}' needs inputs [batch, features] with a known number of "
                f"features. Received: inputs_shape={tuple(inputs_shape)}"
            )
        rows = features + self.units if self.feedback else features
        self.kernel = self.add_weight(
            name="kernel",
            shape=(rows, self.units),
            initializer=self.kernel_initializer,
            regularizer=self.kernel_regularizer,
            constraint=self.kernel_constraint,
        )
        if self.use_bias:
            self.bias = self.add_weight(
                name="bias",
                shape=(self.units,),
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
            )
        predict = self.predict_repeats
        if predict or (predict is None and repeats_shape is None):
            self.length_head = keras.layers.Dense(
                1, activation="softplus", dtype=self._length_dtype, name="length_head"
            )
            self.length_head.build(tuple(inputs_shape))
        if self.max_repeats is not None:
            self._clip_counter = ClipCounter(self.name, self.max_repeats)
        self.built = True

    @property
    def _length_dtype(self) -> str:
        return "float64" if self.compute_dtype == "float64" else "float32"

    # Calling ----------------------------------------------------------------

    def __call__(self, inputs: Any, repeats: Any = None, **kwargs: Any) -> Any:
        """Call the layer; a plain number or list as ``repeats`` becomes a tensor."""
        if isinstance(repeats, numbers.Real | list | tuple):
            repeats = ops.convert_to_tensor(repeats)
        return super().__call__(inputs, repeats=repeats, **kwargs)

    def call(self, inputs: Tensor, repeats: Tensor = None, training: bool | None = None) -> Any:
        """Return values, or values and lengths; see the class."""
        leading = tuple(inputs.shape[:-1])
        if repeats is None:
            lengths, whole = self._predicted(inputs), self.length_gradient == "none"
        else:
            lengths, whole = self._given(inputs, repeats)

        features = ops.cast(inputs, self.compute_dtype)
        flat_lengths = lengths
        if len(leading) > 1:
            features = ops.reshape(features, (-1, inputs.shape[-1]))
            flat_lengths = ops.reshape(lengths, (-1,))
        used = self._checked(flat_lengths, whole, _counts(training))

        if self.max_repeats is None:
            rows = ops.cast(ops.max(ops.ceil(ops.stop_gradient(used)), initial=0), "int32")
        else:
            rows = self.max_repeats
        positions = row_positions(used, rows)
        weights = whole_weights(positions) if whole else boundary_weights(positions)
        mask = row_mask(positions)
        weights = ops.expand_dims(ops.cast(weights, self.compute_dtype), -1)
        if self.feedback:
            values = self._feedback_rows(features, rows) * weights
        else:
            values = ops.expand_dims(self._row(features), 1) * weights

        if len(leading) > 1:
            shape = ops.shape(inputs)[:-1]
            values = ops.reshape(values, (*shape, rows, self.units))
            mask = ops.reshape(mask, (*shape, rows))
        values._keras_mask = mask
        if repeats is None or self.return_lengths:
            return values, lengths
        return values

    def _predicted(self, inputs: Tensor) -> Tensor:
        if self.length_head is None:
            raise ValueError(
                f"Layer '{self.name}' was built without a head that predicts n, because "
                "`repeats` were given (or `predict_repeats=False`). Pass `repeats`, or make "
                "the layer with `predict_repeats=True`."
            )
        return ops.squeeze(self.length_head(inputs), -1) + float(self.min_repeats)

    def _given(self, inputs: Tensor, repeats: Tensor) -> tuple[Tensor, bool]:
        """Return ``repeats`` in the shape ``inputs.shape[:-1]``, and whether it is whole."""
        dtype = keras.backend.standardize_dtype(repeats.dtype)
        if dtype == "bool" or not dtype.startswith(("int", "uint", "float", "bfloat")):
            raise ValueError(
                f"`repeats` of layer '{self.name}' must be float or integer, one number of "
                f"rows per example. Received: repeats of dtype {dtype}"
            )
        whole = self.length_gradient == "none" or not dtype.startswith(("float", "bfloat"))
        lengths = ops.cast(repeats, self._length_dtype)
        lengths = ops.stop_gradient(lengths) if whole else lengths
        leading = match_repeats(self.name, tuple(inputs.shape[:-1]), tuple(repeats.shape))
        if len(repeats.shape) == 0:
            return ops.broadcast_to(lengths, ops.shape(inputs)[:-1]), whole
        if len(repeats.shape) == leading + 1:
            lengths = ops.squeeze(lengths, -1)
        return lengths, whole

    def _checked(self, lengths: Tensor, whole: bool, training: bool) -> Tensor:
        """Return lengths that are safe to allocate rows for."""
        low, high = float(self.min_repeats), self.max_repeats
        used = ops.round(ops.stop_gradient(lengths)) if whole else lengths
        if high is None:
            used = refuse_bad(used, self.name, self.units, self.MAX_ROWS, self.MAX_VALUES)
            return ops.maximum(used, low) if low else used
        fixed = ops.stop_gradient(used)
        if self._clip_counter is not None:
            self._clip_counter.see(ops.logical_or(fixed > high, fixed < 0.0), count=training)
        clipped = ops.clip(used, low, float(high))
        return ops.where(ops.isnan(fixed), fixed, clipped)

    def _row(self, features: Tensor) -> Tensor:
        row = ops.matmul(features, ops.cast(self.kernel, self.compute_dtype))
        if self.bias is not None:
            row = row + ops.cast(self.bias, self.compute_dtype)
        return self.activation(row)

    def _feedback_rows(self, features: Tensor, rows: Any) -> Tensor:
        """Return the rows of the recurrence, ``[batch, rows, units]``, not yet weighted."""
        size = features.shape[-1]
        kernel = ops.cast(self.kernel, self.compute_dtype)
        # What the features contribute is the same for every row: outside the loop.
        base = ops.matmul(features, kernel[:size])
        if self.bias is not None:
            base = base + ops.cast(self.bias, self.compute_dtype)
        return recurrent_rows(base, kernel[size:], self.activation, rows, self.max_repeats)

    # Clipped lengths ----------------------------------------------------------

    @property
    def clipped_repeats(self) -> int:
        """Examples whose ``n`` was clipped in training so far; 0 without ``max_repeats``."""
        return 0 if self._clip_counter is None else self._clip_counter.read()

    @property
    def metrics(self) -> list[Any]:
        """The layer's metrics (none). Read by Keras on the host around every epoch.

        That is the one moment at which a layer may speak without a cost to the
        compiled step (XLA has no way to print), so a clipped length is reported here.
        """
        counter = getattr(self, "_clip_counter", None)
        if counter is not None:
            counter.report()
        return list(super().metrics)

    # Shapes, masks, config ------------------------------------------------------

    def compute_output_shape(self, inputs_shape: Any, repeats_shape: Any = None) -> Any:
        """Return the shape of the values, or of the values and the lengths."""
        leading = tuple(inputs_shape[:-1])
        values = (*leading, self.max_repeats, self.units)
        if repeats_shape is None or self.return_lengths:
            return values, leading
        return values

    def compute_output_spec(
        self, inputs: Any, repeats: Any = None, training: bool | None = None
    ) -> Any:
        """Return symbolic outputs; lengths keep their own dtype."""
        del training
        if repeats is None and self.built and self.length_head is None:
            self._predicted(inputs)  # raises
        if repeats is not None:
            match_repeats(self.name, tuple(inputs.shape[:-1]), tuple(repeats.shape))
        shape = (*tuple(inputs.shape[:-1]), self.max_repeats, self.units)
        values = keras.KerasTensor(shape, dtype=self.compute_dtype)
        if repeats is None or self.return_lengths:
            lengths = keras.KerasTensor(tuple(inputs.shape[:-1]), dtype=self._length_dtype)
            return values, lengths
        return values

    def compute_mask(self, inputs: Any, previous_mask: Any = None, repeats: Any = None) -> Any:
        """Return the mask of the rows, ``[batch, rows]``, for given ``repeats``.

        A call attaches this mask to its values. Without ``repeats`` the mask is not a
        function of the inputs alone, and None is returned.
        """
        del previous_mask
        if repeats is None:
            return None
        repeats = ops.convert_to_tensor(repeats)
        lengths, whole = self._given(inputs, repeats)
        used = self._checked(ops.reshape(lengths, (-1,)), whole, False)
        rows = self.max_repeats
        if rows is None:
            rows = ops.cast(ops.max(ops.ceil(used), initial=0), "int32")
        return ops.reshape(row_mask(row_positions(used, rows)), (*ops.shape(lengths), rows))

    def get_config(self) -> dict[str, Any]:
        """Return every argument in a form that can be saved."""
        return {
            **super().get_config(),
            "units": self.units,
            "max_repeats": self.max_repeats,
            "min_repeats": self.min_repeats,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            "feedback": self.feedback,
            "length_gradient": self.length_gradient,
            "return_lengths": self.return_lengths,
            "predict_repeats": self.predict_repeats,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
            "bias_regularizer": keras.regularizers.serialize(self.bias_regularizer),
            "kernel_constraint": keras.constraints.serialize(self.kernel_constraint),
            "bias_constraint": keras.constraints.serialize(self.bias_constraint),
        }


def _counts(training: Any) -> bool:
    """Return whether a call is part of training; a tensor that says so cannot be read here."""
    return bool(training) if training is None or isinstance(training, bool | int) else True
