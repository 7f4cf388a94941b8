"""A state that does not fit: one error that lists names, and the optimizer as it was."""

import dataclasses
import json
import sys

import numpy as np
import pytest

from kourkoutas import state
from tests.state.problem import FRAMEWORKS, gradients, start

pytest.importorskip("torch")
pytest.importorskip("optax")
pytest.importorskip("mlx.core")
safetensors = pytest.importorskip("safetensors.numpy")


def made(name="torch", options=(), steps=3, params=None):
    run = FRAMEWORKS[name](start() if params is None else params, dict(options))
    for t in range(steps):
        run.step({n: gradients(run.params, t)[n] for n in run.params})
    return run


def snapshot(run, tmp_path):
    """The whole state, by way of its own file."""
    run.save(tmp_path / "snapshot")
    return (tmp_path / "snapshot").read_bytes()


def loading(run, file):
    """Load into a run's optimizer the way its framework does."""
    if hasattr(run, "tensors"):
        state.torch.load(file, run.optimizer)
    elif hasattr(run, "optimizer"):
        state.mlx.load(file, run.optimizer, run.tree)
    else:
        run.state = state.optax.load(file, run.state, buckets=run.buckets)


@pytest.fixture(autouse=True)
def _modules():
    import kourkoutas.state.mlx
    import kourkoutas.state.optax
    import kourkoutas.state.torch  # noqa: F401


def searches(call):
    """How often `call` looks through a list or a tuple for the place or the number of a value, in code of ours."""
    found = 0

    def note(frame, event, what):
        nonlocal found
        ours = "kourkoutas" in frame.f_code.co_filename
        found += event == "c_call" and ours and getattr(what, "__name__", "") in ("index", "count", "remove")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def refused(run, file, tmp_path, *said):
    before = snapshot(run, tmp_path)
    with pytest.raises(ValueError, match=r"\w") as caught:
        loading(run, file)
    for part in said:
        assert part in str(caught.value)
    assert snapshot(run, tmp_path) == before


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_other_names_other_shapes_other_buckets_and_other_options_are_listed(name, tmp_path):
    file = tmp_path / "file"
    params = start()
    renamed = {("dec.gain" if n == "gain" else n): x for n, x in params.items()}
    other = FRAMEWORKS["torch"](renamed, {})
    other.save(file)
    refused(
        made(name), file, tmp_path, "only the file has 'dec.gain'", "only the optimizer has 'gain'", "the same names"
    )

    bigger = {n: np.zeros((7, 3), np.float32) if n == "dec.weight" else x for n, x in params.items()}
    FRAMEWORKS["torch"](bigger, {}).save(file)
    refused(made(name), file, tmp_path, "'dec.weight' has shape (7, 3) in the file and shape (4, 3) here")

    made("torch", {"buckets": "module"}).save(file)
    refused(made(name), file, tmp_path, "'enc.bias'", "'enc.weight'", "use the same `buckets`")

    made("torch", {"bias_correction": "exact", "nonfinite": "skip"}).save(file)
    refused(
        made(name, {"decay": 1.0}), file, tmp_path,
        "without, the optimizer with `decay`", "with, the optimizer without `bias_correction='exact'`", "`nonfinite",
    )  # fmt: skip


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_state_that_was_edited_by_halves_is_refused(name, tmp_path):
    """`read` and `write` let a user transpose moments: all of them, or the optimizer refuses."""
    file, options = tmp_path / "file", {"decay": 1.0, "nonfinite": "skip"}
    run = made(name, options)
    for kind in ("m", "v", "v_max"):
        made("torch", options).save(file)
        kept = state.read(file)
        kept.moments[kind]["dec.weight"] = kept.moments[kind]["dec.weight"].T
        state.write(kept, file)
        refused(run, file, tmp_path, "'dec.weight' has shape (3, 4) in the file and shape (4, 3) here")
        del kept.moments[kind]["dec.weight"]
        state.write(kept, file)
        refused(run, file, tmp_path, "'dec.weight' has shape none in the file and shape (4, 3) here")
    made("torch", options).save(file)
    kept = state.read(file)
    for vector in ("ema", "step", "skipped"):
        shorter = {**kept.scalars, vector: kept.scalars[vector][:-1]}
        state.write(dataclasses.replace(kept, scalars=shorter), file)
        refused(run, file, tmp_path, f"`{vector}` has 4 entries in the file, which lists 5")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_foreign_and_broken_files_are_refused(name, tmp_path):
    file, run = tmp_path / "file", made(name)
    safetensors.save_file({"encoder": np.zeros(3)}, file)
    refused(run, file, tmp_path, "not a state of Kourkoutas-β", "'encoder'")
    file.write_bytes(b"PK\\x03\\x04 a zip file of somebody")
    refused(run, file, tmp_path, "not a whole safetensors file")
    file.write_bytes(b"")
    refused(run, file, tmp_path, "not a whole safetensors file")
    with pytest.raises(FileNotFoundError):
        loading(run, tmp_path / "nowhere")


