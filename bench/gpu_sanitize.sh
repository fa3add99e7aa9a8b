#!/usr/bin/env bash
# NVIDIA's compute-sanitizer over every kernel's test, at sizes for a memory checker: memcheck (accesses out of bounds,
# misaligned; leaks) and racecheck (shared memory).
#
#   bench/gpu_sanitize.sh TEST_CUDA OUT_FOLDER [TOOL...]        (memcheck racecheck)
#
# JOBS (4) at a time, each within SECONDS_EACH (60); TESTS (all that TEST_CUDA --list names). One line a test, in
# OUT_FOLDER one log for each that was not clean. Wanted: 0 errors each; races that are reported within cuBLASLt's own
# kernels are told but not counted. Exit code 1: some have errors or did not end.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
program=$(realpath "$1") out=$2
shift 2
[ $# -gt 0 ] || set -- memcheck racecheck
mkdir -p "$out"
PATH=$PATH:/usr/local/cuda/bin
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not here: skipped"; exit 77; }
export program out SECONDS_EACH=${SECONDS_EACH:-60}

one() { # TOOL TEST
    local log=$out/$1-$2.log begin code=0 word theirs ours reported='= \(Error\|Warning\|Invalid\)'
    begin=$(date +%s%N)
    timeout "$SECONDS_EACH" compute-sanitizer --tool "$1" --error-exitcode 9 "$program" --small "$2" >"$log" 2>&1 || code=$?
    case $code in
    0) word=$(grep -o 'ERROR SUMMARY.*\|RACECHECK SUMMARY.*' "$log" | tail -n 1) ;;
    124) word="FAILED: no end in $SECONDS_EACH s" ;;
    9) theirs=$(grep -c "$reported" "$log" || true)
        ours=$(grep -v nvjet_ "$log" | grep -c "$reported" || true)
        if [ "$1" = racecheck ] && [ "$theirs" -gt 0 ] && [ "$ours" = 0 ] && grep -q ' 0 failed' "$log"; then
            word="0 errors of ours; $theirs in cuBLASLt's kernels (nvjet_*), told but not counted" code=0
        else
            word="FAILED: $(grep -v nvjet_ "$log" | grep -m 1 "$reported" || tail -n 1 "$log")"
        fi ;;
    *) word="FAILED: exit code $code: $(tail -n 1 "$log")" ;;
    esac
    printf '%-10s %-20s %6.1f s  %s\n' "$1" "$2" "$((($(date +%s%N) - begin) / 100000000))e-1" "$word"
    [ $code != 0 ] || rm -f "$log"
}
export -f one
for tool; do for test in ${TESTS:-$("$program" --list)}; do echo "$tool $test"; done; done |
    xargs -P "${JOBS:-4}" -L 1 bash -c 'one "$@"' one | tee "$out/sanitize.txt"
failed=$(grep -c 'FAILED' "$out/sanitize.txt" || true)
echo "$(wc -l <"$out/sanitize.txt") runs, $failed failed"
[ "$failed" = 0 ]
