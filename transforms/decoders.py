"""Records are prepared in processes of their own, which import no Beam.

They use every core, as threads that share an interpreter do not. A decoder that takes its process
down with it costs that one image, and so does one that never ends; not the run.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from transforms.image import estimate_bytes
from transforms.prepare import PreparedRecord, RecordPolicy, Source, prepare_record, reject_image
from transforms.records import Exclusions, ImageError, ImageRef, Reject

# A second request waits at each process, so that it is not idle while this one writes.
_REQUESTS = 2
# Requests under way, a process: what one that takes long holds up is bounded.
_UNDER_WAY = 4
# Images in a request: to be woken for each would cost as much as a small one's preparation. Large
# ones come alone, since whoever waits for the last of a shard waits for all of its request.
_IMAGES_AT_ONCE = 16
_BYTES_AT_ONCE = 2**19
_UNKNOWN_BYTES = 100_000  # of a source whose size the listing does not tell
# What a pipe takes, whoever reads or does not: the least of any system, and each character may be
# four bytes of it.
_PIPE_TAKES = 2**12
LONGEST = 300.0  # seconds for a request; what then was not alone is asked for once more, alone
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
_BOOT += "from transforms.decoders import serve; serve(int(sys.argv[1]))"

Outcome = PreparedRecord | Reject


@dataclasses.dataclass(frozen=True)
class Task:
    """What is the same for all images of a run; see prepare.prepare_record."""

    policy: RecordPolicy
    labels: Mapping[str, int]
    exclusions: Exclusions


@dataclasses.dataclass
class _Slot:
    """One image under way."""

    ref: ImageRef
    source: Source | None
    outcome: Outcome | None = None
    deaths: int = 0


class _Decoder:
    """One process, and its requests, the oldest first: it answers in that order."""

    def __init__(self) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(number), json.dumps(sys.path)],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # Ctrl-C is this process's to take; the other ends when the pipe does.
                start_new_session=True,
            )
        self._task: Task | None = None
        self._ready = False
        self.requests: collections.deque[list[_Slot]] = collections.deque()
        self.since = 0.0

    def has_room(self, slots: list[_Slot]) -> bool:
        """Whether it takes one more request now."""
        # A long request must find it reading: it might be about to write, as this one is.
        return len(self.requests) < (1 if _is_long(slots) else _REQUESTS)

    def ask(self, slots: list[_Slot], task: Task) -> None:
        """Sends a request."""
        if not self.requests:
            self.since = time.monotonic()
        self.requests.append(slots)
        news = None if task is self._task else task
        self._task = task
        with contextlib.suppress(OSError):  # it is dead, as `receive` will tell
            wanted = [(slot.ref, slot.source) for slot in slots]
            self.connection.send_bytes(pickle.dumps((news, wanted)))

    def receive(self) -> None:
        """Takes an answer.

        Raises:
          EOFError: the process is dead; says how it ended.
          RuntimeError: it never came up.
          Exception: what it raised, which is no fault of the image.
        """
        try:
            answer = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            how = self.end()
            if self._ready or how.startswith("SIG"):
                raise EOFError(how) from error
            raise RuntimeError(f"a decoder process did not start: {how}") from error
        if isinstance(answer, Exception):
            raise answer
        if self._ready:
            for slot, outcome in zip(self.requests.popleft(), answer, strict=True):
                slot.outcome = outcome
        self._ready = True
        self.since = time.monotonic()

    def end(self) -> str:
        """Ends the process; returns how it had ended by itself, which its pipe may tell before."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.1)
        self._process.kill()
        self.connection.close()
        try:
            status = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:  # stuck in the kernel, as in a dead server's files
            return "SIGKILL, which it has not followed yet"
        return signal.Signals(-status).name if status < 0 else f"exit status {status}"

    def peak_memory(self) -> int:
        """Returns the largest resident set so far, in bytes; 0 where the system does not tell."""
        with contextlib.suppress(OSError), open(f"/proc/{self._process.pid}/status") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return 0

    def abandon(self) -> None:
        """Ends the process and no more; the pipe is closed with this object."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)


class _Team:
    """The processes that one shard is prepared by."""

    def __init__(self, decoders: list[_Decoder], task: Task, longest: float):
        self._decoders = decoders
        self._task = task
        self._longest = longest
        self._again: collections.deque[_Slot] = collections.deque()

    def ask(self, slots: list[_Slot]) -> None:
        """Hands on a request, as soon as a process has room for it."""
        while not self._try(slots):
            self.wait()

    def _try(self, slots: list[_Slot]) -> bool:
        free = [decoder for decoder in self._decoders if decoder.has_room(slots)]
        if free:
            min(free, key=lambda decoder: len(decoder.requests)).ask(slots, self._task)
        return bool(free)

    def wait(self) -> None:
        """Waits for what comes next: answers, a death, or the time's end."""
        while self._again and self._try([self._again[0]]):
            self._again.popleft()
        busy = {decoder.connection: decoder for decoder in self._decoders if decoder.requests}
        ends = min(decoder.since for decoder in busy.values()) + self._longest
        remaining = max(0.0, ends - time.monotonic())
        for connection in multiprocessing.connection.wait(list(busy), remaining):
            decoder = busy.pop(cast(multiprocessing.connection.Connection, connection))
            try:
                decoder.receive()
            except EOFError as error:
                self._replace(decoder, functools.partial(_explain_death, how=str(error)))
        for decoder in busy.values():
            if time.monotonic() >= decoder.since + self._longest:
                decoder.end()
                self._replace(decoder, lambda _: self._explain_delay())

    def _replace(self, dead: _Decoder, explain: Callable[[_Slot], ImageError | None]) -> None:
        """Has what the other did not do done again, each image alone, so that it is to blame.

        Without the one that was alone already, where that is explained by it.
        """
        self._decoders[self._decoders.index(dead)] = _Decoder()
        first = dead.requests[0]
        if len(first) == 1 and (error := explain(first[0])):
            first[0].outcome = reject_image(first[0].ref, error)
        lost = [slot for slots in dead.requests for slot in slots if slot.outcome is None]
        self._again.extendleft(reversed(lost))

    def _explain_delay(self) -> ImageError:
        return ImageError("timeout", f"not done after {self._longest:g} s")


