"""The models: their sizes, their scaling, and what is refused."""

import contextlib
import socket

import numpy as np
import pytest

from pipeline import models
from pipeline.devices import import_tensorflow
from pipeline.models import build_model

tf = import_tensorflow()
import keras  # noqa: E402  (after TensorFlow, whose start-up noise is held back)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters", "trainable"),
    [
        ("lenet5", (28, 28, 1), 10, 61_706, 61_706),
        ("convnet", (192, 192, 3), 5, 293_233, 293_233),
        ("convnet", (32, 48, 3), 5, 293_233, 293_233),
        ("squeezenet", (192, 192, 3), 5, 120_613, 119_301),
        ("squeezenet", (32, 48, 3), 5, 120_613, 119_301),
    ],
)
def test_parameters(name, shape, classes, parameters, trainable):
    model = build_model(name, input_shape=shape, classes=classes, mean=[0.5], std=[0.2])
    assert model.count_params() == parameters
    assert sum(np.prod(weight.shape) for weight in model.trainable_weights) == trainable
    assert model.output_shape == (None, classes)


def test_lenet5_is_the_tutorials():
    layers = models.lenet5((28, 28, 1), 10).layers
    shapes = [layer.output.shape[1:] for layer in layers]
    assert shapes == [
        (28, 28, 6),
        (14, 14, 6),
        (10, 10, 16),
        (5, 5, 16),
        (400,),
        (120,),
        (84,),
        (10,),
    ]
    assert layers[-1].activation is keras.activations.linear
    kernel = layers[0].kernel.numpy()
    limit = np.sqrt(6 / (25 * 1 + 25 * 6))
    assert 0.9 * limit < np.abs(kernel).max() <= limit
    assert not layers[0].bias.numpy().any()


def pixels(shape):
    return np.random.default_rng(0).integers(0, 256, (2, *shape), np.uint8)


@pytest.mark.parametrize("name", ["lenet5", "squeezenet"])
def test_mixed_bfloat16_keeps_weights_and_logits_in_float32(name):
    policy = keras.config.dtype_policy()
    model = build_model(name, input_shape=(16, 16, 3), classes=4, mixed_bfloat16=True)
    assert keras.config.dtype_policy() == policy
    assert {weight.dtype for weight in model.weights} == {"float32"}
    assert model.layers[-1].layers[1].compute_dtype == "bfloat16"
    assert model(pixels((16, 16, 3))).dtype == tf.float32


def scaled(picture, **arguments):
    """What the network itself gets to see."""
    model = build_model(input_shape=picture.shape[1:], classes=3, **arguments)
    return keras.Model(model.input, model.layers[1].output)(picture).numpy()


def test_scalings():
    picture = pixels((16, 16, 3))
    mean, std = [0.5, 0.4, 0.3], [0.3, 0.2, 0.1]
    unit = picture / 255
    standard = (unit - mean) / std
    moments = {"mean": mean, "std": std}
    for name, scaling, expected in (
        ("lenet5", "auto", unit),
        ("convnet", "auto", standard),
        ("convnet", "unit", unit),
        ("lenet5", "standard", standard),
        ("lenet5", "none", picture),
    ):
        seen = scaled(picture, name=name, scaling=scaling, **moments)
        np.testing.assert_allclose(seen, expected, atol=1e-5)
    np.testing.assert_allclose(scaled(picture, name="convnet"), unit, atol=1e-6)


def test_standard_scaling_needs_moments():
    with pytest.raises(ValueError, match="--scaling standard: needs the channels' mean"):
        build_model("lenet5", input_shape=(28, 28, 1), classes=2, scaling="standard")


@pytest.mark.parametrize(
    "module", ["vgg16", "xception", "densenet", "efficientnet", "mobilenet_v3", "resnet_v2"]
)
def test_keras_networks_get_what_they_were_published_with(module):
    preprocess = getattr(keras.applications, module).preprocess_input
    picture = pixels((4, 4, 3)).astype(np.float32)
    scale = models._published_scaling(preprocess, 3)
    np.testing.assert_allclose(scale(picture), preprocess(picture.copy()), atol=1e-4)


