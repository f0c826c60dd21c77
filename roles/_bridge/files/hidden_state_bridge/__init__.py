# SPDX-License-Identifier: Apache-2.0
"""Hidden State Bridge: the part that runs beside SGLang and on the controller.

`python -m hidden_state_bridge COMMAND` (or the same package as a zip application) packs a data set, plans, extracts,
verifies and reports. Packing, planning and reporting need numpy, orjson and jinja2; extraction needs torch, safetensors
and aiohttp as well, all of which an SGLang environment has.
"""
