#!/bin/sh
# Laws of devices and benchmarks/gpu_speed.py on a bare machine with one GPU, PyTorch and no network, in one call.
#
#     sh benchmarks/gpu_session.sh pack                # where there is a network: wheels of missing packages
#     sh benchmarks/gpu_session.sh run                 # on the machine, in the same checkout, with the folder .wheels
#
# NANOGPT=DIR of `pack` adds the file model.py of a checkout of nanoGPT. `run` writes its output into $OUT (default
# build/gpu) and ends within LAWS + SPEED seconds (default 130 + 420) and the ten seconds of the installation.
# PYTHON names the Python of the machine that has PyTorch; PYTHON_VERSION is its version, for `pack`.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
PACKAGES="annotated-types beartype pydantic pydantic-core typing-inspection"

pack() {
    mkdir -p .wheels
    for platform in manylinux_2_28 manylinux_2_17 manylinux2014; do
        platforms="${platforms:-} --platform ${platform}_x86_64"
    done
    # shellcheck disable=SC2086
    "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --python-version "${PYTHON_VERSION:-3.12}" \
        --implementation cp $platforms --constraint constraints.txt --dest .wheels $PACKAGES
    if [ -n "${NANOGPT:-}" ]; then
        cp "$NANOGPT/model.py" .wheels/model.py
    fi
    ls .wheels
}

run() {
    out=${OUT:-build/gpu}
    mkdir -p "$out"
    site=$(mktemp -d)
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" .wheels/*.whl
    export PYTHONPATH="$site:$PWD" PYTHONUNBUFFERED=1
    nvidia-smi --query-gpu=name,driver_version,clocks.sm --format=csv,noheader || true
    # A failed law must not hide the figures: its output is in laws.txt.
    timeout "${LAWS:-130}" "$PYTHON" -m pytest -q tests/laws/test_devices.py >"$out/laws.txt" 2>&1 || true
    tail -n 15 "$out/laws.txt"
    peer=
    if [ -f .wheels/model.py ]; then
        peer="--nanogpt .wheels"
    fi
    # shellcheck disable=SC2086
    "$PYTHON" benchmarks/gpu_speed.py $peer --seconds "${SPEED:-420}" --json >"$out/gpu_speed.json"
}

case "${1:-}" in
    pack) pack ;;
    run) run ;;
    *) echo "usage: sh benchmarks/gpu_session.sh pack|run" >&2; exit 2 ;;
esac
