# SPDX-License-Identifier: Apache-2.0
"""Command line of the package: `python -m hidden_state_bridge COMMAND`.

The last line on stdout is one JSON object (but for `extract` and `convert`, services whose result is status.json).
Exit status: 0 done, 1 refused or something is wrong (stderr says what and the remedy), 2 usage, or a configuration on
which a service manager must not restart.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import hs_manifest

from .errors import ConfigError, Refusal


def _read_json(name: str) -> dict[str, Any]:
    try:
        if name == "-":
            value = json.load(sys.stdin)
        else:
            with open(name, encoding="utf-8") as stream:
                value = json.load(stream)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{'standard input' if name == '-' else name}: {error}; give a file with a JSON object") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: the JSON is no object")
    return value


def _print(value: dict[str, Any]) -> None:
    print(json.dumps(value, sort_keys=True), flush=True)


def _pack(options: argparse.Namespace) -> int:
    from .pack import pack

    result = pack(_read_json(options.config), options.out_dir, options.dry_run)
    print("\n".join(result["table"]))
    if result["rejects"]:
        print(f"what was rejected: {result['rejects']}")
    _print(result)
    return 0


def _plan(options: argparse.Namespace) -> int:
    from .plan import make_plan

    _print(make_plan(_read_json("-")))
    return 0


def _claim(options: argparse.Namespace) -> int:
    from .plan import claim

    _print(claim(_read_json("-")))
    return 0


def _dataset_check(options: argparse.Namespace) -> int:
    from .packed import PackedDataset

    dataset = PackedDataset(options.dataset)
    dataset.check_content()
    _print({"records": len(dataset), "tokens": int(dataset.lengths.sum()), "sha256": dataset.meta["sha256"]})
    return 0


def _config_check(options: argparse.Namespace) -> int:
    from hs_capture.layers import check_layers

    from .config import read_config

    request = _read_json("-")
    values = dict(request["config"])
    # Before the data set is packed there is no identity, and so no name of the run.
    values["run"] = hs_manifest.run_of(values.get("identity"))
    config = read_config(values)
    try:
        check_layers(config.layers, request["num_hidden_layers"])
    except ValueError as error:
        raise ConfigError(f"extraction_layers: {error}") from error
    _print({"bytes_per_token": config.bytes_per_token, "output_bytes_per_token": config.output_bytes_per_token})
    return 0


def _extract(options: argparse.Namespace) -> int:
    from .config import need_packages, read_config
    from .extract import run_service

    config = read_config(_read_json(options.config))
    need_packages(config.formats)
    return run_service(config)


def _canary(options: argparse.Namespace) -> int:
    from .canary import run_canary
    from .config import read_config

    result = run_canary(read_config(_read_json(options.config)))
    print("\n".join(result["table"]))
    _print(result)
    return 0 if result["ok"] else 1


def _canary_compare(options: argparse.Namespace) -> int:
    from .canary_compare import compare_hosts

    result = compare_hosts(_read_json("-"))
    print("\n".join(result["table"]))
    _print(result)
    return 0 if result["ok"] else 1


def _verify(options: argparse.Namespace) -> int:
    from .verify import verify

    result = verify(options.output_dir, None if options.all else options.sample, options.seed, options.repair, options.mend)
    _print(result)
    return 0 if result["ok"] else 1


def _convert(options: argparse.Namespace) -> int:
    from .convert import read_convert_config, run_conversion

    return run_conversion(read_convert_config(_read_json(options.config)))


def _collect(options: argparse.Namespace) -> int:
    from .collect import collect, read_request

    result = collect(read_request(_read_json("-")))
    _print(result)
    return 0 if result["ok"] else 1


def _report(options: argparse.Namespace) -> int:
    from .report import write_report

    result = write_report(_read_json("-"), options.out_dir)
    print("\n".join(result["summary"]))
    _print(result)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hidden_state_bridge", description="Hidden states from SGLang as training data.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(function=function)
        return command

    command = add("pack", _pack, "Merge sources into one packed data set.")
    command.add_argument("--config", required=True, help="JSON file with sources and settings, - for standard input")
    command.add_argument("--out-dir", help="directory below which the data set goes")
    command.add_argument("--dry-run", action="store_true", help="read and count, write nothing")
    command = add("dataset-check", _dataset_check, "Compare a packed data set with its hashes.")
    command.add_argument("dataset", help="the data set's directory")
    add("plan", _plan, "Spread what is left over the hosts; reads and writes JSON.")
    add("claim", _claim, "Take over what failed hosts left; reads and writes JSON.")
    add("config-check", _config_check, "Check an extractor's settings against the model; reads JSON.")
    command = add("extract", _extract, "Extract this host's share: the service.")
    command.add_argument("--config", required=True, help="the extractor's JSON file, - for standard input")
    command = add("canary", _canary, "Capture a few records alone and together and compare the states.")
    command.add_argument("--config", required=True, help="the extractor's JSON file, - for standard input")
    add("canary-compare", _canary_compare, "Compare one host's canary with those of others; reads JSON.")
    command = add("verify", _verify, "Read output files against the manifest.")
    command.add_argument("--output-dir", required=True, help="one host's output directory")
    amount = command.add_mutually_exclusive_group()
    amount.add_argument("--sample", type=int, default=100, help="files to hash, default 100; names and sizes are all checked")
    amount.add_argument("--all", action="store_true", help="hash every file")
    command.add_argument("--seed", type=int, default=0, help="chooses the sample")
    change = command.add_mutually_exclusive_group()
    change.add_argument("--repair", action="store_true", help="put back into the plan what is not as the manifest says")
    change.add_argument("--mend", action="store_true", help="the same, but for changed files, and not while an extractor is at work")
    command = add("convert", _convert, "Make one format from another: a service.")
    command.add_argument("--config", required=True, help="the conversion's JSON file, - for standard input")
    add("collect", _collect, "Gather the states of all hosts in one directory; reads JSON.")
    command = add("report", _report, "Write report.json, report.html and summary.txt from the hosts' results on stdin.")
    command.add_argument("--out-dir", required=True, help="directory of the report")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        return options.function(options)
    except Refusal as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return error.exit_status
    except OSError as error:
        print(f"{options.command}: {error}; see to the file system and the permissions there, then run it again", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
