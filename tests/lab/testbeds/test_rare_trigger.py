"""Testbed C: the data are what the paper says, whatever the chunks; engines agree."""

import numpy as np
import pytest
from scipy import stats

from kourkoutas.lab import engines, testbeds
from kourkoutas.lab.running.train import run
from kourkoutas.lab.specs.spec import RunSpec
from kourkoutas.lab.testbeds.rare_trigger import Settings, draw, logits, loss, training_data

TESTBED = testbeds.get("rare_trigger")
SMALL = Settings(steps=120, batch=8)


def problem(seed=0, **changes):
    return TESTBED.problem(testbeds.override(SMALL, changes, "rare_trigger"), seed)


def test_the_paper_preset_has_the_papers_sizes():
    s = TESTBED.presets["paper"]
    assert (s.steps, s.repeat_first, s.lr, s.batch) == (30_000, 10, 1e-2, 64)
    assert (s.shortest, s.longest, s.vocabulary, s.p_trigger, s.width) == (80, 256, 256, 0.01, 64)
    assert s.held_out >= 50_000
    assert s.stream == "own"


def test_counts_add_up_to_lengths_that_are_uniform_in_80_to_256():
    s = draw(Settings(), 20_000, 9, 9)
    np.testing.assert_array_equal(s.counts.sum(1), s.lengths)
    observed = np.bincount(s.lengths.astype(int), minlength=257)
    assert observed[:80].sum() == 0
    assert stats.chisquare(observed[80:]).pvalue > 1e-3


@pytest.mark.parametrize("vocabulary", [256, 20])
def test_fillers_are_uniform_over_the_tokens_from_1(vocabulary):
    s = draw(Settings(vocabulary=vocabulary, p_trigger=0), 5_000, 9, 10)
    observed = s.counts.sum(0, dtype=np.int64)
    assert observed[0] == 0
    assert stats.chisquare(observed[1:]).pvalue > 1e-3
    assert s.labels.sum() == 0


def test_counts_of_one_token_spread_as_independent_draws_do():
    s = draw(Settings(shortest=200, longest=200, p_trigger=0), 20_000, 9, 11)
    # Binomial(200, 1/255) per sequence: mean 0.784, variance 0.781.
    c = s.counts[:, 17].astype(float)
    assert c.mean() == pytest.approx(200 / 255, abs=4 * np.sqrt(0.781 / 20_000))
    assert c.var() == pytest.approx(200 / 255 * 254 / 255, rel=0.05)


def test_one_sequence_in_a_hundred_is_labelled_and_holds_the_trigger():
    s = draw(Settings(), 40_000, 9, 12)
    positives = s.labels == 1
    assert stats.binomtest(int(positives.sum()), 40_000, 0.01).pvalue > 1e-3
    assert (s.counts[positives, 255] >= 1).all()
    # The placed trigger adds 1 to what fillers bring: L/255 on average, less the one it replaced.
    assert s.counts[positives, 255].mean() > s.counts[~positives, 255].mean() + 0.8
    # About half of the others hold one by chance.
    assert 0.4 < (s.counts[~positives, 255] > 0).mean() < 0.6


def test_a_trigger_lands_at_every_place_of_a_sequence():
    s = draw(Settings(shortest=4, longest=4, vocabulary=3, p_trigger=1), 8_000, 9, 13)
    # Token 2 is the trigger: three free places of two values, so 1 + Binomial(3, ½) of it.
    observed = np.bincount(s.counts[:, 2], minlength=5)
    assert observed[0] == 0
    assert stats.chisquare(observed[1:], 8_000 * np.array([1, 3, 3, 1]) / 8).pvalue > 1e-3


def test_batches_do_not_depend_on_how_they_are_asked_for():
    p = problem()
    whole = p.batches(0, p.steps)
    parts = [p.batches(a, min(a + 37, p.steps)) for a in range(0, p.steps, 37)]
    for name, x in whole.items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), x)


def test_a_longer_run_starts_with_the_batches_of_a_shorter_one():
    short, long = problem().batches(0, 130), problem(steps=300).batches(0, 130)
    for name, x in short.items():
        np.testing.assert_array_equal(long[name], x)


def test_the_first_batch_is_repeated_and_then_every_batch_comes_once():
    x = problem(repeat_first=10).batches(0, 130)["counts"]
    assert all((x[i] == x[0]).all() for i in range(10))
    assert len({b.tobytes() for b in x}) == 121