def test_a_newer_version_of_the_format_is_told(tmp_path):
    file = tmp_path / "file"
    made().save(file)
    data = file.read_bytes()
    assert data.count(rb"\"version\": 1") == 1
    file.write_bytes(data.replace(rb"\"version\": 1", rb"\"version\": 2"))
    with pytest.raises(ValueError, match=r"version 2 of the format.*reads version 1"):
        state.read(file)


def test_a_tensor_that_this_release_does_not_know_is_told(tmp_path):
    """Of a rule with more state: to leave it out would change how training goes on."""
    file = tmp_path / "file"
    made().save(file)
    kept = state.read(file)
    state.write(dataclasses.replace(kept, scalars={**kept.scalars, "memory": np.zeros((5, 3))}), file)
    with pytest.raises(ValueError, match="holds 'memory', which this release does not know"):
        state.read(file)


EVERYTHING = {"decay": 1.0, "nonfinite": "skip", "bias_correction": "exact"}
MASKS = [pytest.param(None, id="one change"), pytest.param(range(1, 256), id="every change", marks=pytest.mark.slow)]


def test_every_truncation_is_an_error(tmp_path):
    file = tmp_path / "file"
    made("torch", EVERYTHING, params={"w": np.ones(2, np.float32)}).save(file)
    data = file.read_bytes()
    for length in range(len(data)):
        file.write_bytes(data[:length])
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            state.read(file)


@pytest.mark.parametrize("masks", MASKS)
def test_every_flipped_byte_is_an_error_or_changes_nothing(masks, tmp_path):
    """Each byte is changed once, or, in the slow form, to all 255 other values."""
    file = tmp_path / "file"
    made("torch", EVERYTHING, params={"w": np.ones(2, np.float32)}).save(file)
    data, whole = file.read_bytes(), state.read(file)
    rng = np.random.default_rng(0)
    errors = tried = 0
    for at in range(len(data)):
        for mask in masks or [int(rng.integers(1, 256))]:
            damaged = bytearray(data)
            damaged[at] ^= mask
            file.write_bytes(damaged)
            tried += 1
            try:
                got = state.read(file)
            except ValueError:
                errors += 1
                continue
            assert same(got, whole), f"byte {at}, mask {mask}"
    print(f"{len(data)} bytes, {tried} flips, {errors} errors, {tried - errors} equal")
    assert errors > 0.95 * tried


def same(a, b):
    return json.dumps(plain(a), sort_keys=True) == json.dumps(plain(b), sort_keys=True)


def plain(x):
    if isinstance(x, state.Portable):
        return {name: plain(value) for name, value in vars(x).items()}
    if isinstance(x, dict):
        return {name: plain(value) for name, value in x.items()}
    return [str(x.dtype), x.tolist()] if isinstance(x, np.ndarray) else x


