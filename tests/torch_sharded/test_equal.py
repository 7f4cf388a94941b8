"""Sharded equals unsharded: parameters, β2 and r of every layout are those of one process."""

import itertools

import pytest
import torch

from tests.torch_sharded import jobs, models
from tests.torch_sharded.ranks import ranks

LAYOUTS = {
    "fsdp2 on 2": (2, "fsdp2"),
    "fsdp2 on 4": (4, "fsdp2"),
    "hsdp 2x2": (4, "hsdp"),
    "tp on 2": (2, "tp"),
    "tp on 4": (4, "tp"),
    "tp+sp on 2": (2, "tp+sp"),
    "fsdp2+tp 2x2": (4, "fsdp2+tp"),
}
FULL = {"decay": 0.98, "max_ratio": 3.0, "adaptive_tiny": True, "tiny_denom": 1e-2, "weight_decay": 0.1}
OPTIONS = {
    "parameter": {},
    "module": {"buckets": "module"},
    "shape": {"buckets": "shape"},
    "global": {"buckets": "global"},
    "extras": FULL,
    "extras, global": {**FULL, "buckets": "global"},
    "exact": {"bias_correction": "exact", "buckets": "module"},
    "skip": {"nonfinite": "skip", "buckets": "module"},
    "warmup": {"warmup_steps": 5},
    "no diagnostics of Adam": {"beta2_min": 0.999},
    "bf16 state": {"state_dtype": torch.bfloat16},
    "foreach": {"foreach": True},
    "capturable": {"capturable": True, **FULL},
    "no kernel": {"kernel": False},
    "no kernel, extras": {"kernel": False, "adaptive_tiny": True, "tiny_denom": 1e-2, "buckets": "module"},
}
FAST = {
    ("fsdp2 on 2", "parameter"),
    ("fsdp2 on 2", "extras, global"),
    ("fsdp2 on 2", "bf16 state"),
    ("fsdp2 on 2", "no kernel, extras"),
    ("fsdp2 on 4", "module"),
    ("hsdp 2x2", "shape"),
    ("hsdp 2x2", "capturable"),
    ("tp on 2", "extras"),
    ("tp+sp on 2", "global"),
    ("fsdp2+tp 2x2", "parameter"),
    ("fsdp2+tp 2x2", "extras, global"),
    ("fsdp2+tp 2x2", "bf16 state"),
}
CASES = [
    pytest.param(layout, options, marks=() if (layout, options) in FAST else pytest.mark.slow)
    for layout, options in itertools.product(LAYOUTS, OPTIONS)
]


def compare(world, layout, options, dtype, **how):
    alone = jobs.train(models.model(dtype), options, **how)
    together = ranks(world).run(_sharded, layout, {**options, "process_group": "local"}, dtype, how)
    tolerance = 1e-12 if dtype is torch.float64 else 2e-6
    for answer in together:
        for what in ("params", "ema"):
            for name, expected in alone[what].items():
                torch.testing.assert_close(
                    answer[what][name], expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
                )
        torch.testing.assert_close(answer["beta2"], alone["beta2"], rtol=0, atol=2e-6, equal_nan=True)
        assert answer["skipped"] == alone["skipped"]
    return alone, together


def _sharded(rank, world, layout, options, dtype, how):
    return jobs.sharded(rank, world, layout, options, dtype, **how)


@pytest.mark.parametrize(("layout", "options"), CASES)
def test_twenty_steps_with_spikes_equal_one_process_in_float32(layout, options):
    how = {"bad": (9, "down.weight")} if options == "skip" else {}
    if layout.startswith("tp+sp"):
        how["partial"] = True
    alone, _ = compare(*LAYOUTS[layout], OPTIONS[options], torch.float32, **how)
    if options == "skip":
        assert alone["skipped"]["down.weight"] == 1


FLOAT64 = [
    pytest.param(layout, options, marks=() if (layout, options) in FAST else pytest.mark.slow)
    for layout, options in itertools.product(LAYOUTS, OPTIONS)
    if options != "bf16 state"
]


@pytest.mark.parametrize(("layout", "options"), FLOAT64)
def test_twenty_steps_with_spikes_equal_one_process_in_float64(layout, options):
    how = {"bad": (9, "down.weight")} if options == "skip" else {}
    compare(*LAYOUTS[layout], OPTIONS[options], torch.float64, **how)


def test_rounding_of_bfloat16_state_does_not_depend_on_the_number_of_ranks():
    alone = jobs.train(models.model(), {"state_dtype": torch.bfloat16})
    for world, layout in ((2, "fsdp2"), (4, "fsdp2"), (4, "fsdp2+tp")):
        for answer in ranks(world).run(_sharded, layout, {"state_dtype": torch.bfloat16}, torch.float32, {}):
            for name, expected in alone["moments"].items():
                same = (answer["moments"][name] == expected).float().mean()
                assert same == 1, f"{name} on {world} ranks, {layout}: {same:.3f} equal"


def test_rounding_of_bfloat16_parameters_does_not_depend_on_the_number_of_ranks():
    options = {"stochastic_rounding": True, "lr": 1e-3}
    alone = jobs.train(models.model(torch.bfloat16), options)
    for world, layout in ((2, "fsdp2"), (4, "fsdp2"), (4, "fsdp2+tp")):
        for answer in ranks(world).run(_sharded, layout, options, torch.bfloat16, {}):
            for what in ("params", "moments"):
                for name, expected in alone[what].items():
                    same = (answer[what][name] == expected).float().mean()
                    assert same == 1, f"{what} {name} on {world} ranks, {layout}: {same:.3f} equal"


@pytest.mark.parametrize("options", [{}, {"kernel": False}, {"foreach": True}, {"buckets": "module"}], ids=str)
@pytest.mark.parametrize(("world", "layout"), [(2, "fsdp2"), (4, "fsdp2+tp")])
def test_weight_decay_moves_shards_no_further_from_one_process_than_other_options_do(world, layout, options):
    decay = {"weight_decay": 0.3, "buckets": options.get("buckets", "parameter")}
    alone = jobs.train(models.model(), decay)
    options = {**options, **decay}
    for answer in ranks(world).run(_sharded, layout, {**options, "process_group": "local"}, torch.float32, {}):
        for name, expected in alone["params"].items():
            torch.testing.assert_close(answer["params"][name], expected, rtol=0, atol=5e-7)


@pytest.mark.parametrize("options", ["parameter", "extras, global"])
def test_replicas_are_equal_to_the_bit(options):
    _, hsdp = compare(4, "hsdp", OPTIONS[options], torch.float32)
    assert hsdp[0]["here"] == hsdp[2]["here"]
    assert hsdp[1]["here"] == hsdp[3]["here"]
    _, tp = compare(2, "tp+sp", OPTIONS[options], torch.float32, partial=True)
    for name in ("norm.weight", "norm.bias", "head.weight", "down.bias", "even.weight"):
        assert tp[0]["here"][name] == tp[1]["here"][name]


@pytest.mark.parametrize(("options", "fused"), [({}, True), ({"fused": False}, False), ({"max_ratio": 3.0}, False)])
def test_shards_take_torchs_fused_adam_where_it_can(options, fused):
    for answer in ranks(2).run(_sharded, "fsdp2", options, torch.float32, {"steps": 2}):
        assert answer["route"] == [("foreach", fused)]


def test_a_parameter_without_a_gradient_is_left_alone_everywhere():
    how = {"absent": ((2, 3, 4), "down.weight")}
    compare(2, "fsdp2", {"buckets": "module"}, torch.float32, **how)