def _explain_death(slot: _Slot, *, how: str) -> ImageError | None:
    # Once may be anybody's doing, such as a system's that is short of memory.
    slot.deaths += 1
    if slot.deaths == 1:
        return None
    return ImageError("decoder_crash", f"the decoder's process died twice, by {how}")


_lock = threading.Lock()
_idle: list[_Decoder] = []


def start_decoders(number: int) -> None:
    """Starts processes ahead of their use, while this one does something else."""
    with _lock:
        _idle.extend(_Decoder() for _ in range(number))


def end_decoders() -> None:
    """Ends the processes that have nothing to do; they would end with this one, too."""
    with _lock:
        decoders, _idle[:] = _idle[:], []
    for decoder in decoders:
        decoder.abandon()


def peak_memory() -> int:
    """Returns the largest resident set, in bytes, of a process that has nothing to do now."""
    with _lock:
        return max((decoder.peak_memory() for decoder in _idle), default=0)


@contextlib.contextmanager
def _borrow_decoders(number: int) -> Iterator[list[_Decoder]]:
    with _lock:
        team = [_idle.pop() for _ in range(min(number, len(_idle)))]
    team += [_Decoder() for _ in range(number - len(team))]
    try:
        yield team
    except BaseException:
        # Given up in the middle, perhaps by the garbage collector, which may have closed the pipes
        # by now: their numbers can be another file's already, so nothing more is done with them.
        for decoder in team:
            decoder.abandon()
        raise
    with _lock:
        _idle.extend(team)


