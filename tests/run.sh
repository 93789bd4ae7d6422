#!/bin/sh
# Every test, in two halves side by side: those with a real engine, which keep one core busy
# (vLLM binds its one thread to it, so two engines at a time would share it), and all others.
# What fails is run once more by itself: some tests run real servers and engines against
# deadlines, and machines are shared. A second failure is a failure.
#
# Usage: tests/run.sh PYTHON [flags of pytest]; a flag that is a path of tests runs that alone.
set -u
python=$1
shift

half() {
    name=$1
    shift
    "$python" -m pytest -o "cache_dir=.pytest_cache/$name" "$@" && return
    code=$?
    [ "$code" -eq 1 ] || return "$code"
    echo "once more, what failed ($name):"
    "$python" -m pytest -o "cache_dir=.pytest_cache/$name" \
        --last-failed --last-failed-no-failures none "$@"
}

for flag in "$@"; do
    if [ -e "${flag%%::*}" ]; then
        half some "$@"
        code=$?
        [ "$code" -eq 5 ] && echo "no test was asked for: $*" >&2
        exit "$code"
    fi
done

log=$(mktemp)
half others --ignore=tests/engine "$@" >"$log" 2>&1 &
others=$!
trap 'kill "$others" 2>/dev/null; rm -f "$log"' EXIT
trap 'exit 130' INT TERM
echo "tests with a real engine; all others run beside them and are shown after:"
half engine tests/engine "$@"
engine_code=$?
wait "$others"
others_code=$?
echo "all other tests:"
cat "$log"
echo "real engine: exit $engine_code; all others: exit $others_code (5: no test)"
# One half may have none of the tests that were asked for; both together may not.
case "$engine_code $others_code" in
    "0 0") exit 0 ;;
    "5 0" | "0 5") [ $# -gt 0 ] ;;
    *) exit 1 ;;
esac
