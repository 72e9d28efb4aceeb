#!/usr/bin/env bash
# Makes an environment with a CUDA build of torch and Transformer Engine, on a machine with CUDA's compiler but not
# necessarily with a GPU: install.sh DIRECTORY PYTHON. Downloads some 5 GB and compiles for about 20 minutes.
set -euo pipefail
venv=$1 python=$2

# megatron-core 0.16.1 declares Transformer Engine below 2.12.
TORCH=${TORCH:-2.11.0} TRANSFORMER_ENGINE=${TRANSFORMER_ENGINE:-2.11.0}
CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
if [ ! -x "$CUDA_HOME/bin/nvcc" ]; then
  echo "$CUDA_HOME/bin/nvcc is missing: install the CUDA toolkit of torch's CUDA version, or set CUDA_HOME" >&2
  exit 1
fi

"$python" -m venv "$venv"
python=$(cd "$venv/bin" && pwd)/python
pip() { "$python" -m pip --disable-pip-version-check -q "$@"; }

pip install "torch==$TORCH" numpy packaging pybind11 "setuptools>=68" wheel ninja
cuda=$("$python" -c "import torch; print((torch.version.cuda or 'none').split('.')[0])")
if [ "$cuda" = none ]; then
  echo "torch $TORCH is a CPU build here: set TORCH to a release of which there is a CUDA build" >&2
  exit 1
fi

# The toolkit has no headers of cuDNN and NCCL; the packages that torch depends on have.
packages=$("$python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
includes=$(printf '%s:' "$packages"/nvidia/*/include)
export CUDA_HOME CPATH="${includes%:}${CPATH:+:$CPATH}" NVTE_FRAMEWORK=pytorch
export NVTE_PYTORCH_FORCE_BUILD=TRUE # rather than look for a binary on the network
export MAX_JOBS=${MAX_JOBS:-2}       # a job takes up to 4 GB
pip install --no-build-isolation "transformer-engine[pytorch,core-cu$cuda]==$TRANSFORMER_ENGINE"

grep -v '^torch==' constraints.txt >"$venv/constraints.txt"
echo "torch==$TORCH" >>"$venv/constraints.txt"
pip install -c "$venv/constraints.txt" -e ".[dev]"
# torch loads the libraries that Transformer Engine links to
"$python" -c "import torch, transformer_engine.pytorch"
