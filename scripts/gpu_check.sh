#!/usr/bin/env bash
# The check of a machine with a GPU in under nine minutes: the GPU tests, `diffvision tune`, short trainings, benchmarks.
#
#     scripts/gpu_check.sh OUT              writes OUT/gpu_check.json, the benchmarks' pictures, one log
#     WHEELS=folder scripts/gpu_check.sh OUT       puts the wheels of a folder on the path first (nothing is downloaded)
#     DEVICE=cpu QUICK=1 scripts/gpu_check.sh OUT  tries the script itself without a GPU: few tests, shapes and models
#
# Each part has its time and its own failure, and stops no other; what matters most comes first, and gpu_check.json is
# written anew after each part, so that a run that is cut short leaves what it had. PYTHON chooses the interpreter,
# DIFFVISION_COMMIT names the code where a copy of it has no git folder.
set -u

if [ $# -ne 1 ]; then
    sed -n '2,10s/^# \{0,1\}//p' "$0"
    exit 2
fi
device=${DEVICE:-cuda}
python=${PYTHON:-python3}
if [ "$device" != cpu ] && ! nvidia-smi -L >/dev/null 2>&1; then
    echo "gpu_check: no GPU here (nvidia-smi finds none); DEVICE=cpu QUICK=1 tries the script without one" >&2
    exit 1
fi
mkdir -p "$1" || exit 1
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/.." || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 DIFFVISION_TUNING=$work/tuning.json
: >"$out/gpu_check.log"

TOTAL=520 FITS=110 OPERATION=60 MODELS=80 # seconds: of all, and kept for the parts after tuning
minutes() { awk -v seconds="$1" 'BEGIN { print (seconds - 20) / 60 }'; }

# part NAME SECONDS SIGNAL COMMAND...: the signal is what the command answers by writing what it has
part() {
    local name=$1 seconds=$2 signal=$3 start=$SECONDS code
    shift 3
    echo "== $name, at most $seconds s" | tee -a "$out/gpu_check.log"
    timeout --signal="$signal" --kill-after=15 "$seconds" "$@" >"$work/$name.log" 2>&1
    code=$?
    cat "$work/$name.log" >>"$out/gpu_check.log"
    printf '%s\t%s\t%s\n' "$name" "$code" "$((SECONDS - start))" >>"$work/parts.tsv"
    cp "$work"/*.png "$out" 2>/dev/null
    "$python" scripts/benchmarks/gpu_report.py "$work" "$out/gpu_check.json"
    echo "   exit status $code after $((SECONDS - start)) s"
}

if [ -n "${WHEELS:-}" ]; then
    part wheels 60 TERM "$python" -m pip install -q --no-deps --no-index --no-compile --target "$work/site" "$WHEELS"/*.whl
    export PYTHONPATH=$PWD:$work/site:$PYTHONPATH
fi
pytest=("$python" -m pytest -o addopts= --import-mode=importlib -q --junitxml "$work/tests.xml")
bench=(--device "$device" --output "$work")
if [ -n "${QUICK:-}" ]; then
    tests=(-m "not slow" tests/ops/test_rotary.py) # none of the GPU tests can run on a CPU
    [ "$device" = cpu ] || tests=(-m gpu tests)
    part tests 120 INT "${pytest[@]}" "${tests[@]}"
    part tune 90 TERM "$python" -m diffvision tune --model diff_vit_debug --batch 4 --device "$device" --minutes 1 --json
    part fits 90 TERM "$python" scripts/benchmarks/gpu_fits.py --device "$device" --output "$work" --steps 6 --minutes 0.1
    part attention-op 60 TERM "$python" scripts/benchmarks/bench_attention.py "${bench[@]}" --quick --rounds 3 --minutes 0.1
    part models 60 TERM "$python" scripts/benchmarks/bench_models.py "${bench[@]}" --models debug --quick --rounds 3
else
    # What a part leaves of its time goes to those after it; a benchmark starts nothing new in its last 20 seconds.
    part tests 140 INT "${pytest[@]}" -n "${WORKERS:-4}" -m gpu tests
    left=$((TOTAL - SECONDS - FITS - OPERATION - MODELS))
    part tune $left TERM "$python" -m diffvision tune --device "$device" --minutes "$(minutes $left)" --json
    left=$((TOTAL - SECONDS - OPERATION - MODELS))
    part fits $left TERM "$python" scripts/benchmarks/gpu_fits.py "${bench[@]:0:2}" --output "$work" --minutes "$(minutes $left)"
    left=$((TOTAL - SECONDS - MODELS))
    part attention-op $left TERM "$python" scripts/benchmarks/bench_attention.py "${bench[@]}" --rounds 7 --minutes "$(minutes $left)"
    left=$((TOTAL - SECONDS))
    part models $left TERM "$python" scripts/benchmarks/bench_models.py "${bench[@]}" --compile --rounds 7 --minutes "$(minutes $left)"
fi
echo "gpu_check: $out/gpu_check.json"
[ "$(awk -F '\t' '$2 != 0' "$work/parts.tsv" | wc -l)" -eq 0 ]
