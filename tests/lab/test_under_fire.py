"""Faults at every write, and every byte damaged: an error or an equal result, never a silently wrong number.

Every call by which a results folder is written (open to write, write, fsync, rename, unlink, truncate, mkdir) is
counted. A study of one run is then made again and again with a fault at the first call, the second, and so on;
afterwards it is resumed without faults and must end as the one that nothing happened to.

A kill is played in this process, so that all of them take seconds: from the chosen call on, no call reaches the disk
any more, and of a write only the first half does. `test_survival.py` has the real signal, at moments of its own.
"""

import builtins
import errno
import io
import json
import os
import shutil
import time

import numpy as np
import pytest

from kourkoutas.lab.results import files, store
from kourkoutas.lab.results.checkpoint import Checkpoints
from kourkoutas.lab.specs.spec import RunResult, RunSpec

pytest.importorskip("torch")

SPEC = RunSpec(testbed="sanity1", preset="smoke", engine="torch", optimizer="kbeta", seed=0, settings={"steps": 590})


class Killed(BaseException):
    """The process is gone; nothing that it still does may reach the disk."""


class Faults:
    """Counts calls that change files, and lets one of them fail; `last` if no later call may succeed either."""

    def __init__(self, at=None, error=None, last=False):
        self.count, self.at, self.error, self.last = 0, at, error, last

    @property
    def due(self):
        return self.at is not None and (self.count + 1 == self.at or (self.last and self.count + 1 >= self.at))

    def tick(self):
        due, self.count = self.due, self.count + 1
        if due:
            raise self.error

    def install(self, monkeypatch):
        for name in ("fsync", "replace", "unlink", "mkdir"):
            monkeypatch.setattr(os, name, self._before(getattr(os, name)))
        real_open = io.open

        def opened(file, mode="r", *args, **kwargs):
            if not set(mode) & set("wax+"):
                return real_open(file, mode, *args, **kwargs)
            self.tick()
            return _Watched(real_open(file, mode, *args, **kwargs), self)

        monkeypatch.setattr(io, "open", opened)
        monkeypatch.setattr(builtins, "open", opened)

    def _before(self, call):
        def watched(*args, **kwargs):
            self.tick()
            return call(*args, **kwargs)

        return watched


