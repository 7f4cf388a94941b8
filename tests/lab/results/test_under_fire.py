"""Faults at every write, and every byte damaged: an error or an equal result, never a silently wrong number.

Every call by which a results folder is written (open to write, write, fsync, rename, unlink, truncate, mkdir, rmdir) is
counted. A study of one run is then made again and again with a fault at the first call, the second, and so on;
afterwards it is resumed without faults and must end as the one that nothing happened to.

A kill is played in this process, so that all of them take seconds: from the chosen call on, no call reaches the disk
any more, and of a write only the first half does. `test_survival.py` has the real signal, at moments of its own.
"""

import builtins
import ctypes
import errno
import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kourkoutas.lab.results import files, store
from kourkoutas.lab.results.files import Checkpoints
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.specs.spec import RunResult, RunSpec

pytest.importorskip("torch")

# 79 steps in chunks of 50: a checkpoint on the way and one at the end
SIZE, CHUNK = {"first": 20, "steps": 59}, 50
SPEC = RunSpec(testbed="sanity1", preset="smoke", engine="torch", optimizer="kbeta", seed=0, settings=SIZE)


class Killed(BaseException):
    """The process is gone; nothing that it still does may reach the disk."""


class Faults:
    """Counts calls that change files, and lets the one numbered `at` fail; with `last`, all later ones too.

    `kinds` are those that can fail; None for all.
    """

    def __init__(self, at=None, error=None, last=False, kinds=None):
        self.count, self.at, self.error, self.last, self.kinds = 0, at, error, last, kinds

    def due(self, kind):
        if self.at is None or (self.kinds is not None and kind not in self.kinds):
            return False
        return self.count + 1 == self.at or (self.last and self.count + 1 > self.at)

    def tick(self, kind):
        due, self.count = self.due(kind), self.count + 1
        if due:
            raise self.error

    def install(self, monkeypatch):
        for name in ("fsync", "replace", "unlink", "mkdir", "rmdir"):
            monkeypatch.setattr(os, name, self._before(name, getattr(os, name)))
        real_open = io.open

        def opened(file, mode="r", *args, **kwargs):
            if not set(mode) & set("wax+"):
                return real_open(file, mode, *args, **kwargs)
            self.tick("open")
            return _Watched(real_open(file, mode, *args, **kwargs), self)

        monkeypatch.setattr(io, "open", opened)
        monkeypatch.setattr(builtins, "open", opened)

    def _before(self, kind, call):
        def watched(*args, **kwargs):
            self.tick(kind)
            return call(*args, **kwargs)

        return watched


