"""Kourkoutas-β entered into torch's own table of optimizers, and the properties that torch asks of those in it.

The machinery is torch.testing._internal.common_optimizers: an OptimizerInfo with its configurations, schedulers and
errors, which `optims` expands over implementations, devices and dtypes. amsgrad=True is decay=1 here.
"""

import copy
import io
import unittest

import pytest
import torch

from kourkoutas.torch import KourkoutasBeta

common = pytest.importorskip("torch.testing._internal.common_optimizers")
from torch.testing._internal.common_device_type import instantiate_device_type_tests  # noqa: E402
from torch.testing._internal.common_utils import TestCase  # noqa: E402

ADAM = next(info for info in common.optim_db if info.optim_cls is torch.optim.Adam)


def ours(options):
    options = dict(options)
    if options.pop("amsgrad", False):
        options["decay"] = 1
    if "betas" in options:
        options["beta1"], options["beta2_max"] = options.pop("betas")
    return options


def inputs(device, dtype=None):
    adams = [common.OptimizerInput(None, ours(x.kwargs), x.desc) for x in ADAM.optim_inputs_func(device, dtype)]
    tensors = {"lr": torch.tensor(0.001), "beta1": torch.tensor([[[0.9]]]), "beta2_max": torch.tensor([[0.99]])}
    more = {
        "capturable": {"capturable": True},
        "tensor lr and betas": {**tensors, "capturable": True, "decay": 1},
        "full": {"decay": 0.98, "max_ratio": 3, "adaptive_tiny": True, "warmup_steps": 3},
        "exact, shape": {"bias_correction": "exact", "buckets": "shape"},
        "global, skip": {"buckets": "global", "nonfinite": "skip"},
        "fixed": {"beta2_min": 0.999},
    }
    return adams + [common.OptimizerInput(None, options, name) for name, options in more.items()]


def errors(device, dtype):
    def bad(options, message):
        entry = common.OptimizerInput([torch.nn.Parameter(torch.ones(2))], options, message)
        return common.ErrorOptimizerInput(entry, error_type=ValueError, error_regex=message)

    return [
        bad({"lr": -0.5}, "`lr` must be a finite number >= 0"),
        bad({"beta1": 1.0}, "`beta1` must be in"),
        bad({"weight_decay": -1}, "`weight_decay` must be a finite number"),
        bad({"lr": torch.ones(2)}, "`lr` must be a number or a tensor of one element"),
    ]


INFO = common.OptimizerInfo(
    KourkoutasBeta,
    optim_inputs_func=inputs,
    scheduler_inputs=(*ADAM.scheduler_inputs,),
    optim_error_inputs_func=errors,
    supported_impls=("foreach", "fused"),
    has_capturable_arg=True,
    not_og_supported_flags=("maximize", "capturable", "foreach", "fused"),
    supports_fused_on=("cpu",),
)
every_input = common.optims([INFO], dtypes=[torch.float32])


def model(device, dtype):
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(4, 3, device=device, dtype=dtype))
    bias = torch.nn.Parameter(torch.randn(4, device=device, dtype=dtype))
    x = torch.randn(3, device=device, dtype=dtype)
    return [weight, bias], lambda: (weight.mv(x) + bias).pow(2).sum()


def configurations(device, dtype, info):
    return common._get_optim_inputs_including_global_cliquey_kwargs(device, dtype, info)


def train(params, loss, optimizer, steps, schedulers=()):
    first = None
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        first = value.item() if first is None else first
        value.backward()
        optimizer.step()
        for scheduler in schedulers:
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(value.item()) if plateau else scheduler.step()
    return first, loss().item()


