#!/usr/bin/env bash
# The trial of docs/memory-protocol.md, testbed by testbed; the same command again goes on where it stopped, and without
# OUT/TESTBED from what is kept in benchmarks/memory_trial.
#
#   benchmarks/memory_trial.sh OUT C|D|B|A [WORKERS]
#   python benchmarks/memory_trial.py keep OUT C|D|B|A
#   python benchmarks/memory_trial.py verdict
#
# Arms named in WITHOUT="centred predictive" are left out with their shuffled controls, by the rule of futility. Neither
# signal is in the package any more: to run them, check out 7a42165.
set -euo pipefail
out=$1 testbed=$2 workers=${3:-2}

signals=() others=(kbeta kbeta-exact kbeta-exact-warm)
for signal in centred predictive; do
    if [[ " ${WITHOUT:-} " == *" $signal "* ]]; then continue; fi
    signals+=("$signal" "$signal-warm")
    others+=("$signal-shuffled" "$signal-shuffled-warm")
done
plain=()
for arm in kbeta-exact kbeta-exact-warm "${signals[@]}"; do
    for option in buckets=parameter warmup_steps=0 decay=none max_ratio=none adaptive_tiny=false; do
        plain+=("$arm.$option")
    done
done
others+=(adafactor-beta2)
tuned=(--tune-seeds 100-101 --tune-budget 1 --seeds 0-9 --workers "$workers" --preset laptop)

case $testbed in
C) own=(rare_trigger --engine jax --endpoint heldout_bce --tune lr=1e-3:1e-1 --trials 5) ;;
D) own=(char-lm --engine torch --text enwik8-4mb.txt --tune lr=1e-3:8e-3 --trials 4) others+=(schedulefree) ;;
B) own=(heat3d --engine torch --tune lr=1e-3:1.6e-2 --trials 5) others+=(schedulefree) ;;
A) own=(heat2d --engine torch --tune lr=3e-4:1e-2 --trials 5) others+=(schedulefree) ;;
*) echo "the testbed must be A, B, C or D; got $testbed" >&2; exit 2 ;;
esac

study() { # the arms that are compared
    local arms options=() option
    arms=$(IFS=,; echo "$*")
    for option in "${plain[@]}"; do
        if [[ ",$arms," == *",${option%%.*},"* ]]; then options+=(--set "$option"); fi
    done
    kbeta study "${own[@]}" --optimizers "$arms" "${tuned[@]}" "${options[@]}" --out "$out/$testbed"
}

deciding=("${signals[@]}")
for beta2 in 90 95 99 999; do deciding+=("adam$beta2" "adam$beta2-warm"); done
python "$(dirname "$0")/memory_trial.py" unpack "$out" "$testbed"
study "${deciding[@]}"
study "${deciding[@]}" "${others[@]}"