class _Watched:
    """A file whose writes and truncations are counted, and reach the disk at once, or half."""

    def __init__(self, stream, faults):
        self._stream, self._faults = stream, faults

    def write(self, data):
        length = len(data)
        if self._faults.due("write") and self._faults.at == self._faults.count + 1:
            self._stream.write(data[: length // 2])
            self._stream.flush()
        self._faults.tick("write")
        self._stream.write(data)
        self._stream.flush()
        return length

    def truncate(self, *args):
        self._faults.tick("truncate")
        return self._stream.truncate(*args)

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self._stream.close()


def study(path, spec=SPEC):
    """A study of one run, in this process: planned, trained, finished, or gone on with."""
    from kourkoutas.lab.running import train
    from kourkoutas.lab.testbeds.sanity import SanityProblem

    arm = store.Arm(label="kbeta", optimizer="kbeta")
    with store.writing(
        path, testbed="sanity1", preset="smoke", engine="torch", settings=spec.settings, arms=[arm], seeds=[0],
        command="a test",
    ) as writer:  # fmt: skip
        writer.plan([spec])
        if writer.run(spec).result is None or writer.run(spec).result.status == "failed":
            writer.reopen(spec)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(SanityProblem, "chunk", CHUNK)
                writer.finish(spec, train.run(spec, writer.folder(spec), checkpoint_every=CHUNK))


def ended(path):
    """All numbers of the finished run, but for times."""
    (run,) = Snapshot.read(path).runs
    assert run.result is not None
    left = [p.name for p in path.rglob("*") if p.suffix in files.TEMPORARY]
    return {
        "result": run.result.model_dump_json(exclude={"seconds", "times"}),
        "lines": (run.folder / "metrics.jsonl").read_bytes(),
        "params": {name: x.tolist() for name, x in run.params().items()},
        "trace": {name: x.tolist() for name, x in run.trace().items()},
        "left over": left,
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing happened to, and how many calls it made."""
    path = tmp_path_factory.mktemp("whole") / "out"
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults()
        faults.install(patch)
        study(path)
    return ended(path), faults.count


def attacked(path, faults):
    """The study with a fault; what it raised, or None."""
    with pytest.MonkeyPatch.context() as patch:
        faults.install(patch)
        try:
            study(path)
        except (OSError, store.StoreError, Killed) as error:
            return error
    return None


def resumed(path):
    study(path)
    return ended(path)


def kill(at):
    return Faults(at, Killed(), last=True)


def full(at):
    return Faults(at, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def stays_full(at):
    """From call `at` on there is no room; what exists can still be renamed and removed."""
    return Faults(at, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), True, ("open", "write", "fsync", "mkdir"))


def read_only(at):
    return Faults(at, OSError(errno.EROFS, os.strerror(errno.EROFS)), last=True)


def points(count, most):
    """All calls, or, in the fast test, `most` of them spread evenly."""
    return sorted({*np.linspace(1, count, min(count, most)).astype(int).tolist()})


@pytest.mark.parametrize("fault", [kill, full, stays_full, read_only])
@pytest.mark.parametrize("most", [12, pytest.param(10**6, marks=pytest.mark.slow)], ids=["some calls", "every call"])
def test_after_a_fault_at_a_write_the_study_resumes_to_the_same_bits(fault, most, whole, tmp_path):
    want, count = whole
    assert count > 60  # every kind of file is written a few times
    tried = points(count, most)
    print(f"{fault.__name__}: {len(tried)} of {count} calls")
    for at in tried:
        path = tmp_path / f"at-{at}"
        error = attacked(path, fault(at))
        # Only what does not matter may fail unseen: the name of the writer in the lock file, and clearing up.
        assert error is not None or ended(path) == want, f"call {at} of {count}"
        assert resumed(path) == want, f"call {at} of {count}"
        shutil.rmtree(path)


def test_a_read_only_folder_is_an_error_and_stays_as_it_was(whole, tmp_path):
    path = tmp_path / "out"
    study(path)
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    error = attacked(path, read_only(1))
    assert isinstance(error, OSError)
    assert error.errno == errno.EROFS
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before


ORDINARY = """
import sys
from pathlib import Path
from tests.lab.results.test_under_fire import study

path = Path(sys.argv[1])
try:
    (path / "probe").touch()
except PermissionError:
    pass
else:
    (path / "probe").unlink()
    sys.exit("the folder can be written")
try:
    study(path)
except PermissionError as error:
    print("refused", error.filename)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="takes root's right to write anywhere away with prctl")
@pytest.mark.parametrize("when", ["unfinished", "finished"])
def test_a_folder_without_write_permission_is_an_error_and_goes_on_when_it_has_it_again(when, whole, tmp_path):
    """No fault is played here: the folder has mode 0555, and the process no right beyond it, be it root's or not."""
    path = tmp_path / "out"
    if when == "finished":
        study(path)
    else:
        assert isinstance(attacked(path, kill(whole[1] - 20)), Killed)
        assert not list(path.glob("runs/*/result.json"))
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    tree = [path, *path.rglob("*")]
    modes = {p: p.stat().st_mode for p in tree}
    for p in tree:
        p.chmod(modes[p] & ~0o222)
    libc, drop, dac_override = ctypes.CDLL(None), 24, 1  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE
    done = subprocess.run(
        [sys.executable, "-c", ORDINARY, str(path)], capture_output=True, text=True, check=False, timeout=300,
        cwd=Path(__file__).parents[3], preexec_fn=lambda: libc.prctl(drop, dac_override, 0, 0, 0),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused"), done.stdout
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before
    if when == "finished":  # and it can be read as it is
        assert ended(path) == whole[0]
    for p, mode in modes.items():
        p.chmod(mode)
    assert resumed(path) == whole[0]


def test_a_clock_that_goes_back_changes_no_number(whole, tmp_path, monkeypatch):
    real, path = time.time(), tmp_path / "out"
    assert isinstance(attacked(path, kill(40)), Killed)
    for p in path.rglob("*"):
        os.utime(p, (real + 86400, real + 86400))  # as if written tomorrow
    ticks = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: real - 3600.0 * next(ticks))
    monkeypatch.setattr(time, "time_ns", lambda: int((real - 3600.0 * next(ticks)) * 1e9))
    assert resumed(path) == whole[0]


def test_backups_are_kept_in_order_when_the_clock_goes_back(tmp_path, monkeypatch):
    pytest.importorskip("fsspec")
    from kourkoutas.lab.results.parcel import Backups

    times = iter([10**18, 9 * 10**17, 8 * 10**17])
    monkeypatch.setattr(time, "time_ns", lambda: next(times))
    backups = Backups(str(tmp_path), "study")
    backups.prepare()
    for text in (b"1", b"2", b"3"):
        backups.save("run", {"file": text})
    assert backups.newest("run") == {"file": b"3"}


# Damage


def flipped(data, at, rng):
    damaged = bytearray(data)
    damaged[at] ^= int(rng.integers(1, 256))
    return bytes(damaged)


def damage(file, read, whole_value, every=1):
    """Flip one byte after the other; how many flips were errors, of how many. `read` raises StoreError on damage."""
    data = file.read_bytes()
    rng, errors, places = np.random.default_rng(1), 0, range(0, len(data), every)
    for at in places:
        file.write_bytes(flipped(data, at, rng))
        try:
            got = read()
        except files.StoreError:
            errors += 1
        else:
            assert got == whole_value, f"{file.name}, byte {at}"
    file.write_bytes(data)
    print(f"{file.name}: {len(places)} flips, {errors} errors, {len(places) - errors} equal")
    return errors, len(places)


RESULT = RunResult(
    status="ok", endpoint=0.125, metrics={"loss": 0.125}, curve={"step": [1.0, 2.0], "loss": [0.5, float("nan")]},
    settings={"lr": 1e-3}, seconds=1.5,
)  # fmt: skip


def everything(path):
    """All that a results folder says, or a StoreError."""
    snapshot = Snapshot.read(path)
    (run,) = snapshot.runs or [None]
    if snapshot.damage:
        raise files.StoreError(snapshot.damage[0])
    if run.result is not None and run.result.error is not None:
        raise files.StoreError(run.result.error)
    arrays = [{name: x.tolist() for name, x in (kept or {}).items()} for kept in (run.trace(), run.params())]
    return repr([snapshot.record, run.spec, run.result, run.metrics(), arrays])


EVERY = [pytest.param(199, id="some bytes"), pytest.param(1, id="every byte", marks=pytest.mark.slow)]


@pytest.mark.parametrize("every", EVERY)
def test_every_byte_of_every_file_of_a_real_study(every, tmp_path):
    path = tmp_path / "out"
    study(path, SPEC.model_copy(update={"settings": {"steps": 60}}))
    want = everything(path)
    found = sorted(p for p in path.rglob("*") if p.is_file() and p.name != ".lock" and p.parent.name != "checkpoint")
    assert {p.name for p in found} == {
        "study.json", "spec.json", "result.json", "metrics.jsonl", "trace.npz", "params.npz",
    }  # fmt: skip
    for file in found:
        damage(file, lambda: everything(path), want, every)


@pytest.mark.parametrize("every", EVERY)
def test_every_byte_of_a_real_checkpoint(every, whole, tmp_path):
    path = tmp_path / "out"
    assert isinstance(attacked(path, kill(whole[1] - 20)), Killed)
    (file,) = path.glob("runs/*/checkpoint/step-*.npz")

    def newest():
        found = Checkpoints(file.parent).newest()
        if found is None:
            raise files.StoreError("passed over")
        return found[0], {name: (str(x.dtype), x.tobytes()) for name, x in found[1].items()}

    damage(file, newest, newest(), every)
    assert resumed(path) == whole[0]


def test_every_byte_of_a_result(tmp_path):
    store.write_result(tmp_path, RESULT)
    file = tmp_path / "result.json"
    want = RESULT.model_dump_json()
    errors, size = damage(file, lambda: files.read_json(file, RunResult, "").model_dump_json(), want)
    assert errors > 0.7 * size  # the rest is space between values


def test_every_byte_of_study_json_and_spec_json(tmp_path):
    arm = store.Arm(label="kbeta", optimizer="kbeta")
    with store.writing(
        tmp_path / "out", testbed="sanity1", preset="smoke", engine="torch", settings={"lr": 1}, arms=[arm], seeds=[1],
        command="a test",
    ) as writer:  # fmt: skip
        writer.plan([SPEC])
    record = store.read_record(tmp_path / "out").model_dump_json()
    damage(tmp_path / "out" / "study.json", lambda: store.read_record(tmp_path / "out").model_dump_json(), record)

    def specs():
        snapshot = Snapshot.read(tmp_path / "out")
        if snapshot.damage:
            raise files.StoreError(snapshot.damage[0])
        return [run.spec for run in snapshot.runs]

    damage(tmp_path / "out" / "runs" / SPEC.id / "spec.json", specs, [SPEC])


def test_every_byte_of_the_metrics(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines = files.Lines(file)
    for step in range(5):
        lines.write({"step": step, "loss": 1 / (step + 3), "acc": float("inf")})
    lines.close()
    want = files.read_lines(file, finished=True, remedy="")
    assert want[1] == {"step": 1, "loss": 0.25, "acc": "Infinity"}
    damage(file, lambda: files.read_lines(file, finished=True, remedy=""), want)


def test_every_byte_of_a_checkpoint_a_trace_and_parameters(tmp_path):
    rng = np.random.default_rng(2)
    arrays = {"w": rng.normal(size=(3, 4)), "b": rng.normal(size=5).astype(np.float32), "n": np.array(7)}

    def read(file):
        return {name: (str(x.dtype), x.tolist()) for name, x in files.read_arrays(file, "").items()}

    for compress in (False, True):
        file = tmp_path / "arrays.npz"
        files.write_arrays(file, arrays, compress=compress)
        damage(file, lambda file=file: read(file), read(file))
        with np.load(file) as plain:  # NumPy alone reads it too
            np.testing.assert_array_equal(plain["w"], arrays["w"])


def test_a_damaged_checkpoint_makes_way_for_the_one_before(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoint")
    checkpoints.save(1, {"x": np.arange(4.0)})
    checkpoints.save(2, {"x": np.arange(4.0) + 1})
    file = tmp_path / "checkpoint" / "step-000000002.npz"
    data, rng = file.read_bytes(), np.random.default_rng(3)
    for at in range(len(data)):
        file.write_bytes(flipped(data, at, rng))
        step, arrays = checkpoints.newest()
        assert arrays["x"].tolist() == (np.arange(4.0) + step - 1).tolist()


@pytest.mark.parametrize("every", EVERY)
def test_every_byte_of_a_backup(every, tmp_path):
    pytest.importorskip("fsspec")
    from kourkoutas.lab.results.parcel import Backups

    backups = Backups(str(tmp_path), "study")
    backups.prepare()
    backups.save("run", {"metrics.jsonl": b"{}\n", "checkpoint/step.npz": bytes(range(64))})
    file = tmp_path / "study" / "run.zip"
    data, rng = file.read_bytes(), np.random.default_rng(4)
    print(f"backup: {len(data)} bytes")
    for at in range(0, len(data), every):
        file.write_bytes(flipped(data, at, rng))
        assert backups.newest("run") is None, at


def test_files_without_checksums_are_read_as_before(tmp_path):
    (tmp_path / "result.json").write_text(RESULT.model_dump_json())
    assert files.read_json(tmp_path / "result.json", RunResult, "").endpoint == 0.125
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": "NaN"}) + "\n")
    assert files.read_lines(tmp_path / "metrics.jsonl", finished=True, remedy="") == [{"step": 1, "loss": "NaN"}]