def test_what_the_portable_form_cannot_hold_is_refused():
    import jax.numpy as jnp
    import torch

    from kourkoutas.mlx import KourkoutasBeta as MlxKourkoutasBeta
    from kourkoutas.optax import kourkoutas_beta
    from kourkoutas.torch import KourkoutasBeta

    with pytest.raises(ValueError, match="must hold one Kourkoutas-β; found 0"):
        state.optax.save((), "nowhere")
    with pytest.raises(ValueError, match="use the `buckets` that the state was made with"):
        state.optax.save(kourkoutas_beta(1e-3).init({"a": jnp.ones(2), "b": jnp.ones(2)}), "nowhere", buckets="global")
    with pytest.raises(ValueError, match="no state yet"):
        state.mlx.save(MlxKourkoutasBeta(1e-3), "nowhere")
    x, y = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    for options in ({"decay": 1.0}, {"nonfinite": "skip"}):
        groups = [{"params": [("x", x)], **options}, {"params": [("y", y)]}]
        with pytest.raises(ValueError, match=r"the groups differ in what they keep .*`decay`.*`nonfinite`"):
            state.torch.save(KourkoutasBeta(groups), "nowhere")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "file"
    made().save(file)
    before = file.read_bytes()

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        made(steps=4).save(file)
    assert file.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_names_that_are_not_one_to_one_and_buckets_of_another_state_are_refused():
    import mlx.core as mx
    import torch

    from kourkoutas.mlx import KourkoutasBeta as MlxKourkoutasBeta
    from kourkoutas.torch import KourkoutasBeta

    x, y = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    with pytest.raises(ValueError, match="two parameters are called 'w': give each its own name"):
        state.torch.save(KourkoutasBeta([{"params": [("w", x)]}, {"params": [("w", y)]}]), "nowhere")
    optimizer = MlxKourkoutasBeta(1e-3, buckets="global")
    optimizer.init({"a": mx.ones(2), "b": mx.ones(2)})
    optimizer.state["ema"] = mx.zeros(2)  # as of buckets="parameter"
    with pytest.raises(ValueError, match="the state has 2 buckets and `buckets` gives 1"):
        state.mlx.save(optimizer, "nowhere")


def test_metadata_of_ours_that_is_no_object_is_refused(tmp_path):
    file = tmp_path / "file"
    made().save(file)
    (entry,) = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])["__metadata__"]
    safetensors.save_file({"w": np.zeros(1)}, file, metadata={entry: "[1, 2]"})
    with pytest.raises(
        ValueError, match=r"not a whole safetensors file \(its .* is \[1, 2\]\): write or copy it again"
    ):
        state.read(file)


def test_many_names_are_counted(tmp_path):
    file = tmp_path / "file"
    FRAMEWORKS["torch"]({f"p{i:02}": np.ones(1, np.float32) for i in range(12)}, {}).save(file)
    refused(made(), file, tmp_path, "only the file has 'p00', 'p01'", "'p09' and 2 more")


def test_a_complex_state_does_not_fit_a_real_parameter_of_its_shape(tmp_path):
    import torch

    from kourkoutas.torch import KourkoutasBeta

    file, params = tmp_path / "file", {"w": np.ones(2, np.float32)}
    state.torch.save(KourkoutasBeta([("w", torch.nn.Parameter(torch.ones(2, dtype=torch.complex64)))]), file)
    for name in FRAMEWORKS:
        run = FRAMEWORKS[name](params, {})
        run.step(params)
        refused(run, file, tmp_path, "'w' has complex shape (2,) in the file and shape (2,) here")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_loading_searches_no_list_of_names(name, tmp_path):
    """One search per parameter through the names of all of them would be quadratic in their number."""
    params = {f"layer{i}.weight": np.ones(1, np.float32) for i in range(40)}
    run = FRAMEWORKS[name](params, {"buckets": "module"})
    run.step(params)
    run.save(tmp_path / "file")
    assert searches(lambda: loading(run, tmp_path / "file")) < 20
