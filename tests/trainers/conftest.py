# SPDX-License-Identifier: Apache-2.0
"""What the trainers read: the output of two hosts in every format, collected. Needs the packages of requirements/trainers.txt.

Their loaders run as released. What is left out are imports that have nothing to do with loading: the `__init__` of ModelOpt's
packages (quantization, a solver for it) does not run. The draft model runs uncompiled, so that no compiler is needed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "engine"))

RECORDS = 24


def pytest_configure() -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    missing = [name for name in ("specforge", "speculators", "modelopt", "datasets") if not importlib.util.find_spec(name)]
    if missing:
        raise pytest.UsageError(f"{', '.join(missing)} not installed; run: make trainers")
    root = Path(importlib.util.find_spec("modelopt").origin).parent
    for name in ("modelopt", "modelopt.torch", "modelopt.torch.speculative", "modelopt.torch.speculative.eagle", "modelopt.torch.utils"):
        module = types.ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module


def pytest_report_header() -> str:
    return (
        "loaders as released; left out: the __init__ of ModelOpt's packages (quantization, solvers), torch.compile, and SpecForge's Triton"
        " loss, for which its own reference stands in"
    )


class Output:
    """The packed data set, two hosts that did every other record, and what was collected from them."""

    def __init__(self, directory: Path) -> None:
        import hosts

        self.dataset = hosts.make_dataset(directory, RECORDS)
        formats = ("specforge", "speculators", "modelopt")
        done = [
            hosts.make_host(directory / "one", self.dataset, list(range(0, RECORDS, 2)), formats),
            hosts.make_host(directory / "two", self.dataset, list(range(1, RECORDS, 2)), formats),
        ]
        self.path = directory / "collected"
        result = hosts.collection(self.path, done, self.dataset, draft_vocab_size=32)
        assert result["ok"] and result["records"] == RECORDS

    def record(self, number: int) -> tuple:
        """Token ids and loss mask of a record, as lists."""
        record = self.dataset.record(number)
        return record.input_ids.tolist(), record.loss_mask.tolist()


@pytest.fixture(scope="session")
def output(tmp_path_factory: pytest.TempPathFactory) -> Output:
    return Output(tmp_path_factory.mktemp("output"))
