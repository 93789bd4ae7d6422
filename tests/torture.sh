#!/bin/sh
# The long forms side by side, because most of them wait more than they compute: every parser
# fuzzed, writers killed, engines simulated, storms in a real engine. Shows each one's output
# when it is over. Seeds are in the output; a failure says how to play it again.
#
# Usage: tests/torture.sh PYTHON
#   FUZZ_SECONDS         for each parser (60)
#   KVTIER_SIM_SEEDS     simulated engines, in four processes (2000)
#   KVTIER_STORM_CYCLES  with kvtier, and without (1000)
set -u
python=$1
seeds=${KVTIER_SIM_SEEDS:-2000}
logs=$(mktemp -d)
running=

part() {
    name=$1
    shift
    "$@" >"$logs/$name" 2>&1 &
    running="$running $name:$!"
    echo "started: $name"
}

stop() {
    for each in $running; do kill "${each##*:}" 2>/dev/null; done
    rm -rf "$logs"
}
trap stop EXIT
trap 'exit 130' INT TERM

long() {
    name=$1
    shift
    part "$name" "$python" -m pytest -m "torture or not torture" \
        -o "cache_dir=.pytest_cache/torture-$name" "$@"
}

part fuzz env PYTHONPATH=.src "$python" -m tests.property.fuzz "${FUZZ_SECONDS:-60}"
long kills tests/property/storage
long storms tests/engine/test_storms.py
for quarter in 0 1 2 3; do
    KVTIER_SIM_SEEDS=$((seeds * quarter / 4))-$((seeds * (quarter + 1) / 4))
    export KVTIER_SIM_SEEDS
    long "simulation-$quarter" tests/sim
done

failed=
for each in $running; do
    wait "${each##*:}" || failed="$failed ${each%%:*}"
    echo "== ${each%%:*}"
    cat "$logs/${each%%:*}"
done
running=
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
echo "all passed"
