# SPDX-License-Identifier: Apache-2.0
"""Make one format from another, from the files of one output directory into another one, without the server.

    file -> its checksum -> content -> write, fsync, rename (threads) -> manifest line, fsync

The other directory is an output directory like the first, of the same run: it goes on where it was after any end, and everything
that reads the one reads the other.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import hs_manifest
import hs_progress
from hs_capture import dumpfile
from hs_capture.layers import format_layers

from . import store
from .config import GIB, check_formats, need_packages
from .errors import ConfigError, Refusal
from .formats import FORMATS, unfit
from .formats.files import Stored
from .hashes import file_hash
from .merge import formats_of
from .packed import PackedDataset, Record
from .progress import Progress, free_bytes, say
from .remedy import remedy_of

LOG_SECONDS = 10.0
STATUS_SECONDS = 1.0


@dataclass(frozen=True)
class ConvertConfig:
    """From where to where. format: a name, or several. dataset_dir: where packed data sets lie. workers: threads, 0 for one a CPU, at most 8."""

    source_dir: str
    output_dir: str
    format: str | list[str]
    dataset_dir: str | None = None
    group: str | None = None
    min_free_bytes: int = GIB
    workers: int = 0

    @property
    def formats(self) -> tuple[str, ...]:
        return (self.format,) if isinstance(self.format, str) else tuple(self.format)


def read_convert_config(values: dict[str, Any]) -> ConvertConfig:
    """Check a configuration. Raises ConfigError naming the key."""
    known = {item.name for item in dataclasses.fields(ConvertConfig)}
    if set(values) - known:
        raise ConfigError(f"unknown setting {', '.join(sorted(set(values) - known))} in the conversion's configuration")
    try:
        config = ConvertConfig(**values)
    except TypeError as error:
        raise ConfigError(f"a conversion needs source_dir, output_dir and format: {error}") from error
    check_formats(config.format)
    need_packages(config.formats)
    for name in ("source_dir", "output_dir"):
        if not isinstance(getattr(config, name), str) or not os.path.isabs(getattr(config, name)):
            raise ConfigError(f"{name} is {getattr(config, name)!r}; give an absolute path")
    source, output = (os.path.realpath(path) for path in (config.source_dir, config.output_dir))
    if source == output or output.startswith(source + os.sep) or source.startswith(output + os.sep):
        raise ConfigError(
            f"output_dir {config.output_dir} is, holds or lies in source_dir {config.source_dir}; give a directory of its own"
        )
    return config


class RecordUnfit(Exception):
    """A record cannot be converted; the message names its file."""


class Conversion:
    """One start of a conversion."""

    def __init__(self, config: ConvertConfig) -> None:
        self.config = config
        self.access = store.access_of(config.group)
        self.stopping = False
        self.progress: Progress | None = None
        self._lock: hs_manifest.Lock | None = None

    def prepare(self) -> None:
        """Read the source, see that it can become what is asked for, take the output directory. Raises Refusal."""
        config, access = self.config, self.access
        try:
            self.run = hs_manifest.read_json(os.path.join(config.source_dir, hs_manifest.RUN))
            if self.run is None:
                raise ConfigError(f"{config.source_dir} has no {hs_manifest.RUN}; give one host's output directory of an extraction")
            self.source = hs_manifest.Manifest(config.source_dir)
            self._choose_source()
            identity = self.run["identity"]
            self.dataset = self._open_dataset(identity)
            hs_manifest.claim_directory(config.output_dir, self.run["run"], access.directory_mode, access.gid)
            self._lock = hs_manifest.Lock(config.output_dir)
            made_of = {"directory": config.source_dir, "format": self.format, "final": self.final}
            provenance = dict(self.run.get("provenance") or {}, converted_from=made_of)
            hs_manifest.claim_run(config.output_dir, identity, provenance, access.file_mode, access.gid)
        except hs_manifest.ManifestError as error:
            raise ConfigError(str(error)) from error
        for path in store.leftovers(config.output_dir):
            os.unlink(path)
        output = hs_manifest.Manifest(config.output_dir)
        if output.other_format(config.formats):
            raise ConfigError(output.other_format(config.formats))
        output.repair(access.file_mode, access.gid)
        self.left = [entry for record, entry in sorted(self.source.entries.items()) if record not in output.entries]
        self.progress = Progress(config.output_dir, access, self.run["run"])
        done = output.entries.values()
        tokens = sum(entry["tokens"] for entry in done)
        total = tokens + sum(entry["tokens"] for entry in self.left)
        self.progress.plan(len(done), tokens, len(done) + len(self.left), total)

    def _choose_source(self) -> None:
        """Choose the format to read: one whose files hold the final state that the others want."""
        if not self.source.entries:
            raise ConfigError(f"{self.config.source_dir} has no record that is done; run extract.yml first")
        captured = ((self.run.get("provenance") or {}).get("converted_from") or self.run["identity"])["final"]
        there = {name for entry in self.source.entries.values() for name in formats_of(entry)}
        reasons, serves = [], {}
        # What keeps all that was captured comes first.
        for name in sorted(there, key=lambda name: (FORMATS[name].KEEPS is not None, name)):
            final = FORMATS[name].KEEPS or captured
            reason = unfit(self.config.formats, final)
            if not reason:
                self.format, self.final = name, final
                return
            reasons.append(f"{reason}, which is what files of the format {name} hold")
            serves.update({target: name for target in self.config.formats if not unfit((target,), final)})
        if len(serves) == len(self.config.formats):
            raise ConfigError(
                f"{self.config.source_dir}: {'; '.join(reasons)}. No one format there serves all of {', '.join(self.config.formats)}, but"
                " each is served by one: convert them one at a time, each into a directory of its own"
            )
        raise ConfigError(
            f"{self.config.source_dir}: {'; '.join(reasons)}. One state cannot be made from the other (the norm loses the length of a row, and"
            " its weights are the model's): extract again with extraction_final: both, or the one that the format needs"
        )

    def _open_dataset(self, identity: dict[str, Any]) -> PackedDataset | None:
        """The packed data set where the files hold no loss mask."""
        if self.format != "speculators":
            return None
        path = os.path.join(self.config.dataset_dir or "", identity["dataset"][:16])
        if not self.config.dataset_dir or not os.path.isdir(path):
            raise ConfigError(
                f"files of the format speculators hold no loss mask, and the packed data set {identity['dataset'][:16]} is not below"
                f" {self.config.dataset_dir}; run stage.yml, or name the directory that holds it (extraction_dataset_dir)"
            )
        dataset = PackedDataset(path)
        if dataset.meta["sha256"] != identity["dataset"]:
            raise ConfigError(f"data set {path} has hash {dataset.meta['sha256']}, the states are of {identity['dataset']}; stage it again")
        return dataset

    def work(self) -> None:
        """Convert what is left. Raises OSError, and ConfigError where the file system has too little room."""
        import torch

        torch.set_num_threads(1)
        config, access = self.config, self.access
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        workers = config.workers or min(8, os.cpu_count() or 1)
        writer = hs_manifest.ManifestWriter(config.output_dir, access.file_mode, access.gid)
        self.progress.begin()
        self.progress.write("running")
        written = logged = time.monotonic()
        pending: dict[Future[dict[str, Any]], dict[str, Any]] = {}
        waiting = iter(self.left)
        try:
            with ThreadPoolExecutor(workers, "convert") as pool:
                while True:
                    for entry in self._next(waiting, 2 * workers - len(pending), pending):
                        pending[pool.submit(self.convert, entry)] = entry
                    if not pending:
                        break
                    done, _rest = wait(pending, timeout=STATUS_SECONDS, return_when=FIRST_COMPLETED)
                    self._record(done, pending, writer)
                    now = time.monotonic()
                    if now - written >= STATUS_SECONDS:
                        written = now
                        self.progress.write()
                    if now - logged >= LOG_SECONDS:
                        logged = now
                        say(self.progress.line)
        finally:
            writer.close()

    def _next(
        self, waiting: Iterator[dict[str, Any]], room: int, pending: dict[Future[dict[str, Any]], dict[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        for _place in range(room):
            if self.stopping:
                return
            entry = next(waiting, None)
            if entry is None:
                return
            # What is under way may not have a byte on the disk yet; a file is about as large as the one that it is made from.
            needed = len(self.config.formats) * sum(self._file_of(one)["bytes"] for one in (*pending.values(), entry))
            free = free_bytes(self.config.output_dir)
            if free - needed < self.config.min_free_bytes:
                raise ConfigError(
                    f"the file system of {self.config.output_dir} has {hs_progress.size(free)} free for {hs_progress.size(needed)} that are"
                    f" in flight or next, and {hs_progress.size(self.config.min_free_bytes)} stay free (min_free_bytes); make room and start again:"
                    " the conversion goes on where it stopped"
                )
            yield entry

    def _record(
        self, done: set[Future[dict[str, Any]]], pending: dict[Future[dict[str, Any]], dict[str, Any]], writer: hs_manifest.ManifestWriter
    ) -> None:
        entries = []
        for future in done:
            record = pending.pop(future)["id"]
            try:
                entries.append(future.result())
            except RecordUnfit as error:
                self.progress.failed(record, str(error))
                say(f"record {record} failed: {error}")
        if entries:
            writer.append(entries)
        for entry in entries:
            self.progress.finished(entry)

    def convert(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Convert one record; returns its manifest entry. Raises RecordUnfit for what is wrong with its file, OSError."""
        file = self._file_of(entry)
        path = os.path.join(self.config.source_dir, file["file"])
        try:
            same = file_hash(path) == file["sha256"]
        except OSError as error:
            raise RecordUnfit(f"{path} cannot be read: {error.strerror}") from error
        if not same:
            raise RecordUnfit(f"{path} has another SHA-256 than the manifest says; {remedy_of(self.config.source_dir, self.run).commands}")
        names = [dumpfile.layer_name(layer) for layer in self.run["identity"]["layers"]]
        try:
            content = FORMATS[self.format].load(path, names)
        except Exception as error:
            raise RecordUnfit(f"{path} cannot be read as {self.format}: {error}") from error
        record = self._record_of(entry, content, path)
        states = dataclasses.replace(content, metadata=self._metadata(content.metadata, entry))
        files = store.save(self.config.output_dir, self.config.formats, self.access, record, states)
        return store.entry_of(record, files, entry.get("sglang_version", ""))

    def _file_of(self, entry: dict[str, Any]) -> dict[str, Any]:
        """The file of a record that is read."""
        return next(file for file in hs_manifest.files_of(entry) if file["file"].startswith(f"{self.format}/"))

    def _record_of(self, entry: dict[str, Any], content: Stored, path: str) -> Record:
        """The record that a file is of, by the data set or by the file itself. Raises RecordUnfit."""
        ids, mask = content.input_ids.numpy(), content.loss_mask
        if self.dataset is not None:
            record = self.dataset.record(entry["id"])
            if len(record.input_ids) != len(ids) or (record.input_ids != ids).any():
                raise RecordUnfit(f"{path} has other token ids than record {entry['id']} of the data set")
            return record
        lengths = {len(ids), len(mask), entry["tokens"], *(len(tensor) for tensor in content.tensors.values())}
        if len(lengths) > 1:
            raise RecordUnfit(f"{path} has tensors of different lengths ({', '.join(map(str, sorted(lengths)))})")
        return Record(entry["id"], ids, mask.numpy(), entry["source"], entry.get("source_file", ""), entry["line"])

    def _metadata(self, known: dict[str, str], entry: dict[str, Any]) -> dict[str, str]:
        layers = format_layers(self.run["identity"]["layers"])
        return {"sglang_version": entry.get("sglang_version", ""), **known, "layers": layers, "final": self.final}

    def _stop(self, _number: int, _frame: object) -> None:
        self.stopping = True

    def end(self) -> int:
        """Write the last status; returns the exit status."""
        status = self.progress.status
        left = status["records_total"] - status["records_done"] - status["failed_total"]
        if left:
            state, message, code = "stopped", f"{left:,} records are left; start the conversion again and it goes on", 0
        elif status["failed_total"]:
            first = status["failed"][0]
            state, code = "failed", 1
            message = f"{status['failed_total']:,} records failed, the first is record {first['record']}: {first['reason']}"
        else:
            state, message, code = "done", "", 0
        self.progress.write_last(state, message)
        say(f"{state}: {self.progress.line}{'; ' + message if message else ''}")
        return code

    def close(self) -> None:
        """Give the directory back."""
        if self._lock is not None:
            self._lock.close()


def run_conversion(config: ConvertConfig) -> int:
    """Convert one host's states; returns the exit status. Raises Refusal."""
    os.umask(0o077)
    conversion = Conversion(config)
    try:
        try:
            conversion.prepare()
            conversion.work()
        except OSError as error:
            raise ConfigError(f"{error}; mend that and start again: the conversion goes on where it stopped") from error
        return conversion.end()
    except Refusal as error:
        if conversion.progress is not None:
            conversion.progress.write_last("failed", str(error))
        raise
    finally:
        conversion.close()
