# SPDX-License-Identifier: Apache-2.0
"""The report of a run: report.json, report.html (one file, no network) and summary.txt."""

from __future__ import annotations

import bisect
import json
import os
import pkgutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any

import hs_manifest
import hs_progress

from .errors import Refusal

FORMAT = "hidden_state_bridge.report/1"
TEMPLATE = "report.html.j2"
SHOWN_FAILURES = 20
FORMAT_HELP = {
    "specforge": "SpecForge reads the files as they are: give the directory (any depth below it is found) as its"
    " offline hidden-states path.",
    "speculators": "speculators reads the directory that collect.yml makes, as its data path.",
    "modelopt": "ModelOpt's OfflineSupervisedDataset finds the files below the directory that it is given.",
    "safetensors_zstd": "Each file is a safetensors file under zstd.",
    "safetensors": "safetensors.safe_open reads each file; its metadata names record, source, line, layers and norm.",
}


def summarize(request: dict[str, Any]) -> dict[str, Any]:
    """The report as an object.

    request: `{"hosts": {host: {output_dir, **what extraction_info returned, "verify": what verify printed, "broke": why the
    play gave the host up, "refused": [ranges of records that failed by themselves, listed in `failures` or not]}}}`, with optional
    `dataset` (meta of the packed set), `expected` (`{records, tokens, wanted: ranges}` of a pilot, else all of the data set),
    `held` (`{host: {records, tokens}}`, shares of hosts that were not reached) and `format`. `verify`, `broke` and `refused` may be
    left out or null. A record that failed on one host and is done on another has not failed. Records count once; tokens, bytes,
    sources, lengths and pace count second copies too. Raises Refusal where the hosts are of different runs.
    """
    hosts = request.get("hosts")
    if not isinstance(hosts, dict) or not hosts:
        raise Refusal('a report needs {"hosts": {HOST: what extraction_info returned}}')
    runs = {info.get("run"): host for host, info in sorted(hosts.items()) if info.get("records_done")}
    if len(runs) > 1:
        named = ", ".join(f"{host} has {run}" for run, host in runs.items())
        raise Refusal(f"the hosts are of different runs ({named}); report on each run by itself")
    rows, sources, failures = [], {}, []
    failed: set[int] = set()
    done = _merged(info.get("done") or "" for info in hosts.values())
    paces = [info["pace"] for info in hosts.values() if info.get("pace")]
    for host, info in sorted(hosts.items()):
        status = info.get("status") or {}
        seconds = status.get("seconds_total") or 0
        check = info.get("verify") or {}
        state = info.get("state", "absent")
        own = [dict(item, host=host) for item in info.get("failures") or [] if not _holds(done, item["record"])]
        refused = {number for number in _numbers(info.get("refused") or []) if not _holds(done, number)} | {item["record"] for item in own}
        failed |= refused
        # What a host took over from another is a start of its own, after which its status names no failure of an earlier one.
        if state in ("done", "incomplete"):
            state = "incomplete" if refused else "done"
        failures += own
        rows.append(
            {
                "host": host,
                "state": state,
                "broke": info.get("broke") or "",
                "records": info.get("records_done", 0),
                "tokens": info.get("tokens_done", 0),
                "bytes": info.get("bytes", 0),
                "seconds": round(seconds, 1),
                "tok_s": round(info.get("tokens_done", 0) / seconds, 1) if seconds else 0.0,
                "hashed": check.get("checked"),
                "verified": check.get("ok"),
                "problems": check.get("problems", []),
                "output_dir": info.get("output_dir", ""),
                "provenance": info.get("provenance", {}),
                "started_at": status.get("started_at"),
                "updated_at": status.get("updated_at"),
            }
        )
        for name, counts in (info.get("sources") or {}).items():
            source = sources.setdefault(name, {"records": 0, "tokens": 0, "bytes": 0})
            for key in source:
                source[key] += counts[key]
    # A host whose directory holds another run has that one's identity, and no records of this one.
    described = [info for _host, info in sorted(hosts.items()) if info.get("identity")]
    identity = next((info["identity"] for info in described if not runs or info.get("run") in runs), {})
    dataset = request.get("dataset") or {}
    expected = request.get("expected") or dataset
    distinct = sum(last - first + 1 for first, last in done)
    # After a pilot there may be other records than the next one asks for.
    asked = sum(_holds(done, number) for number in _numbers([expected["wanted"]])) if expected.get("wanted") else distinct
    left = max(0, expected["records"] - asked) if expected else None
    totals = {key: sum(row[key] for row in rows) for key in ("records", "tokens", "bytes", "tok_s")}
    return {
        "format": FORMAT,
        "run": next(iter(runs), ""),
        "identity": identity,
        "output_format": request.get("format", ""),
        "totals": dict(
            totals,
            tok_s=round(totals["tok_s"], 1),
            records=distinct,
            twice=totals["records"] - distinct,
            records_expected=expected.get("records"),
            tokens_expected=expected.get("tokens"),
            left=left,
            failed=len(failed),
            complete=left == 0 if expected else None,
            verified=bool(totals["records"]) and all(row["verified"] for row in rows if row["records"]),
        ),
        "hosts": rows,
        "held": request.get("held") or {},
        "sources": [dict(counts, name=name) for name, counts in sorted(sources.items())],
        "lengths": hs_progress.lengths(tuple(pair) for info in hosts.values() for pair in info.get("lengths") or []),
        "pace": hs_progress.pace(
            [tuple(pair) for one in paces for pair in one["tokens"]], max([one["seconds"] for one in paces], default=1)
        ),
        "failed": sorted(failures, key=lambda item: (item["record"], item["host"])),
        "dataset": {key: dataset[key] for key in ("sha256", "records", "tokens", "max_length", "seed") if key in dataset},
    }


