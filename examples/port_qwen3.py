"""Port a Qwen3 model to Ferryman's ops, watch which implementation serves each call, and take it back.

Random weights at small widths, so that nothing is downloaded; with `AutoModelForCausalLM.from_pretrained(...)` in its
place the rest stays as it is.

    python examples/port_qwen3.py
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import ferryman
from ferryman.integrations.transformers import port, unport


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = Qwen3Config(
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=1536,
        num_hidden_layers=4,
        vocab_size=4096,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device).eval()
    prompt = torch.randint(1, config.vocab_size, (1, 32), device=device)

    before = model.generate(prompt, max_new_tokens=16, do_sample=False)

    report = port(model)
    print(f"ported {len(report.ported)} modules; one pass calls {report.calls(1)}")
    for left in report.unsupported:
        print(f"  stays as it is: {left.path} ({left.module}): {left.reason}")

    with ferryman.trace() as traced:
        after = model.generate(prompt, max_new_tokens=16, do_sample=False)
    for (op, implementation), calls in sorted(traced.calls.items()):
        print(f"  {op:10} {implementation:10} {calls} calls")
    print(f"same tokens: {torch.equal(before, after)}")

    unport(model)
    print(f"after unport, attention is {model.config._attn_implementation!r} again")


if __name__ == "__main__":
    main()
