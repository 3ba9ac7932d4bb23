"""tpufeed and other ways to do the same, measured by turns in one run.

    python benchmarks/run.py [--quick] [--json FILE] [--only A,D]
        [--flowers DIR] [--photos DIR] [--mnist DIR]

DIR of flowers holds a folder of JPEGs for each class, DIR of photos large JPEGs, DIR of MNIST its
four IDX files; what is not given is drawn. Prints the tables in Markdown. Figures are medians over
the rounds, with the smallest and the largest. "CPU" is processor time of all processes, which other
work on the machine disturbs least. --quick does everything on a few pictures: it shows that the
benchmark works, and its figures mean nothing.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import inputs  # noqa: E402
import slow_store  # noqa: E402

MARK = "<!-- measured -->"
TPUFEED = [sys.executable, "-m", "pipeline"]
# From the table of the X10 tutorial, LeNet-5 on MNIST, seconds an epoch on a CPU.
X10 = {"X10 tutorial, eager": 11.8, "X10 tutorial, X10": 13.4}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is measured, and how often."""

    flowers: int = 10_000
    photos: int = 320
    half: int = 5_000
    few: int = 100
    reader: int = 3_670
    tiny: tuple[int, int] = (20_000, 200_000)
    rounds: int = 3
    epochs: int = 3
    reader_seconds: float = 2.0
    slow_steps: int = 8


QUICK = Sizes(
    flowers=40,
    photos=4,
    half=20,
    few=10,
    reader=40,
    tiny=(100, 1000),
    rounds=1,
    epochs=2,
    reader_seconds=0.2,
    slow_steps=1,
)


@dataclasses.dataclass(frozen=True)
class Sample:
    """One measurement: wall seconds, CPU seconds, the largest process's peak in bytes."""

    images: int
    wall: float
    cpu: float = 0.0
    peak: int = 0


class Table:
    """The measurements of one section."""

    def __init__(self, title, *, unit="images/s", note=""):
        self.title, self.unit, self.note = title, unit, note
        self.samples: dict[str, list[Sample]] = {}
        self.ratios: list[dict] = []

    def add(self, name, sample):
        self.samples.setdefault(name, []).append(sample)
        value = self._value(sample)
        print(f"  {name}: {value:,.1f} {self.unit}", file=sys.stderr, flush=True)

    def _value(self, sample):
        return sample.images / sample.wall if self.unit == "images/s" else sample.wall

    def median(self, name, of=None):
        of = of or self._value
        return statistics.median(map(of, self.samples[name]))

    def demand(self, text, value, *, least=None, most=None):
        """Adds a ratio, with what it ought to be."""
        wanted = f"at least {least:g}" if least else f"at most {most:g}" if most else ""
        reached = (not least or value >= least) and (not most or value <= most)
        self.ratios.append({"what": text, "value": value, "wanted": wanted, "reached": reached})

    def compare(self, first, second, *, least):
        value = self.median(first) / self.median(second)
        self.demand(f"{first} / {second}", value, least=least)

    def rows(self):
        for name, samples in self.samples.items():
            values = sorted(map(self._value, samples))
            peak, cpu = max(s.peak for s in samples), self.median(name, lambda s: s.cpu / s.images)
            yield {
                "name": name,
                "median": statistics.median(values),
                "low": values[0],
                "high": values[-1],
                "rounds": len(values),
                "cpu_us": cpu * 1e6,
                "peak_mb": peak / 1e6,
            }

    def markdown(self):
        rows = list(self.rows())
        lines = [f"### {self.title}", "", *([self.note, ""] if self.note else [])]
        cpu, peak = any(row["cpu_us"] for row in rows), any(row["peak_mb"] for row in rows)
        heads = ["", f"{self.unit}, median (range)"]
        heads += ["CPU, us an image"] * cpu + ["largest process, MB"] * peak
        lines += [_line(heads), _line(["---"] * len(heads))]
        digits = 0 if self.unit == "images/s" else 2
        for row in rows:
            median, low, high = (f"{row[key]:,.{digits}f}" for key in ("median", "low", "high"))
            cells = [row["name"], f"{median} ({low} to {high})" if row["rounds"] > 1 else median]
            cells += [f"{row['cpu_us']:,.0f}" if row["cpu_us"] else ""] * cpu
            cells += [f"{row['peak_mb']:,.0f}" if row["peak_mb"] else ""] * peak
            lines.append(_line(cells))
        if self.ratios:
            lines += ["", _line(["", "measured", "wanted", ""]), _line(["---"] * 4)]
        for ratio in self.ratios:
            verdict = ("reached" if ratio["reached"] else "missed") if ratio["wanted"] else ""
            lines.append(_line([ratio["what"], f"{ratio['value']:.2f}", ratio["wanted"], verdict]))
        return "\n".join(lines) + "\n"


