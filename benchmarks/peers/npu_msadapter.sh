#!/bin/sh
# The torch reference on an Ascend NPU through MSAdapter, whose `import torch` is MindSpore: sh npu_msadapter.sh MSADAPTER WEIGHTS
# UNTESTED: neither MSAdapter nor an NPU is at hand here.
set -eu
usage="sh npu_msadapter.sh MSADAPTER WEIGHTS"
adapter=${1:?"$usage"} weights=${2:?"$usage"} here=$(dirname "$0")
export PYTHONPATH="$adapter${PYTHONPATH:+:$PYTHONPATH}"
telechat-moe align capture --torch "$here/hf_deepseek.py" --out dump_msadapter --steps 0-1 -- --device npu --weights "$weights"
