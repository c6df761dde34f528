"""LogitsOutput: an output layer or model that always gives logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from keras_gradguard.layers._stripping import STRIPPED, find_final, one_unit, stripped
from keras_gradguard.layers.serving import apply_activation

Tensor = Any


class _Metrics(list[Any]):
    """The list that Keras expects in ``layer.metrics``; calling it makes the user's metrics."""

    def __init__(self, own: list[Any], make: Callable[..., list[Any]]) -> None:
        super().__init__(own)
        self._make = make

    def __call__(self, sparse: bool = False) -> list[Any]:
        return self._make(sparse=sparse)


@keras.saving.register_keras_serializable(package="keras_gradguard")
class LogitsOutput(keras.layers.Wrapper):
    """Strips the final sigmoid or softmax from what it wraps, so that it gives logits.

    A loss on logits (``from_logits=True``) is exact where a loss on probabilities is
    rounded and clipped: at a saturated output the latter has gradient 0. The layer
    remembers what it stripped, hands out the loss and metrics that fit
    (:meth:`loss`, :meth:`metrics`), and ``with_probabilities(model)`` puts the
    activation back for serving. The gradient is that of the wrapped layer
    without its activation. The weights, and the wrapped layer itself, are not
    changed: used elsewhere, it still ends in its activation.

    Args:
        layer: An output layer (Dense, EinsumDense, a convolution, ``TimeDistributed`` of
            one, ``Activation``, ``Softmax``) or a functional or Sequential model with one output.
            After a sigmoid it may reshape, flatten, permute or crop.
        activation: ``"sigmoid"`` or ``"softmax"``: what turns the logits into
            probabilities. Needed only where ``layer`` has no final activation. None takes
            the stripped one.
        **kwargs: Of ``keras.layers.Layer``.

    Call arguments:
        inputs: What ``layer`` takes.

    Returns:
        Logits, of the shape and dtype of the output of ``layer``.

    Raises:
        ValueError: The output cannot be logits (relu, tanh, an unknown activation), its
            end cannot be seen (a subclassed model), ``activation`` contradicts the
            layer, or a softmax runs over one unit.

    Example:
    >>> import keras
    >>> head = LogitsOutput(keras.layers.Dense(1, activation="sigmoid"))
    >>> model = keras.Sequential([keras.Input((4,)), head])
    >>> model.compile("adam", loss=head.loss(), metrics=head.metrics())
    >>> head.activation, head.loss().from_logits
    ('sigmoid', True)
    """

    def __init__(self, layer: Any, activation: str | None = None, **kwargs: Any) -> None:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(
                "`layer` must be a Keras layer or model, e.g. Dense(10, activation='softmax'). "
                f"Received: layer={layer!r}"
            )
        if activation is not None:
            activation = getattr(activation, "__name__", activation)
            if activation not in STRIPPED:
                raise ValueError(
                    f"`activation` must be one of {STRIPPED} or None. "
                    f"Received: activation={activation!r}"
                )
        final = find_final(layer)
        if final.name is None and not final.known and activation is None:
            raise ValueError(
                f"LogitsOutput cannot see how '{layer.name}' ({type(layer).__name__}) ends. If "
                "its output is logits, say what turns them into probabilities: "
                "activation='sigmoid' or activation='softmax'."
            )
        if activation is not None and final.name not in (None, activation):
            raise ValueError(
                f"`activation` must be {final.name!r} (or None): that is how '{layer.name}' ends. "
                f"Received: activation={activation!r}"
            )
        kwargs.setdefault("dtype", layer.dtype_policy)
        super().__init__(layer, **kwargs)
        self.autocast = False  # the wrapped layer casts as its own policy says
        self.activation = activation or final.name
        self.supports_masking = layer.supports_masking
        self.supports_jit = layer.supports_jit
        self._gradguard_final = (final,)

    @property
    def axis(self) -> int:
        """Axis of the classes of a softmax."""
        return self._gradguard_final[0].axis

    def build(self, input_shape: Any = None) -> None:
        """Build the wrapped layer and refuse a softmax over one unit."""
        super().build(input_shape)
        if self.activation == "softmax" and input_shape is not None:
            shape = self.layer.compute_output_shape(input_shape)
            if shape[self.axis] == 1:
                raise ValueError(one_unit(self.layer))
        self.built = True

    def call(self, inputs: Tensor, **kwargs: Any) -> Tensor:
        """Return the logits."""
        with stripped(self._gradguard_final[0]):
            return self.layer(inputs, **kwargs)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Return the shape of the wrapped layer's output."""
        return self.layer.compute_output_shape(input_shape)

    def compute_output_spec(self, inputs: Any, **kwargs: Any) -> Any:
        """Return the symbolic output of the wrapped layer."""
        with stripped(self._gradguard_final[0]):
            return self.layer.compute_output_spec(inputs, **kwargs)

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """Return the mask that the wrapped layer computes."""
        return self.layer.compute_mask(inputs, previous_mask)

    def loss(self, label_smoothing: float = 0.0, sparse: bool = False, **kwargs: Any) -> Any:
        """Return the Keras loss that fits the logits.

        Args:
            label_smoothing: In [0, 1], towards the uniform distribution.
            sparse: For a softmax: True for integer labels, False for one-hot labels.
            **kwargs: Of the loss, e.g. ``reduction`` or ``name``.

        Returns:
            ``BinaryCrossentropy``, ``CategoricalCrossentropy`` or
            ``SparseCategoricalCrossentropy``, with ``from_logits=True``.

        Raises:
            ValueError: The activation is not known, or the arguments do not fit it.

        Example:
        >>> import keras
        >>> head = LogitsOutput(keras.layers.Dense(10, activation="softmax"))
        >>> type(head.loss(sparse=True)).__name__
        'SparseCategoricalCrossentropy'
        """
        if self._known_activation("loss") == "sigmoid":
            if sparse:
                raise ValueError(
                    f"`sparse` must be False: the output of '{self.name}' is a sigmoid, whose "
                    "labels are 0 or 1 per unit. Received: sparse=True"
                )
            return keras.losses.BinaryCrossentropy(
                from_logits=True, label_smoothing=label_smoothing, **kwargs
            )
        if not sparse:
            return keras.losses.CategoricalCrossentropy(
                from_logits=True, label_smoothing=label_smoothing, axis=self.axis, **kwargs
            )
        if label_smoothing:
            raise ValueError(
                "`label_smoothing` needs one-hot labels; the sparse loss of Keras has none. Use "
                f"sparse=False. Received: label_smoothing={label_smoothing}, sparse=True"
            )
        if self.axis != -1:
            raise ValueError(
                f"`sparse` needs the classes on the last axis; '{self.name}' has them on axis "
                f"{self.axis}. Use sparse=False with one-hot labels."
            )
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **kwargs)

    @property
    def metrics(self) -> Any:
        """Call it for metrics that are right for logits: ``head.metrics(sparse=False)``.

        Sigmoid: ``BinaryAccuracy`` with threshold 0.0 (probability 1/2) and ``AUC`` from
        logits. Softmax: categorical accuracy, for one-hot or ``sparse`` labels; the
        largest logit is the largest probability. (As a list, it holds the Keras
        metrics inside the layer, as ``metrics`` of every Keras layer does.)
        """
        return _Metrics(super().metrics, self._make_metrics)

    def _make_metrics(self, sparse: bool = False) -> list[Any]:
        if self._known_activation("metrics") == "sigmoid":
            return [
                keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy"),
                keras.metrics.AUC(from_logits=True, name="auc"),
            ]
        if sparse:
            return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
        return [keras.metrics.CategoricalAccuracy(name="accuracy")]

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities of logits that this layer gave.

        Args:
            logits: Output of this layer.

        Returns:
            Tensor of the same shape, float32 at least.
        """
        return apply_activation(logits, self._known_activation("probabilities"), self.axis)

    def _known_activation(self, what: str) -> str:
        if self.activation is None:
            raise ValueError(
                f"'{self.name}' wraps a layer without a final activation, so its {what} cannot "
                "be chosen. Pass activation='sigmoid' or activation='softmax' to LogitsOutput."
            )
        return self.activation

    def get_config(self) -> dict[str, Any]:
        """Return every argument in a form that can be saved."""
        return {**super().get_config(), "activation": self.activation}
