"""Hugging Face Trainer: a small causal language model, with Kourkoutas-β given in either of the two ways.

python examples/hf_trainer.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from kourkoutas.buckets import by_module
from kourkoutas.torch import KourkoutasBeta


def model_and_data(sequences: int = 64) -> tuple[LlamaForCausalLM, list[dict[str, torch.Tensor]]]:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, max_position_embeddings=16, **shape))
    starts = torch.randint(16, (sequences, 1))
    tokens = (starts + torch.arange(16)) % 16  # counting, from anywhere
    return model, [{"input_ids": row, "labels": row} for row in tokens]


def trainer(folder: str, steps: int = 100, way: str = "optimizers", **arguments) -> Trainer:
    model, data = model_and_data()
    options = {"lr": 1e-2, "warmup_steps": 10, "decay": 0, "max_ratio": 3}
    if way == "optimizers":
        optimizer = KourkoutasBeta(model.named_parameters(), buckets="module", **options)  # names tell the modules
        given = {"optimizers": (optimizer, None)}
    else:
        # The Trainer makes it: groups with and without weight decay, of parameters that have lost their names.
        given = {"optimizer_cls_and_kwargs": (KourkoutasBeta, {"buckets": by_module(model), **options})}
    settings = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=options["lr"],
        weight_decay=0.01,
        max_grad_norm=0.0,  # a clip of the global norm would hide spikes from β2; max_ratio bounds the step
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=10,
        **arguments,
    )
    return Trainer(model=model, args=settings, train_dataset=data, **given)


def main(steps: int = 100) -> float:
    for way in ("optimizers", "optimizer_cls_and_kwargs"):
        with tempfile.TemporaryDirectory() as folder:
            it = trainer(folder, steps, way, save_strategy="no")
            it.train()
            loss = [row["loss"] for row in it.state.log_history if "loss" in row][-1]
            print(f"{way}: {len(it.optimizer.param_groups)} groups, loss {loss:.4f}")
    return loss


if __name__ == "__main__":
    main()
