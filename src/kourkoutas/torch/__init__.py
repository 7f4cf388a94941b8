"""Kourkoutas-β for PyTorch.

The way of a step through the C kernel: `optimizer.py`, `routes.py`, `kernel.py` and _native/step.c.

The way of a step through torch's own operations: `optimizer.py`, `routes.py`, `lists.py`, `rule.py`.

A step has the same stages whichever way it goes:

    gather      the group's tensors and state; every check comes before the first change   optimizer.py, lists.py
    choose      one function, `routes.choose`: the route and the reason                     routes.py
    measure     local sums: Σ g², and Σ |θ| where needed                                    kernel.py or lists.py
    pool        sums of what lies on several ranks, one vector for all groups               sharding.py
    rule.step   n → β2, coefficients, new scalar state                                      step.c or kourkoutas/rule.py
    update      m, v, v_max and θ                                                           step.c or lists.py
    record      sun, β2 and n, with diagnostics=True                                        recorder.py

options.py is passed when an option has changed.

| route   | for                                                      | scalars               | update               |
|---------|----------------------------------------------------------|-----------------------|----------------------|
| kernel  | plain tensors on the CPU                                 | in C                  | in C, all in one call |
| foreach | all others: GPU, compile, modes, subclasses, no compiler | vectors on the device | torch's foreach calls |

NOTE: on plain CPU tensors that lie whole on this rank, where the C kernel is not there, torch's fused Adam kernel with
folded coefficients does the update, if the options allow it; scalars are NumPy's if each parameter is its own bucket.

NOTE: the kernel measures, applies the rule and updates in one call, wave by wave, to find gradients in cache. It does
so in two calls, with the sums handed out and back in, where they must be seen or pooled first.

NOTE: after `gather`, routes see plain tensors only: of a DTensor, what lies on this rank.
"""

try:
    from kourkoutas.torch.optimizer import KourkoutasBeta
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError("kourkoutas.torch needs PyTorch: pip install 'kourkoutas-beta[torch]'") from None

__all__ = ["KourkoutasBeta"]
