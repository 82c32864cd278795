#!/usr/bin/env bash
# Run the tests as other CPUs would compute them, and print a line per round: what it imitates, the result, seconds.
#
#     scripts/fuzz/test_everywhere.sh                       # every round with the whole suite, after `make test` made .venv
#     scripts/fuzz/test_everywhere.sh tests/test_rollout.py # every round with these pytest arguments
#     ROUNDS="avx2 shuffled" scripts/fuzz/test_everywhere.sh
#
# Logs go to $LOGS (runs/everywhere). The exit status is 1 if a round failed.
#   native      this CPU, two workers
#   baseline    no vector instructions beyond SSE4.1
#   avx2        a laptop: AVX2, without AVX-512
#   avx512      AVX-512 without bf16 instructions
#   one-process a single process on two threads
#   shuffled    the tests in a random order
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
LOGS=${LOGS:-runs/everywhere}
ROUNDS=${ROUNDS:-native baseline avx2 avx512 one-process shuffled}
TWO_WORKERS="-n 2 --dist loadgroup --no-loadscope-reorder"
mkdir -p "$LOGS"

declare -A SETTINGS=(
    [native]=""
    [baseline]="ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41"
    [avx2]="ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2"
    [avx512]="ONEDNN_MAX_CPU_ISA=AVX512_CORE"
    [one-process]="OMP_NUM_THREADS=2"
    [shuffled]=""
)
declare -A OPTIONS=([one-process]="-n 0" [shuffled]="$TWO_WORKERS --shuffle ${SEED:-1}")

failed=0
printf '%-12s %8s  %s\n' round seconds result
for round in $ROUNDS; do
    if [[ ! -v SETTINGS[$round] ]]; then
        echo "unknown round '$round': expected one of ${!SETTINGS[*]}" >&2
        exit 2
    fi
    start=$SECONDS
    # shellcheck disable=SC2086  # settings and options are lists of words
    env ${SETTINGS[$round]} "$PYTHON" -m pytest ${OPTIONS[$round]:-$TWO_WORKERS} "$@" >"$LOGS/$round.log" 2>&1 || failed=1
    printf '%-12s %8d  %s\n' "$round" $((SECONDS - start)) "$(tail -n 1 "$LOGS/$round.log")"
done
exit $failed
