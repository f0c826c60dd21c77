#!/bin/bash
# SPDX-License-Identifier: GPL-3.0-or-later
# usage: install.sh LOAD [SITE]
#
# On the GPU host: unpacks one load of wheels.sh into SITE (default ~/sglang-site), its overlay into SITE-overlay. Then
# PYTHONPATH=SITE runs SGLang 0.5.12.post1, PYTHONPATH=SITE-overlay:SITE runs 0.5.14.
set -euo pipefail
load=$1
site=${2:-$HOME/sglang-site}

unpack() { # FROM TO
    mkdir -p "$2"
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$2" "$1"/*.whl
    for archive in "$1"/*.zip; do
        if [ -e "$archive" ]; then python3 -m zipfile -e "$archive" "$2"; fi
    done
}

unpack "$load" "$site"
if [ -d "$load/overlay" ]; then unpack "$load/overlay" "$site-overlay"; fi