class TestOptimizer(TestCase):
    @every_input
    def test_goes_the_right_direction_with_and_without_schedulers(self, device, dtype, optim_info):
        for entry in configurations(device, dtype, optim_info):
            for schedulers in ((), *optim_info.scheduler_inputs):
                params, loss = model(device, dtype)
                optimizer = KourkoutasBeta(params, **{"lr": 0.01, **entry.kwargs})
                first, last = train(params, loss, optimizer, 10, [make(optimizer) for make in schedulers])
                up = entry.kwargs.get("maximize", False)
                assert (last > first) is up, entry.desc

    @every_input
    def test_errors_are_those_that_were_announced(self, device, dtype, optim_info):
        for error in optim_info.optim_error_inputs_func(device, dtype):
            entry = error.optimizer_error_input
            with pytest.raises(error.error_type, match=error.error_regex):
                KourkoutasBeta(entry.params, **entry.kwargs)

    @every_input
    def test_every_implementation_gives_the_same(self, device, dtype, optim_info):
        for entry in optim_info.optim_inputs_func(device, dtype):
            results = []
            for implementation in ({"foreach": False, "fused": False}, {"foreach": True}, {"fused": True}):
                params, loss = model(device, dtype)
                train(params, loss, KourkoutasBeta(params, **entry.kwargs, **implementation), 5)
                results.append(params)
            for other in results[1:]:
                torch.testing.assert_close(results[0], other, rtol=1e-5, atol=1e-6, msg=entry.desc)

    @every_input
    def test_a_step_without_gradients_is_none(self, device, dtype, optim_info):
        for entry in configurations(device, dtype, optim_info):
            params, _ = model(device, dtype)
            before = [p.detach().clone() for p in params]
            optimizer = KourkoutasBeta(params, **entry.kwargs)
            optimizer.step()
            assert all(map(torch.equal, before, params))
            assert not optimizer.state

    @every_input
    def test_a_step_of_zero_gradients_from_the_start_moves_nothing_but_decays(self, device, dtype, optim_info):
        for entry in configurations(device, dtype, optim_info):
            params, _ = model(device, dtype)
            before = [p.detach().clone() for p in params]
            for p in params:
                p.grad = torch.zeros_like(p)
            KourkoutasBeta(params, **{"lr": 0.5, **entry.kwargs}).step()
            factor = 1 - float(entry.kwargs.get("lr", 0.5)) * entry.kwargs.get("weight_decay", 0.0)
            torch.testing.assert_close([p.detach() for p in params], [factor * b for b in before], msg=entry.desc)

    @every_input
    def test_state_saved_and_loaded_goes_on_with_the_same_bits(self, device, dtype, optim_info):
        for entry in configurations(device, dtype, optim_info):
            params, loss = model(device, dtype)
            optimizer = KourkoutasBeta(params, **entry.kwargs)
            train(params, loss, optimizer, 3)
            params[0].grad = None  # so that parameters differ in their steps
            optimizer.step()
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            twins, twin_loss = model(device, dtype)
            with torch.no_grad():
                for p, q in zip(params, twins, strict=True):
                    q.copy_(p)
            twin = KourkoutasBeta(twins, **entry.kwargs)
            twin.load_state_dict(torch.load(file, weights_only=True))
            train(params, loss, optimizer, 3)
            train(twins, twin_loss, twin, 3)
            for p, q in zip(params, twins, strict=True):
                assert torch.equal(p, q), entry.desc

    @every_input
    def test_older_state_without_the_later_flags_loads(self, device, dtype, optim_info):
        for entry in optim_info.optim_inputs_func(device, dtype):
            params, loss = model(device, dtype)
            optimizer = KourkoutasBeta(params, **entry.kwargs)
            train(params, loss, optimizer, 2)
            old = copy.deepcopy(optimizer.state_dict())
            for group in old["param_groups"]:
                for flag in (*optim_info.not_og_supported_flags, "amsgrad"):
                    group.pop(flag)
            optimizer.load_state_dict(old)
            train(params, loss, optimizer, 2)
            assert optimizer.param_groups[0]["betas"] == old["param_groups"][0]["betas"]
            assert optimizer.state[params[0]]["step"].item() == 4

    @every_input
    def test_a_deep_copy_is_an_optimizer_of_its_own(self, device, dtype, optim_info):
        for entry in configurations(device, dtype, optim_info):
            params, loss = model(device, dtype)
            optimizer = KourkoutasBeta(params, **entry.kwargs)
            train(params, loss, optimizer, 2)
            twin = copy.deepcopy(optimizer)
            before = [p.detach().clone() for p in params]
            for p in twin.param_groups[0]["params"]:
                p.grad = torch.ones_like(p)
            twin.step()
            assert all(map(torch.equal, before, params))
            assert optimizer.state[params[0]]["step"].item() == 2

    @every_input
    def test_complex_parameters_are_pairs_of_reals(self, device, dtype, optim_info):
        for entry in configurations(device, dtype, optim_info):
            if entry.kwargs.get("fused") or "shape" in entry.desc:
                continue
            torch.manual_seed(0)
            z = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64, device=device))
            pair = torch.nn.Parameter(torch.view_as_real(z.detach()).clone())
            one, other = KourkoutasBeta([z], **entry.kwargs), KourkoutasBeta([pair], **entry.kwargs)
            for _ in range(3):
                z.grad = torch.randn(3, dtype=torch.complex64, device=device)
                pair.grad = torch.view_as_real(z.grad).clone()
                one.step()
                other.step()
            torch.testing.assert_close(torch.view_as_real(z.detach()), pair.detach(), rtol=1e-5, atol=1e-6)

    @every_input
    def test_hooks_run_around_a_step_and_may_be_removed(self, device, dtype, optim_info):
        for entry in configurations(device, dtype, optim_info):
            params, loss = model(device, dtype)
            optimizer = KourkoutasBeta(params, **entry.kwargs)
            seen = []
            handles = [
                optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append("before")),
                optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append("after")),
            ]
            train(params, loss, optimizer, 1)
            for handle in handles:
                handle.remove()
            train(params, loss, optimizer, 1)
            assert seen == ["before", "after"]


instantiate_device_type_tests(TestOptimizer, globals(), only_for="cpu")

if __name__ == "__main__":
    unittest.main()
