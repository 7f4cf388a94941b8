"""Kourkoutas-β for PyTorch.

The way of a step through the C kernel (plain tensors on the CPU): `optimizer.py`, `routes.py`, `group.py`, `kernel.py`
and _native/step.c with _native/arithmetic.c.

The way of a step through the Triton kernels (plain tensors on a GPU): `optimizer.py`, `routes.py`, `group.py`,
`triton_step.py` with `lists.py` and `rule.py`, `triton_kernels.py`.

The way of a step through torch's own operations (compile, modes, subclasses, no Triton, no compiler): `optimizer.py`,
`routes.py`, `group.py`, `lists.py`, `rule.py`.

The way of a step in the eigenbasis (`basis="eigen"`): `optimizer.py`, `routes.py`, `group.py`, `eigenbasis.py` with
`lists.py` and kourkoutas/`eigenbasis.py`, `stacks.py`, and `eigenbasis_kernel.py` with `kernel.py`, whose products
rotation.py has planned. Without a compiler, rule.py and rotation.py take the place of the last two.

A step has the same stages whichever way it goes; options.py is passed when an option has changed:

    choose      one function, `routes.choose`: the route and the reason                     routes.py
    gather      the group's tensors and state; every check comes before the first change   group.py, step.c
    measure     local sums: Σ g², and Σ |θ| where needed                          arithmetic.c, triton_*.py, lists.py
    pool        sums of what lies on several ranks, one vector for all groups               sharding.py
    rule.step   n → β2, coefficients, new scalar state                                      arithmetic.c or rule.py
    update      m, v, v_max and θ                                                 arithmetic.c, triton_*.py, lists.py
    record      sun, β2 and n, with diagnostics=True                                        recorder.py

Each route is a class with the methods of `routes.Step`. All private names of torch are in private.py.
"""

try:
    from kourkoutas.torch.optimizer import KourkoutasBeta
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError("kourkoutas.torch needs PyTorch: pip install 'kourkoutas-beta[torch]'") from None

__all__ = ["KourkoutasBeta"]