def _line(cells):
    return f"| {' | '.join(cells)} |"


def execute(command, *, images=1, env=None):
    """Runs a command; returns its Sample, from the start of the process to its end, and its output.

    CPU and peak are those of the process and of all that it waited for.
    """
    env = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", **(env or os.environ)}
    env["PYTHONPATH"] = str(HERE.parent)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=errors, env=env)
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0), errors.seek(0)
        if process.returncode:
            said = errors.read().decode(errors="replace").strip().splitlines()
            raise SystemExit(f"{' '.join(command)}: exit {process.returncode}: {said[-1:]}")
        text = out.read().decode()
    return Sample(images, wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024), text


class Bench:
    """What all sections share: the sizes, the inputs, made when they are first asked for."""

    def __init__(self, args, folder):
        self.sizes = QUICK if args.quick else Sizes()
        self.folder = Path(folder)
        self.given = {"flowers": args.flowers, "photos": args.photos, "mnist": args.mnist}
        self.origin = {}

    def source(self, kind):
        if self.given[kind]:
            self.origin[kind] = f"{len(inputs.find_jpegs(self.given[kind]))} photographs"
            return self.given[kind]
        folder = self.folder / f"source-{kind}"
        if not folder.exists():
            count = min(100, self.sizes.flowers) if kind == "flowers" else 4
            draw = inputs.draw_flowers if kind == "flowers" else inputs.draw_photos
            draw(folder, count=count)
            self.origin[kind] = f"{count} drawn pictures"
        return folder

    def pictures(self, kind):
        """A folder of pictures: flowers, some of them (half, few, reader), photos, tiny."""
        folder = self.folder / kind
        if folder.exists():
            return folder
        print(f"making {folder.name}", file=sys.stderr, flush=True)
        if kind == "flowers":
            inputs.multiply(self.source("flowers"), folder, count=self.sizes.flowers)
        elif kind == "photos":
            inputs.multiply(self.source("photos"), folder, count=self.sizes.photos)
        elif kind in ("half", "few", "reader"):
            count = getattr(self.sizes, kind)
            inputs.link_some(self.pictures("flowers"), folder, count=count)
        else:
            inputs.write_tiny(folder, count=int(kind.removeprefix("tiny")))
        return folder

    def records(self, kind, *flags):
        """A data set of some pictures, made once."""
        output = self.folder / "-".join(["records", kind, *flags]).replace("--", "")
        if not output.exists():
            execute([*self.ingest(self.pictures(kind), output, 192), *flags])
        return output

    def ingest(self, folder, output, size):
        command = [*TPUFEED, "ingest", "--input", f"{folder}/*/*", "--output", str(output)]
        return [*command, "--image-size", str(size)]

    @contextlib.contextmanager
    def output(self):
        folder = self.folder / "out"
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    def contend(self, name, folder, size):
        """A contender of contenders.py: from the shell, and without its imports."""
        with self.output() as output:
            command = [sys.executable, str(HERE / "contenders.py"), name, "--input", str(folder)]
            sample, text = execute([*command, "--output", str(output), "--size", str(size)])
        told = json.loads(text.splitlines()[-1])
        sample = dataclasses.replace(sample, images=told["images"])
        return sample, dataclasses.replace(sample, wall=told["seconds"], cpu=0, peak=0)

    def ours(self, folder, size):
        images = len(inputs.find_jpegs(folder))
        with self.output() as output:
            return execute(self.ingest(folder, output / "records", size), images=images)[0]