def test_keras_network_and_its_weights(tmp_path):
    shape = (32, 32, 3)
    first = build_model("keras:MobileNet", input_shape=shape, classes=4)
    assert first.output_shape == (None, 4)
    top = first.layers[-1].layers
    top[0].save_weights(tmp_path / "base.weights.h5")
    file = str(tmp_path / "base.weights.h5")
    second = build_model("keras:MobileNet", input_shape=shape, classes=4, weights=file)
    for a, b in zip(top[0].weights, second.layers[-1].layers[0].weights, strict=True):
        assert np.array_equal(a, b)
    first.save(tmp_path / "model.keras")
    third = build_model(
        "keras:MobileNet", input_shape=shape, classes=4, weights=str(tmp_path / "model.keras")
    )
    picture = pixels(shape)
    assert np.array_equal(first(picture), third(picture))
    with pytest.raises(ValueError, match=r"^--weights .*base.weights.h5: do not fit lenet5"):
        build_model("lenet5", input_shape=shape, classes=4, weights=file)


def test_imagenet_weights_without_network(monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(keras.config, "keras_home", lambda: str(tmp_path), raising=False)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"^--weights imagenet: .*no network; without internet, g"):
        build_model("keras:MobileNet", input_shape=(224, 224, 3), classes=4, weights="imagenet")


FILE = """
import keras

def good(input_shape, classes):
    return keras.Sequential(
        [keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(classes)]
    )

def softmax(input_shape, classes):
    return keras.Sequential(
        [keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(classes, "softmax")]
    )

def layer(input_shape, classes):
    return keras.Sequential([good(input_shape, classes), keras.layers.Softmax()])

def nested(input_shape, classes):
    inputs = keras.Input(input_shape)
    return keras.Model(inputs, keras.layers.Identity()(softmax(input_shape, classes)(inputs)))

def activation(input_shape, classes):
    last = keras.layers.Activation(keras.ops.softmax, dtype="float32")
    return keras.Sequential([good(input_shape, classes), last])

def inside(input_shape, classes):
    inputs = keras.Input(input_shape)
    x = keras.layers.Dense(8, "softmax")(keras.layers.Flatten()(inputs))
    return keras.Model(inputs, keras.layers.Dense(classes)(x))

class Twice(keras.layers.Layer):
    def call(self, x):
        return x * 2

class Times(keras.layers.Layer):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def call(self, x):
        return x * self.factor

def twice(input_shape, classes):
    return keras.Sequential([good(input_shape, classes), Twice()])

def times(input_shape, classes):
    return keras.Sequential([good(input_shape, classes), Times(keras.Variable(2.0))])

def anything(input_shape, classes):
    last = keras.layers.Lambda(lambda x: x * 2, name="doubled")
    return keras.Sequential(
        [keras.Input(input_shape), keras.Sequential([good(input_shape, classes), last])]
    )

def two(input_shape, classes):
    return good(input_shape, 2)

def nothing(input_shape, classes):
    pass

def fails(input_shape, classes):
    return undefined
"""


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def test_users_own_model(user_file):
    for function in ("good", "inside", "twice"):
        model = build_model(f"{user_file}:{function}", input_shape=(4, 4, 1), classes=3)
        assert model(pixels((4, 4, 1))).shape == (2, 3)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("softmax", "ends with softmax, must return logits: drop it"),
        ("layer", "ends with softmax, must return logits: drop it"),
        ("nested", "ends with softmax, must return logits: drop it"),
        ("activation", "ends with softmax, must return logits: drop it"),
        ("anything", "could be saved, but not loaded again: layer doubled is a Lambda: write a la"),
        (
            "times",
            "could be saved, but not loaded again: .*Times.*: write a layer class with get_c",
        ),
        ("two", r"its output is \(None, 2\), must be logits of shape \(None, 3\)"),
        ("nothing", "returned NoneType, must return a keras.Model"),
        ("fails", "cannot be built for pictures of 4x4x1: NameError: name 'undefined' is not def"),
        ("absent", "mine.py: has no function absent"),
    ],
)
def test_users_wrong_models(user_file, function, message):
    with pytest.raises(ValueError, match=message):
        build_model(f"{user_file}:{function}", input_shape=(4, 4, 1), classes=3)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_softmax_is_found_in_bfloat16_too(user_file, mixed):
    for function, refused in (("layer", True), ("inside", False)):
        with pytest.raises(ValueError, match="softmax") if refused else contextlib.nullcontext():
            build_model(
                f"{user_file}:{function}", input_shape=(4, 4, 1), classes=2, mixed_bfloat16=mixed
            )