def prepare_images(
    refs: Sequence[ImageRef],
    *,
    task: Task,
    processes: int,
    sources: Iterable[Source | Reject | None] | None = None,
    longest: float = LONGEST,
) -> Generator[Outcome, None, None]:
    """Prepares images in processes; outcomes come in the order of the refs.

    Args:
      refs: the images.
      task: what becomes of them.
      processes: how many work at once.
      sources: for each ref what `read_source` returned, or why it returned nothing, or None for the
        process to read it; None for that everywhere.
      longest: seconds for a request; an image that was asked for alone then is a reject, and one
        among others is asked for again, alone.

    Raises:
      DataError: as prepare.read_source.
      RuntimeError: a process does not come up.
    """
    with _borrow_decoders(processes) as decoders:
        team = _Team(decoders, task, longest)
        under_way: collections.deque[list[_Slot]] = collections.deque()
        for slots in _make_requests(refs, sources, task=task, processes=processes):
            under_way.append(slots)
            if slots[0].outcome is None:
                team.ask(slots)
            while len(under_way) >= processes * _UNDER_WAY and not _is_done(under_way[0]):
                team.wait()
            while under_way and _is_done(under_way[0]):
                yield from _outcomes(under_way.popleft())
        for slots in under_way:
            while not _is_done(slots):
                team.wait()
            yield from _outcomes(slots)


def _make_requests(
    refs: Sequence[ImageRef],
    sources: Iterable[Source | Reject | None] | None,
    *,
    task: Task,
    processes: int,
) -> Iterator[list[_Slot]]:
    """Yields images by the request; ever fewer towards the end, so that all processes end at once.

    What was read before comes alone: it is large, and others are read meanwhile. So does what may
    become a picture of any size: answers are held in memory.
    """
    slots: list[_Slot] = []
    held = 0
    pixels = task.policy.pixels
    at_once = _IMAGES_AT_ONCE if pixels.fixed_size else 1
    given = itertools.repeat(None, len(refs)) if sources is None else sources
    for place, (ref, source) in enumerate(zip(refs, given, strict=True)):
        known = ref.size if ref.size >= 0 else _UNKNOWN_BYTES
        size = max(known, estimate_bytes(ref.size, policy=pixels)) + _weigh_ref(ref)
        most = min(at_once, (len(refs) - place) // (processes * _UNDER_WAY))
        full = len(slots) >= most or held + size > _BYTES_AT_ONCE
        if slots and (full or source is not None):
            yield slots
            slots, held = [], 0
        if isinstance(source, Reject):
            yield [_Slot(ref, None, outcome=source)]
        elif source is not None:
            yield [_Slot(ref, source)]
        else:
            slots.append(_Slot(ref, None))
            held += size
    if slots:
        yield slots


def _is_long(slots: list[_Slot]) -> bool:
    if slots[0].source is not None:
        return True
    return sum(_weigh_ref(slot.ref) for slot in slots) > _PIPE_TAKES


def _weigh_ref(ref: ImageRef) -> int:
    """Returns some characters that a ref takes in a message; CSV cells and copies may be many."""
    weight = 64 + len(ref.key) + len(ref.path) + len(ref.label) + len(ref.group)
    for name, value in ref.features:
        weight += 16 + len(name) + (len(value) if isinstance(value, bytes) else 0)
    for copy in ref.copies:
        weight += 64 + len(copy.key) + len(copy.source) + len(copy.label)
    return weight


def _is_done(slots: Iterable[_Slot]) -> bool:
    return all(slot.outcome is not None for slot in slots)


def _outcomes(slots: Iterable[_Slot]) -> Iterator[Outcome]:
    for slot in slots:
        assert slot.outcome is not None
        yield slot.outcome


def serve(descriptor: int) -> None:
    """Runs a decoder process: answers each request until the pipe is closed.

    Args:
      descriptor: of the pipe's end.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # decoders grumble there; what counts goes back
    with (
        multiprocessing.connection.Connection(descriptor) as connection,
        contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError),
    ):
        connection.send_bytes(pickle.dumps(None))
        task: Task | None = None
        while True:
            news, wanted = pickle.loads(connection.recv_bytes())
            task = news or task
            assert task is not None
            connection.send_bytes(_answer(wanted, task))


def _answer(wanted: Iterable[tuple[ImageRef, Source | None]], task: Task) -> bytes:
    try:
        return pickle.dumps([prepare_record(*each, **_settings(task)) for each in wanted])
    except Exception as error:
        with contextlib.suppress(Exception):
            return pickle.dumps(error)
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


def _settings(task: Task) -> dict[str, Any]:
    return {"policy": task.policy, "labels": task.labels, "exclusions": task.exclusions}