OTHERS = {
    "notebook": "the lab's notebook, tf.data",
    "notebook-90": "the same, quality 90",
    "naive-beam": "naive Beam",
    "our-pixels-pool": "bare pool, our pixels",
    "pillow-pool": "bare pool, Pillow",
    "turbo-pool": "libjpeg-turbo decode alone",
}


def measure_ingest(bench):
    """A: ingest of small photographs, from the shell and without the start."""
    folder, count = bench.pictures("flowers"), bench.sizes.flowers
    shell = Table(f"A. Ingest of {count:,} flowers to 192x192, from the shell to the end")
    inner = Table("A. The same once everything was imported")
    half = bench.pictures("half")
    for _ in range(bench.sizes.rounds):
        shell.add("tpufeed", bench.ours(folder, 192))
        shell.add("tpufeed, half as many", bench.ours(half, 192))
        inner.add("tpufeed", bench.contend("tpufeed", folder, 192)[1])
        for name, title in OTHERS.items():
            outer, work = bench.contend(name, folder, 192)
            shell.add(title, outer)
            inner.add(title, work)
    for table in (shell, inner):
        table.compare("tpufeed", OTHERS["notebook"], least=1.4)
        table.compare("tpufeed", OTHERS["notebook-90"], least=None)
        table.compare("tpufeed", OTHERS["naive-beam"], least=2.3)
        table.compare("tpufeed", OTHERS["our-pixels-pool"], least=0.9)
        table.compare("tpufeed", OTHERS["turbo-pool"], least=0.45)
    seconds = [shell.median(name, lambda s: s.wall) for name in list(shell.samples)[:2]]
    further = bench.sizes.half / max(1e-3, seconds[0] - seconds[1])
    inner.demand("tpufeed, images/s beyond the start: the second half of the pictures", further)
    return [shell, inner]


def measure_photos(bench):
    """B: ingest of large photographs."""
    folder = bench.pictures("photos")
    shell = Table(f"B. Ingest of {bench.sizes.photos} large photographs to 224x224, from the shell")
    inner = Table("B. The same once everything was imported")
    pool = "bare pool, Pillow, full decode"
    for _ in range(bench.sizes.rounds):
        shell.add("tpufeed", bench.ours(folder, 224))
        inner.add("tpufeed", bench.contend("tpufeed", folder, 224)[1])
        outer, work = bench.contend("pillow-pool", folder, 224)
        shell.add(pool, outer)
        inner.add(pool, work)
    for table in (shell, inner):
        table.compare("tpufeed", pool, least=2)
    source = bench.source("photos")
    _, text = execute([sys.executable, str(HERE / "pixel_agreement.py"), str(source), "--json"])
    found = json.loads(text)["224"]
    shell.demand("mean difference from the full decode, levels", found["mean"], most=2)
    shell.demand("99th percentile of it, levels", found["p99"])
    return [shell, inner]


def measure_few(bench):
    """C: a hundred pictures, start to finish."""
    folder, count = bench.pictures("few"), bench.sizes.few
    table = Table(f"C. {count} flowers from the shell, start to finish", unit="seconds")
    for _ in range(max(bench.sizes.rounds, 2 * bench.sizes.rounds - 1)):
        with bench.output() as output:
            command = bench.ingest(folder, output / "records", 192)
            table.add("tpufeed ingest", execute(command, images=count)[0])
            command = [*TPUFEED, "verify", str(output / "records")]
            table.add("tpufeed verify", execute(command, images=count)[0])
    table.demand("tpufeed ingest, seconds", table.median("tpufeed ingest"), most=3)
    table.demand("tpufeed verify, seconds", table.median("tpufeed verify"), most=3)
    return [table]


READERS = {
    "tpufeed-uint8": "tpufeed, uint8",
    "tpufeed-float": "tpufeed, float32",
    "tpufeed-raw": "tpufeed, uint8, encoding raw",
    "lab-float": "the lab's fast reader, float32 as in the lab",
    "lab-uint8": "the lab's fast reader, uint8",
    "mapped-batches": "decode inside a map over batches",
    "file-per-image": "a file per image",
    "decode-alone": "libjpeg-turbo from memory, all cores",
    "record-bytes": "record bytes only",
}
EPOCHS = {
    "tpufeed-epochs": "tpufeed, uint8",
    "lab-epochs": "the lab's fast reader, float32 as in the lab",
    "lab-uint8-epochs": "the lab's fast reader, uint8",
}


