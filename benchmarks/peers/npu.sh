#!/bin/sh
# Two steps of a recipe on an Ascend NPU in graph mode, recorded by msprobe: MINDFORMERS=CHECKOUT sh npu.sh RECIPE OUT
# NOT RUN: no NPU is at hand. MindFormers is its git checkout; msprobe: pip install mindstudio-probe==26.2.0
set -eu
usage="MINDFORMERS=CHECKOUT sh npu.sh RECIPE.yaml OUT"
recipe=${1:?"$usage"} out=${2:?"$usage"} trainer=${MINDFORMERS:?"$usage"}/run_mindformer.py
for file in "$recipe" "$trainer"; do
    [ -f "$file" ] || { echo "$file: no such file; $usage" >&2; exit 2; }
done
here=$(dirname "$0")
sed "s#DUMP_PATH#$out#" "$here/msprobe_npu.json" > msprobe_config.json
PLUGIN=$(telechat-moe plugin-path)
export PLUGIN
python - "$trainer" "$recipe" <<'PYTHON'
import os
import runpy
import sys

from msprobe.mindspore import PrecisionDebugger

# In graph mode msprobe writes MindSpore's own dump settings, which are read when the framework starts.
debugger = PrecisionDebugger(config_path="msprobe_config.json")
debugger.start()
script, recipe = sys.argv[1:]
sys.argv = [script, "--config", recipe, "--register_path", os.environ["PLUGIN"]]
runpy.run_path(script, run_name="__main__")
debugger.stop()
PYTHON
telechat-moe align inspect "$out"
