#!/usr/bin/env bash
# The trial of docs/memory-protocol.md, testbed by testbed; the same command again goes on where it stopped.
#
#   benchmarks/memory_trial.sh OUT C|D|B|A [WORKERS]
set -euo pipefail
out=$1 testbed=$2 workers=${3:-2}

arms=kbeta,kbeta-exact,kbeta-exact-warm,centred,centred-warm,predictive,predictive-warm
arms+=,centred-shuffled,centred-shuffled-warm,predictive-shuffled,predictive-shuffled-warm
arms+=,adam90,adam90-warm,adam95,adam95-warm,adam99,adam99-warm,adam999,adam999-warm,adafactor-beta2
plain=()
for arm in kbeta-exact kbeta-exact-warm centred centred-warm predictive predictive-warm; do
    for option in buckets=parameter warmup_steps=0 decay=none max_ratio=none adaptive_tiny=false; do
        plain+=(--set "$arm.$option")
    done
done
tuned=(--trials 5 --tune-seeds 100-101 --tune-budget 1 --seeds 0-9 --workers "$workers" --preset laptop)

case $testbed in
C) own=(rare_trigger --engine jax --endpoint heldout_bce --tune lr=1e-3:1e-1) ;;
D) own=(char-lm --engine torch --text "${TEXT:-enwik8}" --tune lr=5e-4:1.6e-2) arms+=,schedulefree ;;
B) own=(heat3d --engine torch --tune lr=1e-3:1.6e-2) arms+=,schedulefree ;;
A) own=(heat2d --engine torch --tune lr=3e-4:1e-2) arms+=,schedulefree ;;
*) echo "the testbed must be A, B, C or D; got $testbed" >&2; exit 2 ;;
esac
exec kbeta study "${own[@]}" --optimizers "$arms" "${tuned[@]}" "${plain[@]}" --out "$out/$testbed"