def test_a_users_logits_are_float32_too(user_file):
    arguments = {"input_shape": (4, 4, 1), "classes": 2, "mixed_bfloat16": True}
    model = build_model(f"{user_file}:inside", **arguments)
    assert model.get_layer(index=-2).compute_dtype == "bfloat16"
    assert model(pixels((4, 4, 1))).dtype == tf.float32


def test_weights_in_a_bucket(tmp_path):
    """TensorFlow's file system in memory stands for the bucket: Keras cannot read it either."""
    shape = (28, 28, 1)
    first = build_model("lenet5", input_shape=shape, classes=4)
    first.save(tmp_path / "model.keras")
    first.save_weights(tmp_path / "first.weights.h5")
    network = (
        build_model("keras:MobileNet", input_shape=(32, 32, 3), classes=4).layers[-1].layers[0]
    )
    network.save_weights(tmp_path / "base.weights.h5")
    for name in ("model.keras", "first.weights.h5", "base.weights.h5"):
        tf.io.gfile.copy(str(tmp_path / name), f"ram://{tmp_path}/{name}", overwrite=True)
        (tmp_path / name).unlink()
    for name in ("model.keras", "first.weights.h5"):
        weights = f"ram://{tmp_path}/{name}"
        second = build_model("lenet5", input_shape=shape, classes=4, weights=weights)
        assert np.array_equal(first(pixels(shape)), second(pixels(shape)))
    weights = f"ram://{tmp_path}/base.weights.h5"
    second = build_model("keras:MobileNet", input_shape=(32, 32, 3), classes=4, weights=weights)
    for mine, theirs in zip(second.layers[-1].layers[0].weights, network.weights, strict=True):
        assert np.array_equal(mine, theirs)
    with pytest.raises(ValueError, match=f"^--weights {weights}: do not fit lenet5: "):
        build_model("lenet5", input_shape=shape, classes=4, weights=weights)
    for name in ("none.keras", ""):
        with pytest.raises(ValueError, match=rf"^--weights ram://{tmp_path}/{name}: no such file"):
            build_model("lenet5", input_shape=shape, classes=4, weights=f"ram://{tmp_path}/{name}")


def test_users_broken_files(tmp_path):
    with pytest.raises(ValueError, match="none.py: no such file"):
        build_model(f"{tmp_path}/none.py:f", input_shape=(4, 4, 1), classes=3)
    (tmp_path / "bad.py").write_text("def f(:\n")
    with pytest.raises(ValueError, match="bad.py: SyntaxError: "):
        build_model(f"{tmp_path}/bad.py:f", input_shape=(4, 4, 1), classes=3)


@pytest.mark.parametrize(
    ("name", "shape", "weights", "message"),
    [
        ("alexnet", (28, 28, 1), None, "^--model alexnet: allowed are lenet5, convnet, squeezenet"),
        ("keras:Nope", (32, 32, 3), None, "^--model keras:Nope: keras.applications has none such"),
        ("keras:vgg16", (32, 32, 3), None, "^--model keras:vgg16: keras.applications has none"),
        ("keras:VGG16", (8, 8, 3), None, "^--model keras:VGG16: cannot be built .*8x8x3: Input si"),
        ("lenet5", (8, 8, 1), None, "^--model lenet5: cannot be built for pictures of 8x8x1: "),
        ("lenet5", (28, 28, 1), "/none.weights.h5", "^--weights /none.weights.h5: no such file"),
        ("keras:VGG16", (32, 32, 3), "/none.h5", "^--weights /none.h5: no such file"),
    ],
)
def test_refused(name, shape, weights, message):
    with pytest.raises(ValueError, match=message):
        build_model(name, input_shape=shape, classes=3, weights=weights)
