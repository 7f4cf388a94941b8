"""peft: train the LoRA weights of a language model; the frozen ones have no gradient and no state.

python examples/peft_lora.py
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from kourkoutas.torch import KourkoutasBeta


def main(steps: int = 60) -> float:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=16, max_position_embeddings=16, **shape))
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "lm_head"], task_type="CAUSAL_LM"))
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    # One β2 for each adapted layer: the name up to `.lora_A` or `.lora_B`.
    optimizer = KourkoutasBeta(trained, lr=1e-2, buckets=lambda name, _: name.partition(".lora_")[0])

    tokens = (torch.randint(16, (32, 1)) + torch.arange(16)) % 16
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{len(trained)} of {len(list(model.parameters()))} tensors trained, loss {loss.item():.4f}")
    return loss.item()


if __name__ == "__main__":
    main()
