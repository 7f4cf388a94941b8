import csv
import sys
import types

import numpy as np
import pytest

from kourkoutas.trace import WINDOW, CsvSink, TensorBoardSink, Trace, WandbSink


def ring_after(count: int) -> np.ndarray:
    """A ring into which rows (t, t/2, 3t) for two buckets were written for t = 1 … count."""
    ring = np.full((WINDOW, 3, 2), np.nan, np.float32)
    for t in range(1, count + 1):
        ring[(t - 1) % WINDOW] = [[t, t], [t / 2, t / 2], [3 * t, 3 * t]]
    return ring


def test_pulls_join_without_gaps_or_repeats():
    trace = Trace(["a", "b"])
    for count in (3, 3, 10, WINDOW + 5):
        trace.pull(ring_after(count), count)
    assert trace.steps.tolist() == list(range(1, WINDOW + 6))
    assert trace.sun[:, 0].tolist() == trace.steps.tolist()
    assert trace.lost == 0


def test_rows_overwritten_before_a_pull_are_counted_as_lost():
    trace = Trace(["a", "b"])
    trace.pull(ring_after(WINDOW + 7), WINDOW + 7)
    assert trace.lost == 7
    assert trace.steps[0] == 8


def test_every_keeps_each_kth_step():
    trace = Trace(["a", "b"], every=4)
    trace.pull(ring_after(10), 10)
    assert trace.steps.tolist() == [4, 8]


def test_columns_and_snapshot_read_what_was_recorded():
    trace = Trace(["a", "b"])
    assert trace.snapshot() == {}
    trace.pull(ring_after(6), 6)
    assert trace.sun[1:3, 1].tolist() == [2, 3]
    assert trace.beta2[1:3, 1].tolist() == [1, 1.5]
    assert trace.snapshot() == {name: {"sun": 6.0, "beta2": 3.0, "norm": 18.0} for name in "ab"}


def test_a_ring_of_another_optimizer_is_refused():
    with pytest.raises(ValueError, match="`ring` must have shape"):
        Trace(["a"]).pull(ring_after(1), 1)


def test_a_count_that_goes_back_is_refused():
    trace = Trace(["a", "b"])
    trace.pull(ring_after(5), 5)
    with pytest.raises(ValueError, match="`count` went back"):
        trace.pull(ring_after(2), 2)


def test_csv_sink_writes_one_row_per_step(tmp_path):
    with Trace(["a", "b"], sinks=[CsvSink(tmp_path / "t.csv")]) as trace:
        trace.pull(ring_after(2), 2)
    rows = list(csv.DictReader((tmp_path / "t.csv").read_text().splitlines()))
    assert [row["step"] for row in rows] == ["1", "2"]
    assert float(rows[1]["beta2/b"]) == 1.0


def test_csv_sink_takes_your_own_metrics_beside_those_of_the_trace(tmp_path):
    sink = CsvSink(tmp_path / "t.csv")
    with Trace(["a", "b"], sinks=[sink]) as trace:
        trace.pull(ring_after(1), 1)
        sink.write(1, {"loss": 0.5})
        sink.write(2, {"loss": 0.25, "lr": 0.1})
        trace.pull(ring_after(2), 2)
    rows = list(csv.DictReader((tmp_path / "t.csv").read_text().splitlines()))
    names = ["step", "sun/a", "sun/b", "beta2/a", "beta2/b", "norm/a", "norm/b", "loss", "lr"]
    assert list(rows[0]) == names
    assert [row["step"] for row in rows] == ["1", "1", "2", "2"]
    assert [row["loss"] for row in rows] == ["", "0.5", "0.25", ""]
    assert [row["beta2/b"] for row in rows] == ["0.5", "", "", "1.0"]
    assert not list(tmp_path.glob(".*"))


def test_rows_of_a_ring_that_began_later_count_on_from_there():
    trace = Trace(["a", "b"])
    trace.pull(ring_after(3), 3, before=100)
    trace.pull(ring_after(5), 5, before=100)
    assert trace.steps.tolist() == [101, 102, 103, 104, 105]
    assert trace.sun[:, 0].tolist() == [1, 2, 3, 4, 5]
    assert trace.lost == 0
    trace.pull(ring_after(5 + WINDOW + 2), 5 + WINDOW + 2, before=100)
    assert trace.lost == 2
    with pytest.raises(ValueError, match="`count` went back from 1131 to 101"):
        trace.pull(ring_after(1), 1, before=100)


def test_every_goes_by_the_step_of_the_run_when_a_trace_goes_on():
    trace = Trace(["a", "b"], every=4)
    trace.pull(ring_after(6), 6, before=9)
    assert trace.steps.tolist() == [12]


def test_wandb_sink_logs_to_the_active_run(monkeypatch):
    logged, axes = [], {}
    run = types.SimpleNamespace(
        log=logged.append, define_metric=lambda name, step_metric: axes.update({name: step_metric})
    )
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=run))
    trace = Trace(["a", "b"], sinks=[WandbSink()])
    trace.pull(ring_after(1), 1)
    row = {"sun/a": 1.0, "sun/b": 1.0, "beta2/a": 0.5, "beta2/b": 0.5, "norm/a": 3.0, "norm/b": 3.0}
    assert logged == [{"step": 1, **row}]
    assert axes == dict.fromkeys(row, "step")


def test_a_missing_sink_package_names_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="pip install wandb"):
        WandbSink()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="tensorboard"):
        TensorBoardSink(tmp_path)


def test_save_keeps_names_steps_and_values(tmp_path):
    trace = Trace(["a", "b"])
    trace.pull(ring_after(3), 3)
    trace.save(tmp_path / "trace.npz")
    with np.load(tmp_path / "trace.npz") as saved:
        assert saved["names"].tolist() == ["a", "b"]
        assert saved["beta2"][2].tolist() == [1.5, 1.5]
