"""The character language model: against NumPy, across engines, its data, its schedule, its errors."""

import dataclasses
import hashlib
import math

import numpy as np
import pytest

from kourkoutas.lab import engines, testbeds
from kourkoutas.lab.api import plan_of
from kourkoutas.lab.optimizers.recipes import recipe
from kourkoutas.lab.running import train
from kourkoutas.lab.specs.spec import RunSpec
from kourkoutas.lab.specs.study_options import StudyOptions
from kourkoutas.lab.testbeds.char_lm import CharLM, Model, Settings, check_bfloat16, init, split
from kourkoutas.lab.testbeds.char_lm.corpus import CorpusError
from tests.lab.testbeds.gradients import value_and_grad

TESTBED = CharLM()
SMOKE = TESTBED.presets["smoke"]
RNG = np.random.default_rng(3)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KBETA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(params=engines.NAMES)
def E(request):
    return engines.get(request.param)


def problem(seed=0, **changes):
    return TESTBED.problem(dataclasses.replace(SMOKE, **changes), seed)


def written(tmp_path, text):
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    return str(path)


# The model


def norm(x, gain, bias):
    return gain * (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) + bias


def reference(params, ids, layers, heads):
    """⟨-log p⟩ in float64, one window and one head at a time."""
    p = {name: x.astype(np.float64) for name, x in params.items()}
    d = p["embedding"].shape[1]
    w = d // heads
    total = []
    for row in ids:
        L = len(row) - 1
        h = np.stack([p["embedding"][row[i]] + p["positions"][i] for i in range(L)])
        for n in range(layers):
            b = f"blocks.{n}"
            qkv = norm(h, p[f"{b}.norm1.gain"], p[f"{b}.norm1.bias"]) @ p[f"{b}.qkv.w"] + p[f"{b}.qkv.b"]
            q, k, v = qkv[:, :d], qkv[:, d : 2 * d], qkv[:, 2 * d :]
            mixed = np.zeros((L, d))
            for head in range(heads):
                at = slice(head * w, (head + 1) * w)
                for i in range(L):
                    weights = np.exp(k[: i + 1, at] @ q[i, at] / math.sqrt(w))
                    mixed[i, at] = weights @ v[: i + 1, at] / weights.sum()
            h = h + mixed @ p[f"{b}.out.w"] + p[f"{b}.out.b"]
            x = norm(h, p[f"{b}.norm2.gain"], p[f"{b}.norm2.bias"]) @ p[f"{b}.mlp1.w"] + p[f"{b}.mlp1.b"]
            x = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
            h = h + x @ p[f"{b}.mlp2.w"] + p[f"{b}.mlp2.b"]
        z = norm(h, p["norm.gain"], p["norm.bias"]) @ p["head.w"] + p["head.b"]
        logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
        total += [-logp[i, row[i + 1]] for i in range(L)]
    return float(np.mean(total))


def shaken(settings, vocabulary):
    """Parameters with weights large enough that every part of the network counts."""
    params = init(settings, vocabulary, 0)
    return {name: (x + 0.3 * RNG.standard_normal(x.shape)).astype(np.float32) for name, x in params.items()}


SMALL = dataclasses.replace(SMOKE, width=16, heads=2, layers=2)
PARAMS = shaken(SMALL, 11)
IDS = RNG.integers(0, 11, size=(3, 21)).astype(np.int32)
MODEL = Model(2, 2, "float32")


def compiled(E, f):
    """JAX is slow one operation at a time; the others gain nothing here."""
    return E.compile(f) if E.name == "jax" else f


def test_the_loss_is_that_of_the_transformer_written_in_numpy(E):
    loss = compiled(E, lambda p, batch: MODEL(E, p, batch))(
        {name: E.array(x) for name, x in PARAMS.items()}, {"ids": E.array(IDS)}
    )
    assert float(E.numpy(loss)) == pytest.approx(reference(PARAMS, IDS, 2, 2), rel=1e-5)


def test_the_gradients_of_the_engines_agree():
    found = {}
    for name in engines.NAMES:
        E = engines.get(name)
        gradient = compiled(E, value_and_grad(E, lambda p, E=E: MODEL(E, p, {"ids": E.array(IDS)})))
        _, grads = gradient({k: E.array(x) for k, x in PARAMS.items()})
        found[name] = {k: E.numpy(g) for k, g in grads.items()}
    for name in ("jax", "mlx"):
        for k, g in found["torch"].items():
            np.testing.assert_allclose(found[name][k], g, rtol=1e-4, atol=1e-4 * np.abs(g).max())


