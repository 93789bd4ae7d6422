#!/bin/sh
# Everything that needs a CUDA device, in under eight minutes; `make test-gpu` calls it.
#
# Runs from a checkout, nothing installed: PYTHON needs torch with CUDA, triton, NumPy,
# pytest and hypothesis. The bench's JSON goes to stdout and, where OUT names a folder,
# into it.
set -eu
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH=".src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
results=${OUT:-$(mktemp -d)}
status=0
timeout 240 "$PYTHON" -m pytest tests/gpu -q -p no:cacheprovider -W default --durations=8 \
  >"$results/test-gpu.log" 2>&1 || status=$?
tail -n 60 "$results/test-gpu.log"
grep -Eq '^[0-9]+ passed' "$results/test-gpu.log" || status=1 # not all were skipped
timeout 220 "$PYTHON" -m kvtier.tools.bench_device --json \
  >"$results/bench-device.json" 2>"$results/bench-device.log" || status=1
tail -n 40 "$results/bench-device.log"
cat "$results/bench-device.json"
exit $status
