#!/usr/bin/env bash
# Checks a machine with a GPU. All parts together take 12 minutes; in order of worth:
#
#     scripts/gpu_check.sh tests OUT   the GPU tests, a process for each 8 GiB (4 minutes)
#     scripts/gpu_check.sh fits OUT    `diffvision fit`: a compiled CLIP on JPEGs, with validation and resume; FSDP2 (4)
#     scripts/gpu_check.sh steps OUT   training steps of models, eager and compiled (3)
#     scripts/gpu_check.sh layer OUT   ways to compute one attention layer (1)
#
# A part writes its results to OUT/PART.json (OUT/tests.jsonl) as they come, and what it prints to OUT/PART.log; `tests`
# and `steps` continue an earlier call on the same OUT. WHEELS=folder first installs the wheels that
# scripts/benchmarks/gpu_wheels.py left there. DEVICE=cpu QUICK=1 tries a part without a GPU. PYTHON chooses the
# interpreter, DIFFVISION_COMMIT names the code where a copy of it has no git folder.
set -u

usage() { sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2; }
[ $# -eq 2 ] || usage
part=$1
case $part in tests) limit=240 ;; fits) limit=230 ;; steps) limit=200 ;; layer) limit=50 ;; *) usage ;; esac
device=${DEVICE:-cuda}
[ "$device" != cpu ] || limit=1500
python=${PYTHON:-python3}
if [ "$device" != cpu ] && ! nvidia-smi -L >/dev/null 2>&1; then
    echo "gpu_check: no GPU here (nvidia-smi finds none); DEVICE=cpu QUICK=1 tries the script without one" >&2
    exit 1
fi
mkdir -p "$2" || exit 1
out=$(cd "$2" && pwd)
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=$PWD:$PWD/scripts/benchmarks${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
: >"$out/$part.log"

# run SIGNAL COMMAND...: with the time that is left; the signal is what the command answers by ending in order
run() {
    local signal=$1
    shift
    timeout --signal="$signal" --kill-after=10 $((limit - SECONDS)) "$@" > >(tee -a "$out/$part.log") 2>&1
}

if [ -n "${WHEELS:-}" ]; then
    [ -d "$out/site" ] || run TERM "$python" -m pip install -q --no-deps --no-index --no-compile --target "$out/site" "$WHEELS"/*.whl
    # Its second folder is that of FlashAttention-4's compiler, whose .pth file a --target does not run.
    export PYTHONPATH=$out/site:$out/site/nvidia_cutlass_dsl/dsl_packages:$PYTHONPATH
fi
bench=(--device "$device" --output "$out")
[ -z "${QUICK:-}" ] || bench+=(--quick)
seconds_left() { echo $((limit - SECONDS - 10)); }
case $part in
    tests)
        # By worth: whole layers, then backends, then all others; pytest takes a file once.
        tests=(tests/nn/test_autocast.py tests/ops/test_{flash,sdpa,documents}.py tests/models/language/test_generation.py
            $(grep -rl --include='test_*.py' 'mark\.gpu' tests | sort))
        selected=gpu
        [ "$device" != cpu ] || tests=(tests/nn/test_autocast.py) selected="not gpu and not slow" # a CPU stands in there
        # Warnings of other packages' compilers, which no CPU shows, are no failures.
        pytest=("$python" -m pytest -o addopts= --import-mode=importlib -v --tb=short -p no:benchmark -p no:cacheprovider
            -p gpu_results --results "$out/tests.jsonl" -W ignore::UserWarning -m "$selected" "${tests[@]}")
        if [ "$device" != cpu ]; then # a test takes less than 4 GiB, and a process one more for CUDA
            memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits --id=0)
            pytest+=(-n $((memory / 8192 < 8 ? memory / 8192 : 8)) --max-worker-restart 0)
        fi
        # Where a test ends the process or loses the device, another process goes on behind it.
        results=1 # the machine's line
        while run INT "${pytest[@]}"; code=$?; [ $code -ne 0 ] && [ $code -ne 1 ] && [ $code -ne 124 ]; do
            before=$results results=$(wc -l <"$out/tests.jsonl")
            [ "$results" -gt "$before" ] && [ "$(seconds_left)" -gt 20 ] || break
        done
        ;;
    *)
        run TERM "$python" "scripts/benchmarks/gpu_$part.py" "${bench[@]}" --minutes "$(awk "BEGIN { print $(seconds_left) / 60 }")"
        code=$?
        ;;
esac
echo "gpu_check: $part ended with exit status $code after $SECONDS s; results are in $out"
exit $code
