#!/bin/bash
# All bars of the instruments on a CUDA GPU, as one table; exit code 1 where one is not met.
#   tests/gpu/run.sh [TREES [OUT [SCALE]]]
# TREES: what tests/gpu/prepare.py wrote (made here, with a download, where it is missing). SCALE below 1: fewer replays.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
trees=${1:-$PWD/gpu-trees}
out=${2:-$(mktemp -d)}
scale=${3:-1}
mkdir -p "$out"
if [ ! -d "$trees/0.5.18/patched" ]; then
    python3 "$here/prepare.py" "$trees"
fi
cd "$here"
export PYTHONUNBUFFERED=1 SGLANG_FP8_PAGED_MQA_LOGITS_TORCH=1 SGLANG_TOPK_TRANSFORM_512_TORCH=1
status=0
for version in ${VERSIONS:-0.5.14 0.5.18 0.5.23}; do
    python3 bars.py "$version" "$trees" "$out/bars-$version.json" "$scale" 2>&1 | tee "$out/bars-$version.log" || status=1
done
python3 bars.py 0.5.19 "$trees" "$out/bars-0.5.19.json" "$scale" audit 2>&1 | tee "$out/bars-0.5.19.log" || status=1
python3 costs.py "$trees" "$out/costs.json" 2>&1 | tee "$out/costs.log" || status=1
python3 table.py "$out" | tee "$out/table.txt" || status=1
exit $status
