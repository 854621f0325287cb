#!/bin/sh
# Installs Debian's HIP runtime (hipRTC 5.2.3 inside, gfx90a at best) so that `pytest -m hiprtc` has a real hipRTC to
# run hip-python's binding against; no AMD device is needed. Prints what to add to the environment:
#
#     eval "$(ci/setup-hiprtc.sh .hiprtc)"
#     pytest -m hiprtc tests/unit/test_simt_hiprtc.py
#
# Debian 12 (bookworm): package libamdhip64-5, with libamd-comgr2, libhsa-runtime64-1, libhsakmt1 and libnuma1.
# hip-python opens "libamdhip64.so" and "libhiprtc.so" by these names; the package has neither, and hipRTC lives inside
# libamdhip64 until ROCm 6.
set -eu

folder=${1:-.hiprtc}
if [ "$(id -u)" -eq 0 ]; then root=""; else root="sudo"; fi

library() { ldconfig -p | awk '$1 == "libamdhip64.so.5" { print $NF; exit }'; }

if [ -z "$(library)" ]; then
    $root apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive $root apt-get install -y -qq --no-install-recommends libamdhip64-5 >&2
fi
path=$(library)
if [ -z "$path" ]; then
    echo "setup-hiprtc: libamdhip64.so.5 is not on the loader's path after installing libamdhip64-5" >&2
    exit 1
fi
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
ln -sf "$path" "$folder/libamdhip64.so"
ln -sf "$path" "$folder/libhiprtc.so"
echo "export LD_LIBRARY_PATH=\"$folder\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}\""