def _merged(texts: Iterable[str]) -> list[tuple[int, int]]:
    """First and last of the records that are in any of these ranges, in order and without overlap."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(pair for text in texts for pair in hs_manifest.decode_ranges(text)):
        first = max(first, merged[-1][1] + 1) if merged else first
        if first <= last:
            merged.append((first, last))
    return merged


def _numbers(texts: Iterable[str]) -> Iterator[int]:
    """The records that are in any of these ranges."""
    return (number for first, last in _merged(texts) for number in range(first, last + 1))


def _holds(ranges: list[tuple[int, int]], number: int) -> bool:
    place = bisect.bisect_right(ranges, (number, float("inf")))
    return place > 0 and number <= ranges[place - 1][1]


def _named(failure: dict[str, Any]) -> str:
    """A record that failed, for people; its source is not known of an extractor that was killed."""
    where = f" ({failure['source']} line {failure['line']})" if "source" in failure else ""
    return f"record {failure['record']}{where} on {failure['host']}: {failure['reason']}"


def summary_lines(report: dict[str, Any]) -> list[str]:
    """The run in a few lines of plain text."""
    totals = report["totals"]
    working = [row for row in report["hosts"] if row["records"]]
    records, copies = f"{totals['records']:,}", ", second copies with them" if totals["twice"] else ""
    if totals["left"] is not None:
        asked = totals["records_expected"] - totals["left"]
        records = f"{asked:,} of {totals['records_expected']:,}" + (
            f", {totals['records'] - asked:,} beyond them" if totals["records"] > asked else ""
        )
    hashed = sum(row["hashed"] or 0 for row in working)
    problems = sum(len(row["problems"]) for row in report["hosts"])
    if totals["verified"]:
        verified = "all names and sizes right" + (f", {hashed:,} files hashed and right" if hashed else "")
    elif problems:
        verified = f"{problems:,} files are not as the manifest says"
    else:
        verified = "not checked on every host"
    hosts = len(working)
    lines = [
        f"Run       {report['run']} · {report['output_format'] or 'states'} of layers"
        f" {', '.join(map(str, report['identity'].get('layers', [])))}"
        f" and {report['identity'].get('final', '')} · {report['identity'].get('dtype', '')}",
        f"Hosts     {hosts:,} ({', '.join(row['host'] for row in working[:4])}{', …' if hosts > 4 else ''})",
        f"Records   {records}"
        + (f", {totals['failed']:,} failed" if totals["failed"] else "")
        + (f", {totals['twice']:,} on two hosts" if totals["twice"] else ""),
        f"Tokens    {totals['tokens']:,}{copies}",
        f"Bytes     {hs_progress.size(totals['bytes'])}{copies}",
        f"Speed     {hs_progress.short(totals['tok_s'])} tok/s",
        f"Verified  {verified}",
    ]
    lines += [
        f"Held      {share['records']:,} records that {host} did or was given; it was not asked" for host, share in report["held"].items()
    ]
    lines += [f"Failed    {_named(failure)}" for failure in report["failed"][:SHOWN_FAILURES]]
    more = max(len(report["failed"]), totals["failed"]) - min(len(report["failed"]), SHOWN_FAILURES)
    if more:
        lines.append(f"          and {more:,} more, see the report")
    lines += [f"Broke     {row['host']}: {row['broke'].splitlines()[0]}" for row in report["hosts"] if row["broke"]]
    lines += [f"Files     {row['host']}:{row['output_dir']}" for row in working[:4]]
    if hosts > 4:
        lines.append(f"          and {hosts - 4:,} more hosts, see the report")
    return lines


def write_report(request: dict[str, Any], out_dir: str) -> dict[str, Any]:
    """Write the three files where their content differs.

    Returns `{changed, files: {json, html, summary}, summary: [lines]}`. Raises Refusal.
    """
    import jinja2

    report = summarize(request)
    lines = summary_lines(report)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(count=hs_progress.count, short=hs_progress.short, size=hs_progress.size)
    environment.filters.update(duration=hs_progress.duration, moment=lambda at: time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at)))
    formats = [name.strip() for name in report["output_format"].split(",")]
    template = environment.from_string((pkgutil.get_data(__package__, TEMPLATE) or b"").decode())
    html = template.render(report=report, help=[FORMAT_HELP[name] for name in formats if name in FORMAT_HELP], formats=formats)
    files = {
        "json": ("report.json", json.dumps(report, sort_keys=True, indent=1) + "\n"),
        "html": ("report.html", html + "\n"),
        "summary": ("summary.txt", "\n".join(lines) + "\n"),
    }
    try:
        os.makedirs(out_dir, exist_ok=True)
        changed = [_replace(os.path.join(out_dir, name), text) for name, text in files.values()]
    except OSError as error:
        raise Refusal(f"the report cannot be written to {out_dir}: {error.strerror}; choose another directory") from error
    paths = {key: os.path.join(os.path.abspath(out_dir), name) for key, (name, _text) in files.items()}
    return {"changed": any(changed), "files": paths, "summary": lines}


def _replace(path: str, text: str) -> bool:
    try:
        with open(path, encoding="utf-8") as stream:
            if stream.read() == text:
                return False
    except (FileNotFoundError, UnicodeDecodeError):
        pass
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=f".{os.path.basename(path)}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return True
