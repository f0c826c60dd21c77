# SPDX-License-Identifier: Apache-2.0
"""A stand-in for SGLang's kernel package, whose published wheels are CUDA only.

The few operators that a CPU run calls are written in plain torch in :mod:`sgl_kernel.operators`. Every other name and
submodule can be imported, as SGLang imports kernels that it then does not use, and raises NotImplementedError when
called. ``sgl_kernel.scalar_type`` has to be missing: SGLang takes its presence for a CUDA build.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types

from sgl_kernel.operators import assign_req_to_token_pool_cpu, register_operators

__all__ = ["assign_req_to_token_pool_cpu"]
__version__ = "99.0.0"  # SGLang asks for a lower bound.

_REAL_OR_MISSING = ("sgl_kernel.operators", "sgl_kernel.scalar_type")


def _placeholder(module: str, name: str):
    """A function of that name that can be imported but not called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args, **_kwargs):
        raise NotImplementedError(f"{module}.{name} has no CPU implementation here")

    missing.__name__ = name
    return missing


def __getattr__(name: str):
    return _placeholder(__name__, name)


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any other submodule, as a package of placeholders."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith("sgl_kernel.") and fullname not in _REAL_OR_MISSING:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = lambda name: _placeholder(spec.name, name)
        return module

    def exec_module(self, module):
        """Nothing to run: the module is its ``__getattr__``."""


sys.meta_path.append(_Submodules())
register_operators()
