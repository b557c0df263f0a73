#!/bin/sh
# Runs a Flower app until its results say that it has finished.
#
#     keep-running.sh RESULTS APP [words for flwr run ...]
#
# `flwr run` ends with 0 whether the app finished or crashed, and a run whose SuperLink went down is not taken up again.
# With a checkpoint folder in its run config the app goes on where it stopped, so it is started again until there is a
# summary.json below RESULTS that says "finished": true. RESULTS is this run's alone: where an earlier run has finished
# there, with fewer rounds for instance, nothing is started. PAUSE (seconds, 30 by default) is waited between two starts.
set -u
results=$1
shift
finished() {
    find "$results" -name summary.json -exec grep -q '"finished": true' {} \; -print 2>/dev/null | grep -q .
}
until finished; do
    flwr run "$@" --stream
    finished && break
    echo "keep-running: no finished results below $results yet; starting again in ${PAUSE:-30} s" >&2
    sleep "${PAUSE:-30}"
done
echo "keep-running: finished"
