"""Devices and the choice among them; what a missing TPU raises is provoked for real."""

import json
import logging
import socket

import pytest

from pipeline import devices
from pipeline.__main__ import main
from pipeline.devices import Device, choose_strategy, name_devices, requested_tpu

tf = devices.import_tensorflow()
CPU, XLA_CPU = Device("CPU", 0, "TF_EAGER"), Device("CPU", 0, "XLA")


@pytest.fixture(autouse=True)
def no_tpu_is_named(monkeypatch):
    for variable in devices.TPU_VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def test_device_prints_as_in_the_tutorial():
    assert repr(CPU) == "Device(kind: .CPU, ordinal: 0, backend: .TF_EAGER)"
    assert repr(Device("TPU", 1, "XLA")) == "Device(kind: .TPU, ordinal: 1, backend: .XLA)"


@pytest.mark.parametrize(
    ("kinds", "eager", "compiled"),
    [
        (["CPU"], CPU, XLA_CPU),
        (["CPU", "GPU", "GPU"], Device("GPU", 0, "TF_EAGER"), Device("GPU", 0, "XLA")),
        (["CPU", "TPU_SYSTEM", "TPU", "TPU"], CPU, Device("TPU", 0, "XLA")),
        (["CPU", "GPU", "TPU"], Device("GPU", 0, "TF_EAGER"), Device("TPU", 0, "XLA")),
    ],
)
def test_defaults(kinds, eager, compiled):
    named = name_devices(kinds)
    assert devices.default_eager(named) == eager
    assert devices.default_compiled(named) == compiled


def test_every_core_is_a_device_and_a_tpu_never_eager():
    named = name_devices(["CPU", "TPU_SYSTEM", "TPU", "TPU"])
    assert named == (CPU, XLA_CPU, Device("TPU", 0, "XLA"), Device("TPU", 1, "XLA"))


@pytest.mark.parametrize("device", [CPU, XLA_CPU])
def test_addition_is_the_same_on_either_backend(device):
    add = devices.run_on(device, lambda x, y: x + y)
    assert add(tf.range(3.0), tf.constant([1.5, 2.5, 3.5])).numpy().tolist() == [1.5, 3.5, 5.5]


def test_a_device_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match=r"ordinal: 7, backend: .XLA\): no such device; there are"):
        devices.run_on(Device("TPU", 7, "XLA"), lambda x: x)


@pytest.mark.parametrize(
    ("tpu", "environ", "expected"),
    [
        ("auto", {}, (None, "")),
        ("auto", {"TPU_NAME": ""}, (None, "")),
        ("auto", {"TPU_NAME": "local"}, ("local", "TPU_NAME=local")),
        ("auto", {"TPU_NAME": "a", "TPU_CONFIG": "{}"}, ("a", "TPU_NAME=a")),
        ("auto", {"TPU_CONFIG": "{}"}, ("", "TPU_CONFIG={}")),
        ("none", {"TPU_NAME": "a"}, (None, "")),
        ("local", {"TPU_NAME": "a"}, ("local", "--tpu local")),
        ("b", {"TPU_NAME": "a"}, ("b", "--tpu b")),
    ],
)
def test_who_asked_for_a_tpu(tpu, environ, expected):
    assert requested_tpu(tpu, environ=environ) == expected


def test_without_a_tpu_the_cpu_is_taken_and_the_reason_kept():
    placement = choose_strategy()
    assert (placement.kind, placement.replicas) == ("CPU", 1)
    assert placement.reason.startswith("no TPU is attached and TPU_NAME is not set; Tens")


def test_none_does_not_even_look(monkeypatch):
    monkeypatch.setenv("TPU_NAME", "nonsense")
    assert choose_strategy("none").reason.startswith("--tpu none;")


def test_local_without_one_is_an_error():
    with pytest.raises(ValueError, match="--tpu local: this TPU cannot be used: NotFoundError: "):
        choose_strategy("local")


def test_a_name_that_leads_nowhere_is_an_error(monkeypatch):
    # Off Google's machines the lookup of project and zone fails first, as a URLError.
    with pytest.raises(ValueError, match="^--tpu nonsense: this TPU cannot be used: "):
        choose_strategy("nonsense")
    monkeypatch.setenv("TPU_NAME", "nonsense")
    with pytest.raises(ValueError, match="^TPU_NAME=nonsense: this TPU cannot be used: "):
        choose_strategy()


def test_a_name_with_zone_and_project_needs_credentials(monkeypatch):
    monkeypatch.setenv("NO_GCE_CHECK", "True")
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setenv("CLOUDSDK_CONFIG", "/nonexistent")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    with pytest.raises(ValueError, match="cannot be used: .*(Credential|ImportError)"):
        choose_strategy("nonsense", zone="us-west4-a", project="p")


def test_an_address_where_nothing_listens_is_an_error_at_once():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"grpc://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"{address}: .*ConnectionRefusedError"):
            choose_strategy(address)


def test_endpoints_of_a_cluster_are_asked_for_by_name(monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"grpc://127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setenv("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", endpoint)
        with pytest.raises(ValueError, match="^KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS=grpc:.*ConnectionR"):
            choose_strategy()


def test_an_empty_name_is_no_name():
    with pytest.raises(ValueError, match="cannot be used: ValueError: Please provide a TPU Name"):
        devices._connect("", "TPU_CONFIG", zone=None, project=None, paths=())


def test_a_bad_tpu_config_is_an_error(monkeypatch):
    monkeypatch.setenv("TPU_CONFIG", "{")
    with pytest.raises(ValueError, match=r"^TPU_CONFIG=\{: this TPU cannot be used: JSONDecode"):
        choose_strategy()


def test_an_attached_tpu_that_does_not_answer_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(devices, "_tpu_attached", lambda: True)
    with caplog.at_level(logging.WARNING):
        placement = choose_strategy()
    assert placement.kind == "CPU"
    assert "the attached TPU: this TPU cannot be used: NotFoundError" in caplog.text
    assert "NotFoundError" in placement.reason


def test_a_tpu_on_the_network_reaches_no_local_path():
    paths = ["gs://bucket/records", "/home/me/run"]
    with pytest.raises(ValueError, match=r"^/home/me/run: a local path, which the TPU of --tpu n"):
        choose_strategy("nonsense", paths=paths)


def test_command_lists_devices(capsys):
    assert main(["devices"]) == 0
    text = capsys.readouterr().out
    assert "CPU   0        TF_EAGER\nCPU   0        XLA\n" in text
    assert "default compiled: Device(kind: .CPU, ordinal: 0, backend: .XLA)" in text
    assert main(["devices", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["default_eager"] == {"kind": "CPU", "ordinal": 0, "backend": "TF_EAGER"}
    assert document["replicas"] == 1


def test_command_fails_with_a_tpu_that_is_named_and_missing(capsys, monkeypatch):
    monkeypatch.setenv("TPU_NAME", "nonsense")
    assert main(["devices"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tpufeed devices: error: TPU_NAME=nonsense: this TPU cannot be used")
    assert error.count("\n") == 1
