# SPDX-License-Identifier: GPL-3.0-or-later
"""A stand-in for SGLang: starts, answers, hangs and dies as a server can, in a second and without a model.

For what no real server does when asked to (tests/drills), and for what does not depend on the model.
"""
