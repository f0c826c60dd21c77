#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""extract_gpu.py on the demo's CPU engine, about 1,000 records a round: the extractor and the server share the cores."""

from __future__ import annotations

import sys

import extract_gpu

if __name__ == "__main__":
    sys.exit(extract_gpu.main(["--device", "cpu", "--tokens", "420000", "--concurrency", "16", *sys.argv[1:]]))
