"""Models of images: LeNet-5, two for flowers, those of Keras, and the user's own. Plain Keras 3.

Every model that build_model returns takes pixels from 0 to 255, of any dtype, [batch, height,
width, channels], and returns logits, float32 [batch, classes]. How the pixels are scaled is part
of the model, so that training and serving cannot differ in it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from pipeline.config import MODEL_FORMS
from transforms.files import is_remote

USER_MODEL = re.compile(r"(?P<file>.+\.py):(?P<function>\w+)")
KERAS_PREFIX = "keras:"
_USER_MODULE = "tpufeed_user_model"
# Keras colours parts of what its errors say.
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
# What a graph may do to the result of its last computation without changing the numbers.
_PASSING_ON = ("Identity", "Cast", "Reshape", "EnsureShape", "Squeeze", "ExpandDims")
# Few batches an epoch: Keras's 0.99 would lag for many epochs.
_MOMENTUM = 0.9

Shape = tuple[int, int, int]


def lenet5(input_shape: Shape, classes: int) -> Any:
    """Returns LeNet-5 with ReLU and average pooling; 61,706 parameters for 28x28x1 and 10 classes.

    Args:
      input_shape: height, width, channels; values from 0 to 1 are expected.
      classes: number of logits.

    Raises:
      ValueError: the pictures are smaller than 12 pixels.
    """
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(input_shape),
            layers.Conv2D(6, 5, padding="same", activation="relu"),
            layers.AveragePooling2D(2),
            layers.Conv2D(16, 5, activation="relu"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(120, activation="relu"),
            layers.Dense(84, activation="relu"),
            layers.Dense(classes, dtype="float32"),
        ],
        name="lenet5",
    )


def convnet(input_shape: Shape, classes: int) -> Any:
    """Returns the lab's convnet; 293,233 parameters for 3 channels and 5 classes.

    Args:
      input_shape: height, width, channels; the size does not matter, from 16 pixels.
      classes: number of logits.
    """
    import keras

    layers = keras.layers

    def conv(filters: int, size: int = 3) -> Any:
        return layers.Conv2D(filters, size, padding="same", activation="relu")

    return keras.Sequential(
        [
            keras.Input(input_shape),
            *(conv(16), conv(30), layers.MaxPooling2D(2)),
            *(conv(60), layers.MaxPooling2D(2)),
            *(conv(90), layers.MaxPooling2D(2)),
            *(conv(110), layers.MaxPooling2D(2)),
            *(conv(130), conv(40, 1)),
            layers.GlobalAveragePooling2D(),
            layers.Dense(classes, dtype="float32"),
        ],
        name="convnet",
    )


def squeezenet(input_shape: Shape, classes: int) -> Any:
    """Returns the lab's SqueezeNet of 12 layers; 120,613 parameters for 3 channels and 5 classes.

    Args:
      input_shape: height, width, channels; the size does not matter, from 16 pixels.
      classes: number of logits.
    """
    import keras

    layers = keras.layers

    def conv(x: Any, filters: int, size: int) -> Any:
        x = layers.Conv2D(filters, size, padding="same", activation="relu")(x)
        return layers.BatchNormalization(momentum=_MOMENTUM)(x)

    def fire(x: Any, squeeze: int, expand: int) -> Any:
        x = conv(x, squeeze, 1)
        return layers.Concatenate()([conv(x, expand // 2, 1), conv(x, expand // 2, 3)])

    inputs = keras.Input(input_shape)
    x = fire(conv(inputs, 32, 3), 24, 48)
    for squeeze, expand in ((48, 96), (64, 128), (48, 96), (24, 48)):
        x = fire(layers.MaxPooling2D(2)(x), squeeze, expand)
    x = layers.GlobalAveragePooling2D()(x)
    outputs = layers.Dense(classes, dtype="float32")(x)
    return keras.Model(inputs, outputs, name="squeezenet")


def build_model(
    name: str,
    *,
    input_shape: Shape,
    classes: int,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    scaling: str = "auto",
    weights: str | None = None,
    mixed_bfloat16: bool = False,
) -> Any:
    """Returns a model from pixels to logits.

    Args:
      name: lenet5, convnet, squeezenet, keras:NAME, or FILE.py:FUNCTION.
      input_shape: height, width, channels of the pictures.
      classes: number of logits.
      mean: of each channel, scale 0 to 1; for scaling "standard".
      std: standard deviation of each channel, scale 0 to 1; for scaling "standard".
      scaling: "unit" (0 to 1), "standard" (mean 0, deviation 1), "none" (0 to 255), or "auto":
        unit for lenet5 and the user's own, keras:NAME what it was published with, else standard.
      weights: file to start from, local or in a bucket: model.keras of an earlier run, or what
        Keras's save_weights wrote; with keras:NAME of the network without its top, or "imagenet".
        None for random ones.
      mixed_bfloat16: whether layers compute in bfloat16; weights and logits stay float32.

    Raises:
      ValueError: no such model, it cannot be built for these pictures or not be loaded again once
        it is saved, or its weights cannot be loaded.
    """
    import keras

    with (
        _at_hand(weights) as file,
        _dtype_policy("mixed_bfloat16" if mixed_bfloat16 else "float32"),
    ):
        body, own_scaling = _build_body(name, input_shape, classes, weights, file)
        _check_logits(body, name, input_shape, classes)
        scale = _make_scaling(scaling, name, mean, std) or own_scaling
        inputs = keras.Input(input_shape, name="pixels")
        logits = body(scale(inputs) if scale else inputs)
        if logits.dtype != "float32":  # of a user's last layer, which computes as the policy says
            logits = keras.layers.Activation("linear", dtype="float32", name="logits")(logits)
        model = keras.Model(inputs, logits, name=body.name)
        if user := USER_MODEL.fullmatch(name):
            _check_loads_again(model, name, user["file"])
        if weights and file and (weights.endswith(".keras") or not name.startswith(KERAS_PREFIX)):
            _load_weights(model, weights, file)
    return model


@contextlib.contextmanager
def _at_hand(weights: str | None) -> Iterator[str | None]:
    """The local file of what --weights names: Keras reads no others, the hosts of a TPU do."""
    if weights in (None, "imagenet"):
        yield weights
        return
    import tensorflow as tf

    assert weights is not None
    with contextlib.ExitStack() as stack:
        try:
            if not tf.io.gfile.exists(weights) or tf.io.gfile.isdir(weights):
                raise ValueError(f"--weights {weights}: no such file")
            file = weights
            if is_remote(weights):
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tpufeed-"))
                # By its end Keras tells what a file holds.
                file = os.path.join(folder, weights.rpartition("/")[2])
                tf.io.gfile.copy(weights, file)
        except (tf.errors.OpError, OSError) as error:
            raise ValueError(f"--weights {weights}: cannot be read: {one_line(error)}") from error
        yield file


def _build_body(
    name: str, input_shape: Shape, classes: int, weights: str | None, file: str | None
) -> tuple[Any, Callable[[Any], Any] | None]:
    """The network, and the scaling that belongs to it, if any does."""
    if name.startswith(KERAS_PREFIX):
        return _from_keras(name.removeprefix(KERAS_PREFIX), input_shape, classes, weights, file)
    make = {"lenet5": lenet5, "convnet": convnet, "squeezenet": squeezenet}.get(name)
    if user := USER_MODEL.fullmatch(name):
        make = load_function(user["file"], user["function"])
    if make is None:
        raise ValueError(f"--model {name}: allowed are {MODEL_FORMS}")
    try:
        return make(input_shape, classes), None
    except Exception as error:  # the user's function raises what it likes
        raise _cannot_build(name, input_shape, error) from error


def _cannot_build(name: str, input_shape: Shape, error: Exception) -> ValueError:
    size = "x".join(map(str, input_shape))
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return ValueError(
        f"--model {name}: cannot be built for pictures of {size}: {kind}{one_line(error)}"
    )


def _make_scaling(
    scaling: str, name: str, mean: Sequence[float] | None, std: Sequence[float] | None
) -> Callable[[Any], Any] | None:
    """The layer for a scaling; None for none, or for "auto" where the network brings its own."""
    import keras

    if scaling == "auto":
        if name.startswith(KERAS_PREFIX):
            return None
        standard = name in ("convnet", "squeezenet") and mean and std and min(std) > 0
        scaling = "standard" if standard else "unit"
    if scaling == "none":
        return keras.layers.Rescaling(1.0)
    if scaling == "unit":
        return keras.layers.Rescaling(1 / 255)
    if not mean or not std or min(std) <= 0:
        raise ValueError(
            f"--scaling standard: needs the channels' mean and deviation, dataset.json has {mean} "
            f"and {std}; use --scaling unit"
        )
    # One multiplication and addition, where Normalization subtracts and divides.
    return keras.layers.Rescaling(
        [1 / (255 * s) for s in std], [-m / s for m, s in zip(mean, std, strict=True)]
    )


def _from_keras(
    name: str, input_shape: Shape, classes: int, weights: str | None, file: str | None
) -> tuple[Any, Callable[[Any], Any] | None]:
    import keras

    make = getattr(keras.applications, name, None)
    if not name[:1].isupper() or make is None:
        known = ", ".join(n for n in dir(keras.applications) if n[0].isupper())
        raise ValueError(f"--model keras:{name}: keras.applications has none such; it has {known}")
    if weights and weights.endswith(".keras"):
        weights = file = None  # those of a whole model, loaded when there is one
    try:
        base = make(include_top=False, weights=file, input_shape=input_shape)
    except Exception as error:
        # A download fails in many ways (URLError, Exception, OSError); a file in as many.
        if weights is None:
            raise _cannot_build(KERAS_PREFIX + name, input_shape, error) from error
        remedy = (
            "without internet, give a file of weights: --weights FILE.weights.h5"
            if weights == "imagenet"
            else "it must hold this network's weights, made with include_top=False"
        )
        raise ValueError(f"--weights {weights}: {one_line(error)}; {remedy}") from error
    body = keras.Sequential(
        [
            keras.Input(input_shape),
            base,
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(classes, dtype="float32"),
        ],
        name=name.lower(),
    )
    return body, _published_scaling(sys.modules[make.__module__].preprocess_input, input_shape[2])


def _published_scaling(
    preprocess: Callable[[Any], Any], channels: int
) -> Callable[[Any], Any] | None:
    """The scaling that a network of keras.applications was published with, as layers.

    Keras has it as a function of arrays only, a different one a family. Each is a scale and an
    offset a channel, for some with the channels reversed, so three pixels tell which.
    """
    import keras
    import numpy as np

    if channels != 3:
        return keras.layers.Rescaling(1 / 127.5, -1)
    black = preprocess(np.zeros((1, 1, 1, 3), np.float32))[0, 0, 0]
    colors = preprocess(np.diag([255.0] * 3).astype(np.float32)[None])[0] - black
    reversed_ = bool(abs(colors[0, 0]) < abs(colors[0, 2]))
    scale = (np.diag(colors[:, ::-1] if reversed_ else colors) / 255).astype(float)
    layer = keras.layers.Rescaling(
        (scale[::-1] if reversed_ else scale).tolist(), black.astype(float).tolist()
    )
    return (lambda x: layer(keras.ops.flip(x, axis=-1))) if reversed_ else layer


def load_function(file: str, function: str) -> Callable[..., Any]:
    """Returns a function of a Python file, which is run for it.

    Raises:
      ValueError: no such file, it cannot be run, or it has no such function.
    """
    found = getattr(_run_file(file), function, None)
    if not callable(found):
        raise ValueError(f"{file}: has no function {function}(input_shape, classes)")
    return found


def load_objects(file: str) -> dict[str, Any]:
    """Returns the classes and functions of a Python file, by name, for Keras to find layers in.

    Raises:
      ValueError: no such file, or it cannot be run.
    """
    module = _run_file(file)
    return {
        name: value
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == _USER_MODULE
    }


def _run_file(file: str) -> ModuleType:
    if not os.path.isfile(file):
        raise ValueError(f"{file}: no such file")
    spec = importlib.util.spec_from_file_location(_USER_MODULE, file)
    assert spec and spec.loader, file
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{file}: {type(error).__name__}: {one_line(error)}") from error
    return module


def _check_logits(model: Any, name: str, input_shape: Shape, classes: int) -> None:
    import keras

    if not isinstance(model, keras.Model):
        raise ValueError(
            f"--model {name}: returned {type(model).__name__}, must return a keras.Model"
        )
    shape = getattr(model, "output_shape", None)
    if shape != (None, classes):
        raise ValueError(
            f"--model {name}: its output is {shape}, must be logits of shape (None, {classes})"
        )
    if USER_MODEL.fullmatch(name) and _ends_with_softmax(model, input_shape):
        raise ValueError(f"--model {name}: ends with softmax, must return logits: drop it")


def _ends_with_softmax(model: Any, input_shape: Shape) -> bool:
    """Whether its graph does, whichever layer, activation or function put the softmax there."""
    import tensorflow as tf

    pixels = tf.TensorSpec((None, *input_shape), tf.float32)
    traced = tf.function(lambda x: model(x, training=False)).get_concrete_function(pixels)
    last = traced.outputs[0].op
    while last.type in _PASSING_ON:
        last = last.inputs[0].op
    return last.type == "Softmax"


def _check_loads_again(model: Any, name: str, file: str) -> None:
    """Refuses what can be trained and saved but not be loaded, before the training is spent."""
    import keras

    try:
        config = keras.saving.serialize_keras_object(model)
        keras.saving.deserialize_keras_object(config, custom_objects=load_objects(file))
    except Exception as error:  # the user's layers raise what they like
        lambdas = [layer.name for layer in _layers_of(model) if type(layer) is keras.layers.Lambda]
        layers = f": layer {', '.join(lambdas)} is a Lambda" if lambdas else f": {one_line(error)}"
        raise ValueError(
            f"--model {name}: could be saved, but not loaded again{layers}: write a layer class "
            "with get_config, registered by keras.saving.register_keras_serializable()"
        ) from error


def _layers_of(model: Any) -> Iterator[Any]:
    for layer in getattr(model, "layers", ()):
        yield layer
        yield from _layers_of(layer)


def _load_weights(model: Any, weights: str, file: str) -> None:
    try:
        model.load_weights(file)
    except Exception as error:  # h5py, zipfile and Keras raise what they like
        raise ValueError(
            f"--weights {weights}: do not fit {model.name}: {one_line(error)}"
        ) from error


@contextlib.contextmanager
def _dtype_policy(name: str) -> Iterator[None]:
    import keras

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def one_line(error: BaseException) -> str:
    """Returns what an error of Keras's says, on one line and without its colours."""
    # Of nested layers Keras tells each with all its settings, and what is wrong at the end.
    text = _COLOR.sub("", str(error)).rpartition("Exception encountered: ")[2]
    return " ".join(text.split())[:200] or type(error).__name__