def test_no_prediction_looks_ahead(E):
    params = {name: E.array(x) for name, x in PARAMS.items()}
    changed = IDS.copy()
    changed[:, 12:] = (changed[:, 12:] + 1) % 11
    logits = compiled(E, lambda p, ids: MODEL.logits(E, p, ids))
    a, b = (E.numpy(logits(params, E.array(ids))) for ids in (IDS, changed))
    np.testing.assert_allclose(a[:, :12], b[:, :12], rtol=1e-5, atol=1e-5)
    assert not np.allclose(a[:, 12:], b[:, 12:], atol=1e-2)


def test_bfloat16_products_give_nearly_the_same_loss_and_gradients_in_float32(E):
    params = {name: E.array(x) for name, x in PARAMS.items()}
    batch = {"ids": E.array(IDS)}
    value, grads = compiled(E, value_and_grad(E, lambda p: Model(2, 2, "bfloat16")(E, p, batch)))(params)
    assert float(E.numpy(value)) == pytest.approx(reference(PARAMS, IDS, 2, 2), rel=0.03)
    assert float(E.numpy(value)) != pytest.approx(reference(PARAMS, IDS, 2, 2), rel=1e-6)
    assert {str(g.dtype).split(".")[-1] for g in grads.values()} == {"float32"}


def test_the_paper_model_has_78_tensors_and_19_million_parameters():
    params = init(TESTBED.presets["paper"], 205, 0)
    assert len(params) == 78
    # 6·(4·d² + 8·d² + 13·d) + (positions + 2·205)·d + 2·d + 205, d = 512
    assert sum(x.size for x in params.values()) == 6 * (12 * 512**2 + 13 * 512) + (512 + 410) * 512 + 2 * 512 + 205


def test_weights_are_normal_with_deviation_002_biases_zero_and_gains_one():
    params = init(dataclasses.replace(SMOKE, width=64), 60, 1)
    for name, x in params.items():
        if name.endswith((".b", ".bias")):
            assert not x.any()
        elif name.endswith(".gain"):
            assert (x == 1).all()
        else:
            assert x.std() == pytest.approx(0.02, rel=0.1)
            assert abs(x.mean()) < 0.002


def test_a_model_that_knows_nothing_needs_log2_of_the_vocabulary_bits(E):
    p = problem()
    params = {name: E.array(0 * x if name.startswith("head") else x) for name, x in p.params.items()}
    metrics = p.evaluate(E, params, 0)
    assert metrics["bpc"] == pytest.approx(math.log2(p.text.vocabulary), rel=1e-4)
    assert metrics["heldout_loss"] == pytest.approx(math.log(p.text.vocabulary), rel=1e-4)


# Batches


def test_batches_depend_on_seed_and_step_only():
    whole = problem().batches(0, 30)
    parts = [b for start in (0, 7, 20) for b in problem().batches(start, {0: 7, 7: 20, 20: 30}[start])]
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(a["ids"], b["ids"])
    other = problem(seed=1).batches(0, 30)
    assert not any(np.array_equal(a["ids"], b["ids"]) for a, b in zip(whole, other, strict=True))


def test_lengths_jump_between_multiples_of_32_up_to_512():
    p = problem(shortest=16, longest=512, characters=20_000)
    lengths = [b["ids"].shape[1] - 1 for b in p.batches(0, 600)]
    assert sorted(set(lengths)) == list(range(32, 513, 32))
    # 17 of the 497 lengths 16 … 512 become 32, and 32 of them each longer one.
    mean = (17 * 32 + 32 * sum(range(64, 513, 32))) / 497
    assert np.mean(lengths) == pytest.approx(mean, rel=0.1)


def test_the_published_commands_have_one_length():
    p = problem(lengths="fixed", longest=512, characters=20_000)
    assert {b["ids"].shape for b in p.batches(0, 20)} == {(4, 513)}


def test_windows_are_stretches_of_the_training_part_and_held_out_ones_of_the_rest(tmp_path):
    # Training part: a…y in order, again and again; held-out part the same backwards.
    letters = "".join(map(chr, range(97, 122)))
    path = written(tmp_path, letters * 360 + letters[::-1] * 40)
    p = problem(text=path)
    for batch in p.batches(0, 50):
        assert (np.diff(batch["ids"], axis=1) % 25 == 1).all()
    assert (np.diff(p.eval_batch, axis=1) % 25 == 24).all()
    assert p.eval_batch.shape == (SMOKE.eval_windows, SMOKE.eval_length + 1)
    np.testing.assert_array_equal(p.eval_batch, problem(seed=5, text=path).eval_batch)


