"""`lr_warmup`: the warmup that bias_correction="beta2max" hides, by itself."""

import math

import numpy as np
import pytest

from kourkoutas.oracle import Oracle
from kourkoutas.rule import Hyper, State, step


def test_lr_warmup_multiplies_the_learning_rate_by_the_root_of_one_minus_beta2_max_to_the_t():
    hyper = Hyper(bias_correction="none", max_ratio=2.0, weight_decay=0.1, lr_warmup=True)
    state = State(np.zeros(1), 0.0)
    for t in range(1, 21):
        new = step(hyper, 1e-3, np.ones(1), state, np)
        state, factor = new.state, math.sqrt(1 - 0.999**t)
        assert new.k.rate == pytest.approx(1e-3 * factor, rel=1e-12)
        assert new.k.limit == pytest.approx(1e-3 * factor * 2, rel=1e-12)
        assert new.k.fade == pytest.approx(1e-3 * factor * 0.1, rel=1e-12)


def test_lr_warmup_of_the_oracle():
    rng = np.random.default_rng(4)
    grads = [{"w": rng.normal(size=3)} for _ in range(20)]
    plain = Oracle({"w": np.ones(3)}, Hyper(bias_correction="none", beta1=0.0, beta2_min=0.999, lr_warmup=True))
    by_hand = Oracle({"w": np.ones(3)}, Hyper(bias_correction="none", beta1=0.0, beta2_min=0.999))
    for t, g in enumerate(grads, 1):
        by_hand.lr = 1e-3 * math.sqrt(1 - 0.999**t)
        plain.step(g)
        by_hand.step(g)
    np.testing.assert_allclose(plain.params["w"], by_hand.params["w"], rtol=0, atol=1e-15)


def test_a_warmup_on_top_of_the_hidden_one_is_refused():
    with pytest.raises(ValueError, match="bias_correction='beta2max' has the same warmup"):
        Hyper(lr_warmup=True)