class _Watched:
    """A file whose writes and truncations are counted, and reach the disk at once, or half."""

    def __init__(self, stream, faults):
        self._stream, self._faults = stream, faults

    def write(self, data):
        due, length = self._faults.due, len(data)
        first = self._faults.at == self._faults.count + 1
        if due and first:
            self._stream.write(data[: length // 2])
            self._stream.flush()
        self._faults.tick()
        self._stream.write(data)
        self._stream.flush()
        return length

    def truncate(self, *args):
        self._faults.tick()
        return self._stream.truncate(*args)

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self._stream.close()


def study(path):
    """A study of one run, in this process: planned, trained, finished, or gone on with."""
    from kourkoutas.lab.running import train

    arm = store.Arm(label="kbeta", optimizer="kbeta")
    with store.writing(
        path, testbed="sanity1", preset="smoke", engine="torch", settings=SPEC.settings, arms=[arm], seeds=[0],
        command="a test",
    ) as writer:  # fmt: skip
        writer.plan([SPEC])
        if writer.result(SPEC) is None or writer.result(SPEC).status == "failed":
            writer.reopen(SPEC)
            writer.finish(SPEC, train.run(SPEC, writer.folder(SPEC), checkpoint_every=500))


def ended(path):
    """All numbers of the finished run, but for times."""
    run = store.Study.open(path).run(SPEC)
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


def read_only(at):
    return Faults(at, OSError(errno.EROFS, os.strerror(errno.EROFS)), last=True)


def points(count, most):
    """All calls, or, in the fast test, `most` of them spread evenly."""
    return sorted({*np.linspace(1, count, min(count, most)).astype(int).tolist()})


@pytest.mark.parametrize("fault", [kill, full, read_only])
@pytest.mark.parametrize("most", [15, pytest.param(10**6, marks=pytest.mark.slow)], ids=["some calls", "every call"])
def test_after_a_fault_at_a_write_the_study_resumes_to_the_same_bits(fault, most, whole, tmp_path):
    want, count = whole
    assert count > 60  # every kind of file is written a few times
    for at in points(count, most):
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


def test_a_clock_that_goes_back_changes_no_number(whole, tmp_path, monkeypatch):
    real, path = time.time(), tmp_path / "out"
    assert isinstance(attacked(path, kill(40)), Killed)
    for p in path.rglob("*"):
        os.utime(p, (real + 86400, real + 86400))  # as if written tomorrow
    ticks = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: real - 3600.0 * next(ticks))
    monkeypatch.setattr(time, "time_ns", lambda: int((real - 3600.0 * next(ticks)) * 1e9))
    assert resumed(path) == whole[0]


def test_snapshots_are_kept_in_order_when_the_clock_goes_back(tmp_path, monkeypatch):
    pytest.importorskip("fsspec")
    from kourkoutas.lab.results.snapshots import Snapshots

    times = iter([10**18, 9 * 10**17, 8 * 10**17])
    monkeypatch.setattr(time, "time_ns", lambda: next(times))
    snapshots = Snapshots(str(tmp_path), "study")
    snapshots.prepare()
    for text in (b"1", b"2", b"3"):
        snapshots.save("run", {"file": text})
    assert snapshots.newest("run") == {"file": b"3"}


# Damage


def flipped(data, at, rng):
    damaged = bytearray(data)
    damaged[at] ^= int(rng.integers(1, 256))
    return bytes(damaged)


def damage(file, read, whole_value):
    """Flip every byte in turn; how many flips were errors, of how many. `read` raises StoreError on damage."""
    data = file.read_bytes()
    rng, errors = np.random.default_rng(1), 0
    for at in range(len(data)):
        file.write_bytes(flipped(data, at, rng))
        try:
            got = read()
        except files.StoreError:
            errors += 1
        else:
            assert got == whole_value, f"{file.name}, byte {at}"
    file.write_bytes(data)
    return errors, len(data)


RESULT = RunResult(
    status="ok", endpoint=0.125, metrics={"loss": 0.125}, curve={"step": [1.0, 2.0], "loss": [0.5, float("nan")]},
    settings={"lr": 1e-3}, seconds=1.5,
)  # fmt: skip


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
    record = store.Study.open(tmp_path / "out").record.model_dump_json()
    damage(tmp_path / "out" / "study.json", lambda: store.Study.open(tmp_path / "out").record.model_dump_json(), record)

    def specs():
        found = store.Study.open(tmp_path / "out")
        runs = found.runs()
        if found.damage:
            raise files.StoreError(found.damage[0])
        return [run.spec for run in runs]

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
    for at in range(0, len(data), 3):
        file.write_bytes(flipped(data, at, rng))
        step, arrays = checkpoints.newest()
        assert arrays["x"].tolist() == (np.arange(4.0) + step - 1).tolist()


def test_every_byte_of_a_snapshot(tmp_path):
    pytest.importorskip("fsspec")
    from kourkoutas.lab.results.snapshots import Snapshots

    snapshots = Snapshots(str(tmp_path), "study")
    snapshots.prepare()
    snapshots.save("run", {"metrics.jsonl": b"{}\n", "checkpoint/step.npz": bytes(range(64))})
    (file,) = (tmp_path / "study" / "run").iterdir()
    data, rng = file.read_bytes(), np.random.default_rng(4)
    for at in range(0, len(data), 5):
        file.write_bytes(flipped(data, at, rng))
        assert snapshots.newest("run") is None, at


def test_files_without_checksums_are_read_as_before(tmp_path):
    (tmp_path / "result.json").write_text(RESULT.model_dump_json())
    assert files.read_json(tmp_path / "result.json", RunResult, "").endpoint == 0.125
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": "NaN"}) + "\n")
    assert files.read_lines(tmp_path / "metrics.jsonl", finished=True, remedy="") == [{"step": 1, "loss": "NaN"}]
