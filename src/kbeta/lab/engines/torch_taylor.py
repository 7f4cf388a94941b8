"""`taylor_layer` for PyTorch without a compiler: forward and backward written by hand, in few passes over memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kbeta.lab.engines.taylor import Counts, rows


class TaylorLayer(torch.autograd.Function):
    """See `kbeta.lab.engines.taylor` for the maths, the rows and the names.

    NOTE: only x, the channels of a and σ(a) are kept for the backward pass; autograd of the plain formula keeps nine arrays.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, counts: Counts) -> Tensor:  # type: ignore[override]
        n, m, _ = counts
        end = rows(counts)
        z = x @ w
        a = z[: end[0]].add_(b)
        a1, a2, a3 = z[end[0] : end[1]], z[end[1] : end[2]], z[end[2] : end[3]]
        s = torch.sigmoid(a)
        u = (1 - s).mul_(s)
        f1 = torch.addcmul(s[: n + m], a[: n + m], u[: n + m])
        h = torch.empty_like(z)
        torch.mul(a, s, out=h[: end[0]])
        torch.mul(f1, a1, out=h[end[0] : end[1]])
        three = (3, n, z.shape[1])
        torch.mul(z[end[1] :].view(three), f1[:n], out=h[end[1] :].view(three))
        # L f = f' L a + f'' Σ a_i²
        f2 = s[:n].mul(-2).add_(1).mul_(a[:n]).add_(2).mul_(u[:n])
        squares = a1[:n].square().addcmul_(a2, a2).addcmul_(a3, a3)
        h[end[3] :].addcmul_(f2, squares)
        ctx.save_for_backward(x, w, z, s)
        ctx.counts = counts
        return h

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        (G,) = grads
        x, w, z, s = ctx.saved_tensors
        n, m, _ = ctx.counts
        end = rows(ctx.counts)
        a, a1, a2, a3, La = z[: end[0]], z[end[0] : end[1]], z[end[1] : end[2]], z[end[2] : end[3]], z[end[3] :]
        G1, G2, G3, GL = G[end[0] : end[1]], G[end[1] : end[2]], G[end[2] : end[3]], G[end[3] :]
        u = (1 - s).mul_(s)
        f1 = torch.addcmul(s, a, u)
        # Every channel passes f' of its own gradient.
        g = torch.empty_like(G)
        torch.mul(G[: end[0]], f1, out=g[: end[0]])
        torch.mul(G1, f1[: n + m], out=g[end[0] : end[1]])
        three = (3, n, z.shape[1])
        torch.mul(G[end[1] :].view(three), f1[:n], out=g[end[1] :].view(three))
        # a_i ← 2 f'' a_i GL
        r = s[: n + m].mul(-2).add_(1)
        ar = a[: n + m] * r
        f2 = (ar + 2).mul_(u[: n + m])
        twice = (f2[:n] * GL).mul_(2)
        g[end[0] : end[0] + n].addcmul_(twice, a1[:n])
        g[end[1] : end[2]].addcmul_(twice, a2)
        g[end[2] : end[3]].addcmul_(twice, a3)
        # a ← f'' (Σ G_i a_i + GL L a)
        inner = G1 * a1
        inner[:n].addcmul_(G2, a2).addcmul_(G3, a3).addcmul_(GL, La)
        g[: n + m].addcmul_(f2, inner)
        # a ← f''' Σ a_i² GL, f''' = u (r (3 + a r) - 2 a u)
        f3 = (ar[:n] + 3).mul_(r[:n]).addcmul_(a[:n], u[:n], value=-2).mul_(u[:n])
        squares = a1[:n].square().addcmul_(a2, a2).addcmul_(a3, a3)
        g[:n].addcmul_(f3, squares.mul_(GL))
        return g @ w.T if ctx.needs_input_grad[0] else None, x.T @ g, g[: end[0]].sum(0), None
