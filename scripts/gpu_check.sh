#!/usr/bin/env bash
# The check of a machine with a GPU, in parts of at most nine minutes, each one command; in order of worth:
#
#     scripts/gpu_check.sh tests OUT     layers under autocast, then all GPU tests
#     scripts/gpu_check.sh steps OUT     step time and peak memory of ViTs, CLIPs and language models beside others'
#     scripts/gpu_check.sh fits OUT      short trainings by `diffvision fit`: compile, flash, FSDP2, resume
#
# Each writes OUT/gpu_PART.json, with the machine and versions in it, and OUT/gpu_PART.log. `steps` resumes an
# earlier call on the same OUT. `python scripts/benchmarks/gpu_page.py OUT` copies them to docs/benchmarks and
# fills the page there. `DEVICE=cpu QUICK=1` tries a part without a GPU. `WHEELS=folder` puts the wheels of a folder on
# the path first (nothing is downloaded). PYTHON chooses the interpreter, DIFFVISION_COMMIT names the code where a copy
# of it has no git folder.
set -u

usage() { sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 2; }
[ $# -eq 2 ] || usage
part=$1
case $part in tests | steps | fits) ;; *) usage ;; esac
device=${DEVICE:-cuda}
python=${PYTHON:-python3}
if [ "$device" != cpu ] && ! nvidia-smi -L >/dev/null 2>&1; then
    echo "gpu_check: no GPU here (nvidia-smi finds none); DEVICE=cpu QUICK=1 tries the script without one" >&2
    exit 1
fi
mkdir -p "$2" || exit 1
out=$(cd "$2" && pwd)
cd "$(dirname "$0")/.." || exit 1
work=$out/$part
mkdir -p "$work"
: >"$work/parts.tsv"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
: >"$out/gpu_$part.log"

LIMIT=520 # seconds; a benchmark starts nothing new in its last 20
# run NAME SECONDS SIGNAL COMMAND...: the signal is what the command answers by writing what it has
run() {
    local name=$1 seconds=$2 signal=$3 start=$SECONDS code
    shift 3
    echo "== $name, at most $seconds s" | tee -a "$out/gpu_$part.log"
    timeout --signal="$signal" --kill-after=15 "$seconds" "$@" >"$work/$name.log" 2>&1
    code=$?
    cat "$work/$name.log" >>"$out/gpu_$part.log"
    printf '%s\t%s\t%s\n' "$name" "$code" "$((SECONDS - start))" >>"$work/parts.tsv"
    "$python" scripts/benchmarks/gpu_report.py "$work" "$out/gpu_$part.json"
    echo "   exit status $code after $((SECONDS - start)) s"
}

if [ -n "${WHEELS:-}" ]; then
    run wheels 60 TERM "$python" -m pip install -q --no-deps --no-index --no-compile --target "$work/site" "$WHEELS"/*.whl
    export PYTHONPATH=$PWD:$work/site:$PYTHONPATH
fi
room=$((LIMIT - SECONDS)) quick=()
minutes=$(awk -v seconds="$room" 'BEGIN { print (seconds - 20) / 60 }')
[ -z "${QUICK:-}" ] || quick=(--quick)
bench=(--device "$device" --output "$work" --minutes "$minutes")
case $part in
    tests)
        tests=(-n "${WORKERS:-4}" -m gpu tests/nn tests)
        [ "$device" != cpu ] || tests=(-m "not gpu and not slow" tests/nn/test_autocast.py) # a CPU stands in there
        run tests "$LIMIT" INT "$python" -m pytest -o addopts= --import-mode=importlib -q --junitxml "$work/tests.xml" \
            "${tests[@]}"
        ;;
    steps) run steps "$LIMIT" TERM "$python" scripts/benchmarks/gpu_steps.py "${bench[@]}" "${quick[@]}" ;;
    fits)
        [ -z "${QUICK:-}" ] || bench=(--device "$device" --output "$work" --minutes 0.1 --steps 6)
        rm -rf "$work/fits" "$work/fits-data"
        run fits "$LIMIT" TERM "$python" scripts/benchmarks/gpu_fits.py "${bench[@]}"
        ;;
esac
echo "gpu_check: $out/gpu_$part.json"
[ "$(awk -F '\t' '$2 != 0' "$work/parts.tsv" | wc -l)" -eq 0 ]
