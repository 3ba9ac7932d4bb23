"""Which accelerators there are, and the strategy to train under: TPU, else GPU, else CPU.

An accelerator that was asked for by name, by flag or by environment, and cannot be used is an
error. Without such a name the next kind is taken and the reason is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from transforms.files import is_remote

KINDS = ("CPU", "GPU", "TPU")
EAGER, XLA = BACKENDS = ("TF_EAGER", "XLA")
# Where TensorFlow's resolver looks for a TPU's name, in its order.
TPU_VARIABLES = ("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "TPU_NAME", "TPU_CONFIG")
_CONNECT_SECONDS = 10
_GRPC = re.compile(r"grpc://(?P<host>\[[^\]]+\]|[^:/]+)(?::(?P<port>\d+))?")
_GRPC_PORT = 8470
# What a CPU build writes at every start, healthy or not, whatever the log level.
_NOISE = re.compile(
    r"before absl::InitializeLog|oneDNN custom operations|cudart_stub|failed call to cuInit"
    r"|cpu_feature_guard|To enable the following instructions"
)
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Device:
    """A place that computes.

    Attributes:
      kind: one of KINDS.
      ordinal: from 0 within the kind, over all hosts.
      backend: TF_EAGER runs op by op, XLA runs compiled programs.
    """

    kind: str
    ordinal: int
    backend: str

    def __repr__(self) -> str:
        """Returns the device as the X10 tutorial prints it."""
        return f"Device(kind: .{self.kind}, ordinal: {self.ordinal}, backend: .{self.backend})"


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a training runs.

    Attributes:
      strategy: the tf.distribute strategy, to be entered before a model is made.
      kind: of the devices that it uses, one of KINDS.
      reason: why this one, for the log.
    """

    strategy: Any
    kind: str
    reason: str

    @property
    def replicas(self) -> int:
        """Copies of the model, each with a batch of its own."""
        return self.strategy.num_replicas_in_sync

    @property
    def name(self) -> str:
        """The strategy's class, without TensorFlow's suffixes for versions."""
        return re.sub(r"^_|V\d$", "", type(self.strategy).__name__)


def import_tensorflow(*, quiet: bool = True) -> Any:
    """Imports TensorFlow and lets it look for devices, without its start-up noise.

    Args:
      quiet: whether to hold back the lines that every healthy start writes to descriptor 2. All
        others are passed on. Not done where the user chose TF_CPP_MIN_LOG_LEVEL.

    Returns:
      The module.

    Raises:
      RuntimeError: TensorFlow is not installed.
    """
    quiet = quiet and "TF_CPP_MIN_LOG_LEVEL" not in os.environ and "tensorflow" not in sys.modules
    if quiet:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # errors; the warnings repeat them
    with _without_noise() if quiet else contextlib.nullcontext():
        try:
            import tensorflow
        except ImportError as error:
            raise RuntimeError(
                f"tensorflow cannot be imported ({error}): pip install 'tpufeed[train]'"
            ) from error
        tensorflow.config.list_physical_devices()
    return tensorflow


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    # TensorFlow's C++ writes to the descriptor itself, so sys.stderr is not the place to filter.
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            held.seek(0)
            for line in held.read().decode(errors="replace").splitlines():
                if not _NOISE.search(line):
                    print(line, file=sys.stderr)


def list_devices() -> tuple[Device, ...]:
    """Returns every device with each backend that it has; TPUs once they are initialised."""
    import tensorflow as tf

    return name_devices(device.device_type for device in tf.config.list_logical_devices())


def name_devices(kinds: Iterable[str]) -> tuple[Device, ...]:
    """Returns the devices behind TensorFlow's list of device types.

    Args:
      kinds: the type of each logical device, in order; others than KINDS are left out.
    """
    kinds = list(kinds)
    return tuple(
        Device(kind, ordinal, backend)
        for kind in KINDS
        for ordinal in range(kinds.count(kind))
        # A TPU has no kernels to run op by op.
        for backend in ((XLA,) if kind == "TPU" else BACKENDS)
    )


def default_eager(devices: Sequence[Device]) -> Device:
    """Returns where ops run one by one unless told otherwise: the first GPU, else the CPU."""
    return _first(devices, EAGER, ("GPU", "CPU"))


def default_compiled(devices: Sequence[Device]) -> Device:
    """Returns where compiled programs run: the first TPU core, else GPU, else the CPU."""
    return _first(devices, XLA, ("TPU", "GPU", "CPU"))


def _first(devices: Sequence[Device], backend: str, kinds: Sequence[str]) -> Device:
    for kind in kinds:
        for device in devices:
            if (device.kind, device.backend) == (kind, backend):
                return device
    raise ValueError(f"devices: none of {', '.join(kinds)} with backend {backend} in {devices}")