def measure_readers(bench):
    """D: readers over a repeated stream, and whole epochs."""
    sizes = bench.sizes
    batch = 128 if sizes.reader > 128 else 8
    command = [sys.executable, str(HERE / "readers.py"), "--files", str(bench.pictures("reader"))]
    command += ["--jpeg", str(bench.records("reader")), "--batch", str(batch)]
    command += ["--raw", str(bench.records("reader", "--encoding=raw"))]
    command += ["--rounds", str(sizes.rounds), "--seconds", str(sizes.reader_seconds)]
    _, text = execute([*command, "--warm", str(sizes.reader_seconds / 2)])
    stream = Table(f"D. Readers, batches of {batch} of 192x192, a repeated stream")
    whole = Table(f"D. Epochs of {sizes.reader:,} pictures, an iterator made and ended for each")
    for line in filter(lambda line: line.startswith("{"), text.splitlines()):
        found = json.loads(line)
        table, names = (whole, EPOCHS) if found["name"] in EPOCHS else (stream, READERS)
        sample = Sample(found["images"], found["seconds"], found["cpu"])
        table.add(names[found["name"]], sample)
    float_lab, uint8_lab = READERS["lab-float"], READERS["lab-uint8"]
    stream.compare("tpufeed, uint8", float_lab, least=1.5)
    stream.compare("tpufeed, uint8", uint8_lab, least=1.5)
    stream.compare("tpufeed, uint8", READERS["decode-alone"], least=0.9)
    stream.compare("tpufeed, float32", float_lab, least=1.15)
    whole.compare("tpufeed, uint8", float_lab, least=1.5)
    whole.compare("tpufeed, uint8", uint8_lab, least=1.5)
    return [stream, whole]


def measure_slow_store(bench):
    """E: a store that takes 50 ms to answer."""
    table = Table(
        "E. Reading from a store that takes 50 ms to answer",
        note="TensorFlow's own gs:// client against a local server; file per image as in the lab.",
    )
    bench.pictures("reader"), bench.records("reader")
    steps = bench.sizes.slow_steps
    with slow_store.serve(bench.folder, delay=0.05) as environment:
        command = [sys.executable, str(HERE / "readers.py"), "--files", "gs://slow/reader"]
        command += ["--jpeg", "gs://slow/records-reader", "--warm", "0", "--rounds", "1"]
        command += ["--batch", "8"]
        for name, title, flags in (
            ("file-per-image", "file per image", ["--calls", "1"]),
            ("file-per-image", "file per image, AUTOTUNE", []),
            ("tpufeed-uint8", "tpufeed", ["--warm", "1"]),
        ):
            more = [*flags, "--only", name, "--seconds", str(steps)]
            _, text = execute([*command, *more], env=environment)
            found = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
            table.add(title, Sample(found["images"], found["seconds"]))
    table.compare("tpufeed", "file per image", least=100)
    table.compare("tpufeed", "file per image, AUTOTUNE", least=None)
    return [table]


MODES = {
    "eager": ["--mode", "eager"],
    "graph": ["--mode", "graph"],
    "graph, 78 steps a call": ["--mode", "graph", "--steps-per-execution", "78"],
    "xla": ["--mode", "xla"],
    "xla, 78 steps a call": ["--mode", "xla", "--steps-per-execution", "78"],
}


def measure_training(bench):
    """F: LeNet-5 on MNIST, the seconds of each epoch after the first, which compiles."""
    data = bench.folder / "mnist"
    if not data.exists():
        source = bench.given["mnist"]
        command = [*TPUFEED, "ingest", "--output", str(data), "--image-size", "28"]
        if source:
            command += ["--input", f"idx:{source}", "--channels", "1", "--encoding", "png"]
        else:
            command += ["--input", f"{bench.pictures('flowers')}/*/*", "--channels", "1"]
            command += ["--split", "train=0.8,test=0.2"]
        execute(command)
    note = "tpufeed on the CPU of this machine; X10's figures are those published, on a CPU too."
    table = Table("F. LeNet-5, batch 128, an epoch of training and test", unit="seconds", note=note)
    batch = "128" if bench.given["mnist"] else "8"
    for name, flags in MODES.items():
        command = [*TPUFEED, "train", "--data", str(data), "--model", "lenet5", "--json"]
        command += ["--batch-size", batch, "--learning-rate", "0.1", "--tpu", "none"]
        _, text = execute([*command, *flags, "--epochs", str(bench.sizes.epochs)])
        epochs = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        for epoch in epochs[1:]:
            table.add(f"tpufeed, {name}", Sample(1, epoch["seconds"]))
    for name, seconds in X10.items():
        table.add(name, Sample(1, seconds))
    eager = table.median("tpufeed, eager")
    table.demand("eager / graph", eager / table.median("tpufeed, graph"), least=4)
    table.demand("eager / xla", eager / table.median("tpufeed, xla"), least=1.8)
    return [table]