def test_jax_traces_each_length_once():
    traced = []

    def loss(E, params, batch):
        traced.append(batch["ids"].shape)
        return Model(1, 2, "float32")(E, params, batch)

    p = problem(width=16, layers=1)
    trainer = engines.get("jax").trainer(loss, p.params, recipe("adam95"))
    batches = p.batches(0, 24)
    shapes = {b["ids"].shape for b in batches}
    for start in (0, 12):
        trainer.run(batches[start : start + 12], np.full(12, 1e-3))
    assert len(shapes) == 2
    assert sorted(traced) == sorted(shapes)


# The schedule


def test_the_learning_rate_drops_where_the_papers_does():
    p = TESTBED.problem(dataclasses.replace(TESTBED.presets["paper"], characters=20_000), 0)
    updates = np.array([1, 29_999, 30_000, 39_999, 40_000, 50_001])
    assert p.steps == 50_001
    np.testing.assert_allclose(p.lr(updates - 1), [1e-3, 1e-3, 5e-4, 5e-4, 1e-4, 1e-4], rtol=1e-12)


def test_the_laptop_keeps_the_papers_learning_rate_times_width_and_offers_its_learning_rate():
    paper, laptop, low = (TESTBED.presets[name] for name in ("paper", "laptop", "laptop-low-lr"))
    assert laptop.lr * laptop.width == pytest.approx(paper.lr * paper.width)
    assert low == dataclasses.replace(laptop, lr=paper.lr)


@pytest.mark.parametrize("drops", ["0.6", "0.8:0.1,0.6:0.5", "0.5:-1", "a:b", "0:0.5"])
def test_a_schedule_that_makes_no_sense_is_an_error(drops):
    with pytest.raises(ValueError, match="`drops` must be FRACTION:FACTOR"):
        dataclasses.replace(SMOKE, drops=drops)


@pytest.mark.parametrize(
    "change",
    [
        {"vocabulary": "bytes"},
        {"lengths": "none"},
        {"precision": "float16"},
        {"batch": 0},
        {"rare": -1},
        {"lr": 0.0},
        {"held_out": 1.0},
        {"shortest": 65},
        {"heads": 3},
        {"eval_length": 65},
        {"tail": 0},
    ],
)
def test_settings_out_of_range_are_errors_that_name_them(change):
    with pytest.raises(ValueError, match=f"`{next(iter(change))}`|`width`"):
        dataclasses.replace(SMOKE, **change)


def test_bfloat16_on_a_processor_without_it_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("platform.system", lambda: "Linux")
    (tmp_path / "cpuinfo").write_text("flags : fpu sse avx2\n")
    with pytest.raises(ValueError, match="needs a processor with bfloat16"):
        check_bfloat16(tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text("flags : fpu avx512_bf16\n")
    check_bfloat16(tmp_path / "cpuinfo")


# The text


def test_characters_unseen_in_training_are_an_error_and_nothing_is_written(tmp_path, cache):
    text = written(tmp_path, "abcdefgh" * 500 + "abcξdefψ" * 50)
    out = tmp_path / "run"
    spec = RunSpec(testbed="char_lm", settings={"text": text})
    with pytest.raises(
        CorpusError, match=r"2 character\(s\).*'ξ' \(U\+03BE\), 'ψ' \(U\+03C8\).*vocabulary=text"
    ) as error:
        train.run(spec, out)
    assert "rare" not in str(error.value)
    assert not out.exists()
    assert not cache.exists()
    assert problem(text=text, vocabulary="text").text.vocabulary == 10


def test_rare_and_unseen_characters_share_a_symbol_that_training_shows(tmp_path):
    text = written(tmp_path, "abcdefgh" * 400 + "xyz" + "abcdefgh" * 100 + "abcd" * 99 + "ξbcd")
    with pytest.raises(CorpusError, match="--set rare=20"):
        split(dataclasses.replace(SMOKE, text=text))
    s = split(dataclasses.replace(SMOKE, text=text, rare=5))
    assert s.vocabulary == 9
    spelled = s.symbols[np.concatenate([s.training, s.held_out])]
    assert (spelled == 8).sum() == 4
    assert s.symbols.max() == 8
    assert sorted(set(spelled[:8])) == list(range(8))


def test_a_held_out_part_in_another_alphabet_is_an_error_even_where_rare_characters_share_a_symbol(tmp_path):
    text = written(tmp_path, "abcdefgh" * 400 + "x" + "abcdefgh" * 100 + "αβγδεζηθ" * 56)
    with pytest.raises(CorpusError, match=r"100\.0% of its held-out part"):
        problem(text=text, rare=5)


@pytest.mark.parametrize(("length", "part"), [(60, "training"), (600, "held-out")])
def test_a_text_shorter_than_one_window_is_an_error(tmp_path, cache, length, part):
    text = written(tmp_path, ("abc" * length)[:length])
    out = tmp_path / "run"
    with pytest.raises(CorpusError, match=f"shorter than one window: its {part} part"):
        train.run(RunSpec(testbed="char_lm", settings={"text": text}), out)
    assert not out.exists()
    assert not cache.exists()


@pytest.mark.parametrize("content", [b"", b"\x00\x01\x02" * 9_999], ids=["empty", "binary"])
def test_an_empty_or_binary_file_is_an_error_and_nothing_is_written(tmp_path, cache, content):
    (tmp_path / "odd.bin").write_bytes(content)
    out = tmp_path / "run"
    with pytest.raises(CorpusError, match=r"odd\.bin is"):
        train.run(RunSpec(testbed="char_lm", settings={"text": str(tmp_path / "odd.bin")}), out)
    assert not out.exists()
    assert not cache.exists()


def test_the_windows_are_read_from_a_mapped_file(cache):
    # A length of its own: a text that this process knows already is not read again.
    text = problem(characters=12_345).text
    assert isinstance(text.training, np.memmap)
    assert isinstance(text.held_out, np.memmap)
    assert len(list(cache.rglob("ids.npy"))) == 1


def test_a_text_that_was_changed_is_not_taken_for_the_pinned_one(tmp_path):
    text = written(tmp_path, "abcdefgh" * 2_000)
    pinned = testbeds.pinned(TESTBED, {"text": text})
    problem(**pinned)
    written(tmp_path, "abcdefgh" * 1_999 + "abcdefhg")
    with pytest.raises(CorpusError, match="not the one of this study"):
        problem(**pinned)


TEXT = "the quick brown fox jumps over the lazy dog\n" * 400


def planned(**arguments):
    return plan_of(StudyOptions("char-lm", optimizers="kbeta", seeds=[0], **arguments))


@pytest.mark.parametrize(
    "named",
    [
        {"settings": {"text": "text.txt"}},
        {"settings": {"text": "text.txt", "text_sha256": hashlib.sha256(TEXT.encode()).hexdigest()}},
        {"settings": ["text=text.txt"]},
    ],
    ids=["text", "text and hash", "words"],
)
def test_a_study_names_its_text_by_its_content_however_it_is_asked_for(tmp_path, monkeypatch, named):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, TEXT)
    (spec,) = planned(**named).specs()
    assert spec.settings == {"text": "text.txt", "text_sha256": hashlib.sha256(TEXT.encode()).hexdigest()}