def test_seeds_have_streams_of_their_own():
    a, b = training_data(SMALL, 0).counts, training_data(SMALL, 1).counts
    assert not {x.tobytes() for x in a} & {x.tobytes() for x in b}


def test_the_listings_stream_is_one_stream_shifted_by_the_seed():
    listing = testbeds.override(SMALL, {"stream": "listing"}, "rare_trigger")
    for seed in (1, 49, 60):
        a, b = training_data(listing, 0), training_data(listing, seed)
        np.testing.assert_array_equal(a.counts[seed:], b.counts[: len(b.counts) - seed])
        np.testing.assert_array_equal(a.labels[seed:], b.labels[: len(b.labels) - seed])


def test_initial_parameters_depend_on_the_seed_alone():
    a, b, c = problem(3).params, problem(3, steps=7).params, problem(4).params
    np.testing.assert_array_equal(a["embedding"], b["embedding"])
    assert not np.array_equal(a["embedding"], c["embedding"])
    assert a["embedding"].std() == pytest.approx(0.02, rel=0.05)


def test_the_logits_are_those_of_mean_pooled_embeddings():
    E = engines.get("torch")
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal(p.shape).astype(np.float32) for name, p in problem().params.items()}
    lengths = [5, 9]
    tokens = [rng.integers(1, 256, n) for n in lengths]
    counts = np.stack([np.bincount(t, minlength=256) for t in tokens]).astype(np.uint8)
    batch = {"counts": counts, "lengths": np.array(lengths, np.float32), "labels": np.array([1, 0], np.float32)}
    want = [params["embedding"][t].mean(0) @ params["head.w"][:, 0] + params["head.b"][0] for t in tokens]
    on_engine = [{name: E.array(x) for name, x in d.items()} for d in (params, batch)]
    np.testing.assert_allclose(E.numpy(logits(E, *on_engine)), want, rtol=1e-4, atol=1e-5)
    bce = np.mean(np.logaddexp(0, want) - batch["labels"] * want)
    assert float(E.numpy(loss(E, *on_engine))) == pytest.approx(bce, rel=1e-4)


def test_a_model_that_knows_only_the_base_rate_has_its_entropy_on_held_out_data():
    p = TESTBED.problem(testbeds.settings_of(TESTBED, "paper", {"steps": 1}), 0)
    E = engines.get("torch")
    params = {name: E.array(np.zeros_like(x)) for name, x in p.params.items()}
    params["head.b"] = E.array(np.array([np.log(0.01 / 0.99)], np.float32))
    # H(0.01) = 0.0560 nats; the standard error at 65,536 sequences is 0.0018.
    assert p.evaluate(E, params, p.steps)["heldout_bce"] == pytest.approx(0.0560, abs=0.006)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stream": "mine"}, "`stream` must be 'own' or 'listing'; got 'mine'"),
        ({"longest": 300}, "longest <= 256"),
        ({"vocabulary": 2}, "`vocabulary` must be in 3 ... 256; got 2"),
        ({"p_trigger": 1.5}, "`p_trigger` must be in"),
        ({"steps": 0}, "`steps` must be >= 1; got 0"),
        ({"steps": "many"}, "`steps` must be a whole number, for example 120; got 'many'"),
        ({"stps": 3}, "unknown setting of rare_trigger 'stps': did you mean 'steps'"),
    ],
)
def test_a_bad_setting_is_named_with_its_value_and_the_remedy(changes, message):
    with pytest.raises(ValueError, match=message):
        problem(**changes)


@pytest.mark.parametrize("label", ["kbeta", "adam999"])
def test_engines_agree_on_the_losses_of_a_smoke_run(label):
    results = {e: run(RunSpec(testbed="rare_trigger", optimizer=label, engine=e, seed=1)) for e in engines.NAMES}
    reference = results["torch"]
    assert reference.curve["step"][-1] == 200
    for result in results.values():
        np.testing.assert_allclose(result.curve["loss"], reference.curve["loss"], rtol=1e-3)
        assert result.endpoint == pytest.approx(reference.endpoint, rel=1e-3)
        assert result.metrics == pytest.approx(reference.metrics, rel=1e-3)
        assert set(result.metrics) >= {e.metric for e in TESTBED.endpoints}
