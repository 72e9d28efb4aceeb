"""What one would do without a converter: load the dense model, build the MoE class, copy weights, save.

Run as `python with_transformers.py SOURCE OUT EXPERTS copy|noise`; prints the seconds of each step as JSON.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

_STD, _FRACTION = 0.02, 0.5


def main(source: str, out: str, experts: int, method: str) -> None:
    seconds: dict[str, float] = {}
    last = time.perf_counter()

    def done(step: str) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds[step], last = round(now - last, 2), now

    dense = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    done("load")
    torch.set_default_dtype(torch.bfloat16)
    moe = Qwen3MoeForCausalLM(_moe_config(dense.config.to_dict(), experts))
    done("build")
    _copy(dense, moe, method)
    done("copy")
    moe.save_pretrained(out)
    done("save")
    print(json.dumps(seconds))


def _moe_config(raw: dict, experts: int) -> Qwen3MoeConfig:  # type: ignore[type-arg]
    kept = {key: value for key, value in raw.items() if key not in ("model_type", "architectures", "layer_types")}
    return Qwen3MoeConfig(
        **kept | {
            "num_experts": experts, "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1,
            "moe_intermediate_size": raw["intermediate_size"], "mlp_only_layers": [],
        }
    )  # fmt: skip


@torch.no_grad()
def _copy(dense: torch.nn.Module, moe: torch.nn.Module, method: str) -> None:
    weights, state = moe.state_dict(), dense.state_dict()
    for name, tensor in state.items():
        if ".mlp." not in name:
            weights[name].copy_(tensor)
    for layer in range(dense.config.num_hidden_layers):  # type: ignore[union-attr, arg-type]
        mlp = f"model.layers.{layer}.mlp."
        weights[mlp + "gate.weight"].zero_()
        up = torch.cat([state[mlp + "gate_proj.weight"], state[mlp + "up_proj.weight"]])
        for expert in range(len(weights[mlp + "experts.down_proj"])):
            for kind, matrix in (("gate_up_proj", up), ("down_proj", state[mlp + "down_proj.weight"])):
                weights[mlp + "experts." + kind][expert].copy_(_noisy(matrix) if method == "noise" else matrix)


def _noisy(matrix: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(matrix.shape, dtype=torch.float32) * _STD
    return matrix.float() + noise * (torch.rand(matrix.shape, dtype=torch.float32) < _FRACTION)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