def test_a_study_of_two_texts_names_each_by_its_content(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    contents = {"a.txt": TEXT, "b.txt": TEXT[::-1]}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    specs = planned(grid={"text": list(contents)}).specs()
    assert [spec.optimizer for spec in specs] == ["kbeta[text=a.txt]", "kbeta[text=b.txt]"]
    for spec in specs:
        assert spec.settings["text_sha256"] == hashlib.sha256(contents[spec.settings["text"]].encode()).hexdigest()


def test_a_study_of_the_generated_text_has_nothing_to_name_by_its_content():
    (spec,) = planned(settings={"text": "generated", "characters": 50_000}).specs()
    assert spec.settings == {"text": "generated", "characters": 50_000}


# Runs


def test_a_smoke_run_learns_more_than_the_frequencies_of_the_characters():
    result = train.run(RunSpec(testbed="char-lm", settings={"steps": 150}))
    p = problem()
    share = np.bincount(p.eval_batch[:, 1:].ravel(), minlength=p.text.vocabulary) / p.eval_batch[:, 1:].size
    entropy = -sum(q * math.log2(q) for q in share if q)
    assert result.status == "ok"
    assert 1 < result.metrics["bpc"] < entropy - 0.3
    assert result.endpoint == result.metrics["bpc"]


@pytest.mark.slow  # that their losses and gradients agree is tested above
def test_the_engines_train_alike():
    curves = {}
    for engine in engines.NAMES:
        settings = {"steps": 20, "width": 16, "layers": 1, "lengths": "fixed", "longest": 32}
        settings |= {"eval_length": 32, "eval_windows": 4}
        result = train.run(RunSpec(testbed="char_lm", engine=engine, settings=settings))
        curves[engine] = [*result.curve["loss"], result.metrics["bpc"]]
    np.testing.assert_allclose(curves["jax"], curves["torch"], rtol=1e-4)
    np.testing.assert_allclose(curves["mlx"], curves["torch"], rtol=1e-4)


def test_the_defaults_of_a_study_are_the_papers_arms_and_the_controls():
    assert TESTBED.arms[:3] == ("kbeta", "adam95", "adam999")
    assert set(TESTBED.arms[3:]) == {"kbeta-static", "kbeta-exact", "adam-mid", "adam95-warm", "adam999-warm"}
    assert testbeds.get("char-lm") == TESTBED
    assert Settings().steps == 50_001
