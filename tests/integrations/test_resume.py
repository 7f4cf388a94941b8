"""Stopped and resumed in somebody else's training loop: the same bits as without a stop."""

import pytest

from tests.integrations.test_examples import load

torch = pytest.importorskip("torch")


def state_of(model, optimizer):
    """Every tensor of model and optimizer, by name."""
    held = model.state_dict().items()  # an FNO also keeps what it was made with there
    tensors = {f"model/{name}": x.detach().clone() for name, x in held if torch.is_tensor(x)}
    for i, one in optimizer.state_dict()["state"].items():
        tensors |= {f"{i}/{name}": torch.as_tensor(x).clone() for name, x in one.items()}
    return tensors


def same(a, b):
    assert a.keys() == b.keys()
    assert {"0/exp_avg", "0/norm_ema"} <= a.keys()
    for name, x in a.items():
        assert torch.equal(x, b[name]), name


@pytest.mark.parametrize("way", ["optimizers", "optimizer_cls_and_kwargs"])
def test_the_trainer_resumes_bit_for_bit(way, tmp_path):
    pytest.importorskip("transformers")
    example = load("hf_trainer")
    whole = example.trainer(str(tmp_path / "whole"), 12, way, save_strategy="no")
    whole.train()
    first = example.trainer(str(tmp_path / "parts"), 12, way, save_strategy="steps", save_steps=5)
    first.train()
    again = example.trainer(str(tmp_path / "parts"), 12, way, save_strategy="no")
    again.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-5"))
    expected = state_of(whole.model, whole.optimizer)
    assert int(expected["0/step"]) == 12
    same(state_of(again.model, again.optimizer), expected)


def test_the_trainer_gives_every_module_its_own_bucket_though_names_are_lost(tmp_path):
    pytest.importorskip("transformers")
    from kourkoutas.torch import KourkoutasBeta

    it = load("hf_trainer").trainer(str(tmp_path), 1, "optimizer_cls_and_kwargs", save_strategy="no")
    it.create_optimizer()
    modules = {name.rpartition(".")[0] for name, _ in it.model.named_parameters()}
    assert set(it.optimizer.bucket_names) == modules
    bare = [{"params": list(it.model.parameters())}]
    with pytest.raises(ValueError, match="names"):
        KourkoutasBeta(bare, buckets="module")


def test_accelerate_resumes_bit_for_bit(tmp_path):
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    example = load("accelerate_loop")

    def start():
        accelerator = Accelerator(cpu=True)
        return accelerator, example.prepared(accelerator)

    accelerator, parts = start()
    for _ in range(4):
        example.epoch(accelerator, *parts)
    expected = state_of(*parts[:2])

    accelerator, parts = start()
    for _ in range(2):
        example.epoch(accelerator, *parts)
    accelerator.save_state(str(tmp_path))

    accelerator, parts = start()
    accelerator.load_state(str(tmp_path))
    for _ in range(2):
        example.epoch(accelerator, *parts)
    assert int(expected["0/step"]) == 32
    same(state_of(*parts[:2]), expected)


def test_lightning_resumes_bit_for_bit(tmp_path):
    lightning = pytest.importorskip("lightning")
    example = load("lightning_module")

    def fit(epochs, checkpoint=None, save=None):
        lightning.seed_everything(0, verbose=False)
        module, trainer = example.Regression(), example.trainer(epochs)
        trainer.fit(module, example.data(), ckpt_path=checkpoint)
        if save is not None:
            trainer.save_checkpoint(save)
        return state_of(module, trainer.optimizers[0])

    expected = fit(4)
    fit(2, save=tmp_path / "half.ckpt")
    assert int(expected["0/step"]) == 32
    same(fit(4, checkpoint=tmp_path / "half.ckpt"), expected)
