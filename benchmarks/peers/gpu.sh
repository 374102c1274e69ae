#!/bin/sh
# The reference on an NVIDIA GPU, and what differs from the dump of a CPU: sh gpu.sh WEIGHTS GOLDEN
# DEVICE=cpu runs the same without a GPU; DTYPE: float32 (default), bfloat16, float16.
set -eu
usage="sh gpu.sh WEIGHTS GOLDEN"
weights=${1:?"$usage"} golden=${2:?"$usage"} device=${DEVICE:-cuda} dtype=${DTYPE:-float32}
here=$(dirname "$0") out=dump_$device
# TF32 keeps 11 bits of float32 factors; and sums in one order make a second run comparable byte by byte.
export NVIDIA_TF32_OVERRIDE=0 CUBLAS_WORKSPACE_CONFIG=:4096:8
telechat-moe align capture --torch "$here/hf_deepseek.py" --out "$out" --steps 0-1 -- \
    --device "$device" --dtype "$dtype" --weights "$weights"
telechat-moe align bisect "$golden" "$out" --html "$out.html" --json "$out.json"
