"""The closed vocabulary of symptoms and causes, for errors, logs, JSON and docs."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """A symptom's heading and the first thing to look at when no cause is known."""

    title: str
    first_look: str


SYMPTOMS: Final = MappingProxyType(
    {
        "none_gradient": Symptom(
            title="No gradient (None)",
            first_look="Follow the value from the variable to the loss: it must be read inside the "
            "tape and pass through differentiable TensorFlow or keras.ops calls only.",
        ),
        "zero_gradient": Symptom(
            title="Gradient is exactly zero",
            first_look="Look at the activations between this place and the loss: an output that no "
            "longer changes with its input (dead, saturated, clipped) sends back zeros.",
        ),
        "zero_update": Symptom(
            title="Weights do not change",
            first_look="The gradient is there but the step is lost: check the learning rate, "
            "clipping, constraints, the weights' dtype, and that optimizer.apply is called.",
        ),
        "non_finite": Symptom(
            title="NaN or Inf",
            first_look="Check the data for NaN/Inf first, then log, sqrt, division and exp in the "
            "model and the loss, then the learning rate.",
        ),
        "vanishing": Symptom(
            title="Gradient vanishes with depth",
            first_look="Use relu/gelu with He initialisation, normalisation layers or residual "
            "connections.",
        ),
        "exploding": Symptom(
            title="Gradient explodes",
            first_look="Lower the learning rate, scale the inputs to about unit size, or set "
            "`clipnorm`.",
        ),
        "bad_contract": Symptom(
            title="Model, loss and data do not fit together",
            first_look="Check the output activation and units against the loss and the labels.",
        ),
    }
)

CAUSES: Final = MappingProxyType(
    {
        "double_activation": "a sigmoid/softmax output goes to a loss that applies it again",
        "missing_activation": "raw outputs go to a loss that expects probabilities",
        "softmax_over_one_unit": "softmax over an axis of size one is the constant 1",
        "wrong_loss_for_labels": "the loss does not fit the label format or the number of outputs",
        "label_out_of_range": "a label has no output unit, or a target lies outside what the "
        "output can reach",
        "labels_all_zero": "one-hot label rows that sum to 0",
        "loss_arguments_swapped": "y_true and y_pred are exchanged",
        "loss_broadcast": "shapes (n,) and (n, 1) broadcast to (n, n) inside the loss",
        "dead_relu": "units of a hidden ReLU are off for every example seen",
        "dead_relu_output": "a ReLU on the output is off for every example",
        "saturated_activation": "sigmoid/tanh/softmax units sit at their flat ends",
        "saturated_output_clipped_loss": "the output is saturated and the loss clips it, so the "
        "gradient is exactly 0",
        "saturated_discriminator": "the adversarial partner's output is saturated and starves "
        "the generator",
        "clip_in_forward": "clip/minimum/maximum in the forward pass or the loss cuts the gradient",
        "embedding_collapse": "all embeddings are equal: the loss sits at its margin",
        "vanishing_depth": "gradients shrink layer by layer",
        "recurrent_explosion": "gradients grow over the time steps of a recurrent layer",
        "zero_init": "kernels start at zero in a way that keeps gradients at zero",
        "zero_input": "the input data are all zero",
        "nan_input": "the data hold NaN or Inf",
        "input_scale": "the input data are far from unit scale",
        "zero_sample_weight": "every example's sample weight is 0",
        "zero_class_weight": "the class weight of every example present is 0",
        "all_masked": "every position is masked out of the loss",
        "batchnorm_batch_one": "batch statistics of a single value: the normalised output is "
        "constant",
        "zero_gradient_op": "an op whose gradient is 0 everywhere (sign, floor...)",
        "non_differentiable_op": "an op without a gradient (argmax, round, an int cast, a "
        "comparison, shape...) stands between variable and loss",
        "stop_gradient": "the path goes through stop_gradient",
        "leaves_tensorflow": "the value leaves TensorFlow (numpy(), float(), py_function...), "
        "where the tape cannot follow",
        "outside_tape": "the forward pass was not recorded by the tape",
        "second_derivative_of_relu": "a derivative of a piecewise-linear activation's derivative "
        "is 0",
        "variable_assign_breaks_path": "the value went through assign, which records nothing",
        "variable_replaced": "the variable was overwritten by a plain tensor",
        "untracked_variable": "a weight that the model does not list, so no optimizer gets it",
        "layer_created_in_call": "a layer made anew in every call: its weights are never trained",
        "unused_layer": "the layer is listed as trainable but never used in the forward pass",
        "unused_weight": "the weight is listed as trainable but never read in the forward pass",
        "output_not_in_loss": "it is computed, but enters no loss",
        "integer_variable": "a trainable variable of integer dtype cannot have a gradient",
        "trainable_flag": "`trainable` was set so that nothing, or the wrong thing, trains",
        "apply_missing": "the optimizer is never applied",
        "python_side_effect_in_graph": "a Python condition or counter was frozen when the graph "
        "was traced",
        "optimizer_built_for_other_variables": "the optimizer was built on another list of "
        "variables",
        "no_loss": "compiled without a loss",
        "learning_rate_zero": "the learning rate is 0 at this step",
        "learning_rate_too_high": "the learning rate is too high for this loss",
        "clip_too_small": "gradient clipping shrinks the update to nothing",
        "update_below_precision": "the step is smaller than the spacing of the weight's dtype",
        "constraint_projects_update": "a constraint takes the update back",
        "float16_underflow": "values fall below the float16 range",
        "float16_overflow": "values exceed the float16 range (65504)",
        "log_of_zero": "log of 0",
        "sqrt_gradient_at_zero": "the derivative of sqrt at 0 is infinite",
        "exp_overflow": "exp overflows to Inf",
        "division_by_zero": "division by zero",
        "where_double_branch": "the branch of `where` that is not taken holds NaN/Inf, and its "
        "gradient leaks through",
        "unknown": "measured, but not explained",
    }
)
