"""sun and β2 per bucket in TensorBoard and W&B, read back with the real packages and compared with the trace."""

import json
import struct
import time

import pytest
import torch

from kourkoutas.torch import KourkoutasBeta
from kourkoutas.trace import TensorBoardSink, Trace, WandbSink


def tensorboard(folder):
    """{name: {step: value}} of the one event file under `folder`."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (file,) = folder.rglob("events.*")
    events = accumulator.EventAccumulator(str(file.parent), size_guidance={accumulator.SCALARS: 0})
    events.Reload()
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}


def wandb_offline(folder):
    """{name: {step: value}} of the one offline run under `folder`: W&B's records in its log file.

    W&B's own process writes that file and may not be done when `run.finish()` returns; its last record is the exit.
    """
    internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    (file,) = folder.rglob("run-*.wandb")
    found, end = {}, time.monotonic() + 60
    while True:
        records = [internal.Record.FromString(data) for data in log_records(file.read_bytes())]
        if any(record.HasField("exit") for record in records):
            break
        assert time.monotonic() < end, "the run has no end"
        time.sleep(0.1)
    for record in records:
        items = record.history.item if record.HasField("history") else ()
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
        for name, value in row.items():
            if not name.startswith("_") and name != "step":
                found.setdefault(name, {})[row["step"]] = value
    return found


def log_records(data):
    """The records of a LevelDB log with W&B's header of 7 bytes: parts of (checksum, length, kind, bytes) in blocks."""
    assert data[:4] == b":W&B"
    last, block, header = (1, 4), 2**15, struct.Struct("<IHB")  # a whole record, or the last part of one
    at, parts = 7, []
    while at + header.size <= len(data):
        if block - at % block < header.size:  # too little room for a header: the block's rest is empty
            at += block - at % block
            continue
        _, length, kind = header.unpack_from(data, at)
        if at + header.size + length > len(data):
            return
        parts.append(data[at + header.size : at + header.size + length])
        at += header.size + length
        if kind in last:
            yield b"".join(parts)
            parts = []


READERS = {"tensorboard": tensorboard, "wandb": wandb_offline}


@pytest.fixture(params=READERS)
def kind(request, monkeypatch, tmp_path):
    pytest.importorskip(request.param)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    return request.param


def same(found, steps, names, sun, beta2):
    assert len(steps) > 1
    for key, rows in (("sun", sun), ("beta2", beta2)):
        for b, name in enumerate(names):
            assert found[f"{key}/{name}"] == {
                int(t): pytest.approx(float(row[b]), rel=1e-6) for t, row in zip(steps, rows, strict=True)
            }


def test_a_loop_of_ones_own_sends_sun_and_beta2_beside_loss_and_lr(kind, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    optimizer = KourkoutasBeta(model.named_parameters(), lr=1e-2, buckets="module", diagnostics=True)
    if kind == "tensorboard":
        sink = TensorBoardSink(tmp_path / "board")
    else:
        import wandb

        run = wandb.init(project="test", dir=str(tmp_path))
        sink = WandbSink(run)
    trace = Trace(optimizer.bucket_names, sinks=[sink])
    losses = {}
    for step in range(1, 13):
        loss = model(torch.randn(8, 3)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
        sink.write(step, {"loss": loss.item(), "lr": optimizer.param_groups[0]["lr"]})
        if step % 5 == 0:  # rows of earlier steps come after the loss of later ones
            optimizer.pull(trace)
    optimizer.pull(trace)
    trace.close()
    if kind == "wandb":
        run.finish()
    found = READERS[kind](tmp_path)
    assert trace.steps.tolist() == list(range(1, 13))
    same(found, trace.steps, trace.names, trace.sun, trace.beta2)
    assert found["loss"] == pytest.approx(losses)
    assert set(found["lr"]) == set(losses)