def measure_tiny(bench):
    """G: many tiny pictures, for what grows with their number."""
    table = Table("G. Tiny pictures (16x16), from the shell", unit="seconds")
    names = {}
    for count in bench.sizes.tiny:
        folder, names[count] = bench.pictures(f"tiny{count}"), f"{count:,} pictures"
        table.add(names[count], bench.ours(folder, 16))
    few, many = bench.sizes.tiny
    ratio = table.median(names[many]) / table.median(names[few])
    table.demand(f"time of {names[many]} / {names[few]}", ratio, most=11)
    peaks = [table.median(names[count], lambda s: s.peak) for count in (few, many)]
    more = (peaks[1] - peaks[0]) / (many - few)
    table.demand("more memory in the largest process, bytes a picture", more, most=2000)
    return [table]


class Profile(Table):
    """What time_profile.py says."""

    def __init__(self, text):
        super().__init__("H. Where the time of an ingest goes")
        self._text = text

    def markdown(self):
        return f"### {self.title}\n\n{self._text}"


def measure_profile(bench):
    """H: where the time goes."""
    command = [sys.executable, str(HERE / "time_profile.py")]
    _, text = execute([*command, f"{bench.pictures('flowers')}/*/*"])
    return [Profile(text)]


SECTIONS = {
    "A": measure_ingest,
    "B": measure_photos,
    "C": measure_few,
    "D": measure_readers,
    "E": measure_slow_store,
    "F": measure_training,
    "G": measure_tiny,
    "H": measure_profile,
}


def describe_machine():
    names = [line for line in open("/proc/cpuinfo") if line.startswith("model name")]
    chip = names[0].partition(":")[2].strip() if names else platform.processor()
    return (
        f"{os.cpu_count()} cores ({chip}), Python {platform.python_version()}, {platform.system()}"
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="a few pictures, one round")
    parser.add_argument("--json", metavar="FILE", help="where to write all measurements")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections (%(default)s)")
    parser.add_argument("--flowers", help="photographs, in a folder for each class")
    parser.add_argument("--photos", help="large photographs")
    parser.add_argument("--mnist", help="the four IDX files")
    parser.add_argument("--work", help="where to make the pictures (a temporary folder)")
    parser.add_argument("--into", metavar="FILE", help="a page to put them into")
    args = parser.parse_args(argv)
    wanted = args.only.split(",")
    if unknown := set(wanted) - set(SECTIONS):
        parser.error(f"--only {unknown.pop()}: sections are {', '.join(SECTIONS)}")
    found, texts = [], []
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        bench = Bench(args, folder)
        for name in wanted:
            start = time.monotonic()
            print(f"section {name}", file=sys.stderr, flush=True)
            tables = SECTIONS[name](bench)
            print(f"  {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
            for table in tables:
                texts.append(table.markdown())
                rows = list(table.rows())
                found.append({"section": name, "title": table.title, "unit": table.unit})
                found[-1] |= {"rows": rows, "ratios": table.ratios}
    head = f"{time.strftime('%Y-%m-%d')}, {describe_machine()}"
    text = "\n".join([f"{head}\n", *texts])
    print(text)
    if args.into:
        path = Path(args.into)
        before, _, after = path.read_text().split(MARK)
        path.write_text(f"{before}{MARK}\n\n{text}\n{MARK}{after}")
    if args.json:
        document = {"date": head, "quick": args.quick, "tables": found}
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