def run_on(device: Device, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function such that it runs on the device: op by op, or compiled by XLA.

    Args:
      device: one of list_devices().
      function: takes and returns tensors.

    Raises:
      ValueError: there is no such device.
    """
    import tensorflow as tf

    if device not in (known := list_devices()):
        raise ValueError(f"{device}: no such device; there are {', '.join(map(repr, known))}")
    name = tf.config.list_logical_devices(device.kind)[device.ordinal].name
    call = tf.function(function, jit_compile=True) if device.backend == XLA else function

    def placed(*args: Any) -> Any:
        with tf.device(name):
            return call(*args)

    return placed


def choose_strategy(
    tpu: str = "auto",
    *,
    zone: str | None = None,
    project: str | None = None,
    paths: Sequence[str] = (),
) -> Placement:
    """Returns where to train: a TPU, else all GPUs, else the CPUs.

    Args:
      tpu: "auto" (the TPU that the environment names, else one attached to this machine, else
        none), "none", "local" (attached to this machine), or a name or grpc:// address.
      zone: of a TPU with a name; None for this machine's.
      project: of a TPU with a name; None for this machine's.
      paths: what will be read and written; a TPU on the network must reach them itself.

    Raises:
      ValueError: a TPU was asked for, by argument or environment, and cannot be used; or it is on
        the network and a path is local.
    """
    name, asked = requested_tpu(tpu, environ=os.environ)
    if name is not None:
        return _connect(name, asked, zone=zone, project=project, paths=paths)
    if tpu == "none":
        return _without_tpu("--tpu none")
    if not _tpu_attached():
        return _without_tpu("no TPU is attached and TPU_NAME is not set")
    try:
        return _connect("local", "the attached TPU", zone=None, project=None, paths=())
    except ValueError as error:
        # Nobody named it, so this is no error; but nobody should wait for a slow run either.
        _log.warning("%s", error)
        return _without_tpu(str(error))


def requested_tpu(tpu: str, *, environ: Mapping[str, str]) -> tuple[str | None, str]:
    """Returns the TPU that was asked for by name, None for none, and by what it was asked for.

    Args:
      tpu: as for choose_strategy.
      environ: the environment variables.
    """
    if tpu not in ("auto", "none"):
        return tpu, f"--tpu {tpu}"
    if tpu == "auto":
        for variable in TPU_VARIABLES:
            if value := environ.get(variable):
                # TPU_CONFIG is JSON and the endpoints are a list: TensorFlow reads them itself.
                return value if variable == "TPU_NAME" else "", f"{variable}={value}"
    return None, ""


def check_paths(paths: Iterable[str], *, asked: str) -> None:
    """Refuses what a TPU on the network cannot reach.

    Raises:
      ValueError: a path is local; its workers would look for it on their own disks.
    """
    for path in paths:
        if not is_remote(path):
            raise ValueError(
                f"{path}: a local path, which the TPU of {asked} cannot reach: put it in a bucket "
                "(gs://...), or run on the TPU's own machine with --tpu local"
            )


def _tpu_attached() -> bool:
    import tensorflow as tf

    listed = [*tf.config.list_physical_devices(), *tf.config.list_logical_devices()]
    return any(device.device_type in ("TPU", "TPU_SYSTEM") for device in listed)


def _connect(
    name: str, asked: str, *, zone: str | None, project: str | None, paths: Sequence[str]
) -> Placement:
    import tensorflow as tf

    if name != "local":
        check_paths(paths, asked=asked)
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(name or None, zone, project)
        if name != "local":
            _check_answers(resolver.master())
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        strategy = tf.distribute.TPUStrategy(resolver)
    # Seen: ValueError, NotFoundError, URLError, RuntimeError, ImportError, and the client
    # libraries' own classes, such as oauth2client's, which have no other base in common.
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{asked}: this TPU cannot be used: {type(error).__name__}: {text}; give the name of "
            "a running TPU, local on its own machine, or --tpu none to do without"
        ) from error
    count = len(tf.config.list_logical_devices("TPU"))
    return Placement(strategy, "TPU", f"{asked}: {count} core(s)")


def _check_answers(master: str) -> None:
    # TensorFlow waits for minutes, silently, for an address where nothing listens.
    if found := _GRPC.match(master):
        address = (found["host"].strip("[]"), int(found["port"] or _GRPC_PORT))
        with socket.create_connection(address, timeout=_CONNECT_SECONDS):
            pass


def _without_tpu(reason: str) -> Placement:
    import tensorflow as tf

    gpus = tf.config.list_logical_devices("GPU")
    cpus = tf.config.list_logical_devices("CPU")
    if gpus:
        strategy = _mirror(tuple(gpu.name for gpu in gpus))
        return Placement(strategy, "GPU", f"{reason}; {len(gpus)} GPU(s)")
    if len(cpus) > 1:
        strategy = _mirror(tuple(cpu.name for cpu in cpus))
        return Placement(
            strategy, "CPU", f"{reason}; TensorFlow lists no GPU; {len(cpus)} logical CPUs"
        )
    strategy = tf.distribute.get_strategy()
    return Placement(strategy, "CPU", f"{reason}; TensorFlow lists no GPU; the CPU")


@functools.cache
def _mirror(names: tuple[str, ...]) -> Any:
    # One a process: a second over the same devices numbers its exchanges like the first, and
    # TensorFlow then aborts with "Shape mismatch in the collective instance".
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(names)


def describe_devices(*, as_json: bool = False) -> str:
    """Returns what `tpufeed devices` prints: the devices, the defaults, and where to train.

    Raises:
      ValueError: the environment names a TPU that cannot be used.
    """
    placement = choose_strategy()
    devices = list_devices()
    eager, compiled = default_eager(devices), default_compiled(devices)
    if as_json:
        document = {
            "devices": [dataclasses.asdict(device) for device in devices],
            "default_eager": dataclasses.asdict(eager),
            "default_compiled": dataclasses.asdict(compiled),
            "strategy": placement.name,
            "replicas": placement.replicas,
            "reason": placement.reason,
        }
        return json.dumps(document)
    lines = [f"{'kind':<6}{'ordinal':<9}backend"]
    lines += [f"{device.kind:<6}{device.ordinal:<9}{device.backend}" for device in devices]
    lines += [f"default eager:    {eager}", f"default compiled: {compiled}"]
    lines += [
        f"training uses:    {placement.name}, {placement.replicas} replica(s): {placement.reason}"
    ]
    return "\n".join(lines)
