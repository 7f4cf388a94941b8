"""Kourkoutas-β for PyTorch.

A step of `KourkoutasBeta` has the same stages whichever way it goes:

    gather      the group's tensors and state; every check comes before the first change   options.py, state.py
    choose      one function, `routes.choose`: kernel, host, lists or adam, and the reason  routes.py
    measure     local sums: Σ g², and Σ |θ| where needed                                    each route's `measure`
    pool        sums of what lies on several ranks, one vector for all groups               pooling.py, parts.py
    norms       n per bucket; all norms are looked at before the first tensor moves         each route's `norms`
    rule.step   n → β2, coefficients, new scalar state                                      kourkoutas/rule.py
    update      m, v, v_max and θ                                                           each route's `apply`
    record      sun, β2 and n, with diagnostics=True                                        recorder.py

`optimizer.py` has the class and the order of these stages.

| route  | file      | scalars                  | update                                          |
|--------|-----------|--------------------------|-------------------------------------------------|
| kernel | native.py | in C, _native/step.c     | in C, all tensors of a group in one call        |
| host   | host.py   | NumPy or floats          | torch's fused Adam kernel, tensor by tensor     |
| lists  | lists.py  | vectors on the device    | torch's foreach operations; gpu.py on request   |
| adam   | lists.py  | vectors on the device    | torch's own functional Adam, for a fixed β2     |

NOTE: the kernel measures, pools, applies the rule and updates in one call, wave by wave, to find gradients in cache. It
does so in two calls, with the sums handed out and back in, where they must be seen or pooled first.

NOTE: after `gather`, routes see plain tensors only: of a DTensor, what lies on this rank.
"""

try:
    from kourkoutas.torch.optimizer import KourkoutasBeta
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError("kourkoutas.torch needs PyTorch: pip install 'kourkoutas-beta[torch]'") from None

__all__ = ["KourkoutasBeta"]
