"""What upcycling and training did to SmolLM2, seen through transformers alone: held-out loss and greedy text.

python examples/smollm2/compare.py --data runs/smollm2/text/valid runs/smollm2/dense runs/smollm2/copy …
"""

import json
from pathlib import Path

import click

from spes_mega.tools.demo.result import open_snapshot, transformers_loss

PROMPT = "The Python language is"


@click.command()
@click.argument("checkpoints", nargs=-1, type=click.Path(path_type=Path, exists=True))
@click.option("--data", required=True, type=click.Path(path_type=Path), help="prefix of an indexed dataset")
@click.option("--seq-len", default=128, show_default=True)
@click.option("--new-tokens", default=24, show_default=True)
def main(checkpoints: tuple[Path, ...], data: Path, seq_len: int, new_tokens: int) -> None:
    """Print one JSON object for each checkpoint."""
    from transformers import AutoTokenizer

    for checkpoint in checkpoints:
        model = open_snapshot(checkpoint)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        inputs = tokenizer(PROMPT, return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
        row = {
            "checkpoint": str(checkpoint),
            "loss": transformers_loss(model, data, seq_len),
            "greedy": tokenizer.decode(tokens[0]),
        }
        print(json.dumps(row), flush=True)
        del model


if __name__ == "__main__":
    main()
