"""With a fixed β2, `basis="eigen"` is SOAP: it follows pytorch_optimizer's, step by step, in float64.

Where the two differ, and why these tests need what they do:

- ε. SOAP divides by √v + ε and then multiplies by √b2; K-β, as Adam, divides by √(v/b2) + ε. So ε is next to nothing,
  or, for a network, which has entries of next to nothing, there is no bias correction.
- The first basis. Of a gradient with fewer columns than rows, the eigenvectors to the eigenvalue 0 may be any. Where
  they are not determined, ours are put in the place of SOAP's.
- Turns. SOAP's QR is computed in float32, whatever the parameters are, so after a turn the two agree to its rounding.

What they have in common, though it is not in the paper: the first gradient moves nothing, and columns are sorted by
their eigenvalues before each turn.
"""

import pytest
import torch

from kourkoutas.torch import KourkoutasBeta

pytorch_optimizer = pytest.importorskip("pytorch_optimizer")

LR, EVERY = 1e-2, 10


def soap(params, **options):
    options = {"eps": 1e-30, **options}
    return pytorch_optimizer.SOAP(
        params, lr=LR, betas=(0.95, 0.95), weight_decay=0.0, precondition_frequency=EVERY, **options
    )


def ours(params, **options):
    options = {"eps": 1e-30, "bias_correction": "exact", "basis": "eigen", "basis_every": EVERY, **options}
    return KourkoutasBeta(params, lr=LR, beta1=0.95, beta2_min=0.95, beta2_max=0.95, **options)


def take_first_basis(optimizer, params, other, others):
    """Give `other` the basis that SOAP has made."""
    for p, q in zip(params, others, strict=True):
        for axis, basis in enumerate(optimizer.state[p]["Q"]):
            if f"basis_{axis}" in other.state[q]:
                other.state[q][f"basis_{axis}"] = basis.clone()


def distances(theirs, mine):
    return max(float((p - q).abs().max()) for p, q in zip(theirs, mine, strict=True))


@pytest.mark.parametrize("shape", [(6, 6), (5,), (4, 3, 5), (8, 5), (1, 6)], ids=str)
def test_a_parameter_follows_soap(shape):
    p, q = (torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for _ in range(2))
    first, second = soap([p]), ours([q])
    generator = torch.Generator().manual_seed(0)
    apart = []
    for step in range(40):
        p.grad = torch.randn(shape, generator=generator, dtype=torch.float64)
        q.grad = p.grad.clone()
        first.step()
        second.step()
        if step == 0:
            take_first_basis(first, [p], second, [q])
        apart.append(distances([p], [q]))
    assert float(p.abs().max()) > 5 * LR  # they have moved
    assert apart[EVERY] < 1e-14  # before the first turn
    assert apart[-1] < 1e-5 * LR  # after three


def test_a_network_follows_soap():
    def network():
        torch.manual_seed(0)
        layers = [torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)]
        return torch.nn.Sequential(*layers).double()

    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.sin(x.sum(1, keepdim=True))
    theirs, mine = network(), network()
    first = soap(theirs.parameters(), eps=1e-4, correct_bias=False)
    second = ours(mine.parameters(), eps=1e-4, bias_correction="none")
    losses = []
    for step in range(35):
        for model, optimizer in ((theirs, first), (mine, second)):
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if step == 0:
            take_first_basis(first, list(theirs.parameters()), second, list(mine.parameters()))
        if step == EVERY:
            assert distances(theirs.parameters(), mine.parameters()) < 1e-12
    assert losses[-1] < 0.5 * losses[0]
    # Float32's QR leaves the directions without a gradient to chance.
    assert losses[-1] == pytest.approx(losses[-2], rel=1e-2)
