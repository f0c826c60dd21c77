# SPDX-License-Identifier: Apache-2.0
"""The extractor: a service that takes its share of the data set through the server, record by record.

    request -> dump -> check, convert, write, fsync, rename (a thread) -> manifest line, fsync -> dump removed

It goes on where it was after any end: what manifest and files agree on is done. At most `concurrency` requests are in
flight, and never more records than the dump directory has room for. Exit status: 0 done or stopped, 1 records failed or
the server went away, 2 something has to be changed first.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import hs_manifest
import hs_progress

from . import dumps, store
from .client import Client, RecordRefused, RequestFailed, ServerAway
from .config import ExtractConfig, read_secret
from .errors import ConfigError, Refusal
from .notify import Telling
from .packed import open_checked
from .plan import mask_of
from .progress import Progress, free_bytes, say
from .verify import remove_unnamed

STATUS_SECONDS = 1.0
LOG_SECONDS = 10.0
LONGEST_PAUSE = 5.0
DUMP_ROOM = 0.8
DUMP_TRIES = 2
LEAST_FAILURES_IN_A_ROW = 8


class Extraction:
    """One start of the extractor. `prepare` takes the directory, `run` does the work, `end` says how it went."""

    def __init__(self, config: ExtractConfig) -> None:
        self.config = config
        self.access = store.access_of(config.group)
        self.layout = dumps.Layout(tuple(config.layers), config.final, config.hidden_size, config.dtype)
        self.target = store.Target(config.output_dir, config.formats, self.layout, self.access)
        self.progress: Progress | None = None
        self.order: deque[int] = deque()
        self.stopping = False
        self.fatal: Refusal | None = None
        self._awaited: set[str] = set()
        self._failures_in_a_row = 0
        self._away_since: float | None = None
        self._in_flight_tokens = 0
        self._manifest_error: OSError | None = None
        self._lock: hs_manifest.Lock | None = None

    def prepare(self) -> None:
        """Lock and check everything. Raises Refusal; status.json says why once the directory is ours."""
        config, access = self.config, self.access
        try:
            hs_manifest.claim_directory(config.output_dir, config.run, access.directory_mode, access.gid)
            self._lock = hs_manifest.Lock(config.output_dir)
            hs_manifest.claim_run(config.output_dir, config.identity, config.provenance, access.file_mode, access.gid)
        except hs_manifest.ManifestError as error:
            raise ConfigError(str(error)) from error
        self.progress = Progress(config.output_dir, access, config.run, Telling(config))
        self.progress.write("starting")
        self.progress.telling.check()
        dumps.check_directory(config.dump_dir)
        self.dataset = open_checked(config.dataset, config.identity.get("dataset"))
        self.api_key = read_secret("api_key_file", config.api_key_file)
        # A server has its dump directory to itself, so nobody else awaits what lies there.
        removed = dumps.remove_left(config.dump_dir, config.rid_prefix)
        if removed:
            say(f"removed {removed} dumps that nobody awaits from {config.dump_dir}")
        manifest = hs_manifest.Manifest(config.output_dir)
        if manifest.other_format(config.formats):
            raise ConfigError(manifest.other_format(config.formats))
        if manifest.repair(access.file_mode, access.gid):
            say(
                f"mended the manifest: {len(manifest.broken) + bool(manifest.torn)} bad lines,"
                f" {len(manifest.repeated)} repeated, {len(manifest.stale)} without their file"
            )
        if unnamed := remove_unnamed(manifest):
            say(f"removed {unnamed} files that no line of the manifest names")
        self._choose(set(manifest.entries))
        self._need_space()

    def _choose(self, done: set[int]) -> None:
        """Fill `order`: what is left of the share, longest first, so that batches stay even."""
        lengths = self.dataset.lengths
        try:
            share = np.flatnonzero(mask_of(self.config.share, len(self.dataset), "share"))
        except Refusal as error:
            raise ConfigError(str(error)) from error
        left = [record for record in share.tolist() if record not in done]
        self.order.extend(sorted(left, key=lambda record: -lengths[record]))
        tokens_done = int(sum(lengths[record] for record in done))
        tokens_left = int(sum(lengths[record] for record in left))
        self.progress.plan(len(done), tokens_done, len(done) + len(left), tokens_done + tokens_left)

    def _need_space(self, tokens: int = 0) -> None:
        """Raise ConfigError where what is in flight, and `tokens` more, take the output file system below the low-water mark."""
        config = self.config
        free, needed = free_bytes(config.output_dir), (self._in_flight_tokens + tokens) * config.output_bytes_per_token
        if free - needed < config.min_free_bytes:
            in_flight = f" for {hs_progress.size(needed)} that are in flight or next" if needed else ""
            raise ConfigError(
                f"the file system of {config.output_dir} has {hs_progress.size(free)} free{in_flight}, and"
                f" {hs_progress.size(config.min_free_bytes)} stay free (min_free_bytes); make room and start again:"
                " the extraction goes on where it stopped"
            )

    async def run(self) -> None:
        """Do the work; returns when all is done, or when stopped and nothing is in flight."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        import torch

        # The server needs the cores, and several records are converted at once.
        torch.set_num_threads(1)
        config = self.config
        workers = config.workers or store.default_workers()
        self._requests = asyncio.Semaphore(config.concurrency)
        self._changed = asyncio.Condition()
        self._entries: asyncio.Queue[Any] = asyncio.Queue()
        free = free_bytes(config.dump_dir)
        self._capacity = int(min(free, dumps.limit(config.dump_dir) or free) * DUMP_ROOM)
        self._writer = hs_manifest.ManifestWriter(config.output_dir, self.access.file_mode, self.access.gid)
        self.progress.begin()
        self.progress.write("running")
        with ThreadPoolExecutor(workers, "convert") as self._pool, ThreadPoolExecutor(1, "manifest") as self._appender:
            background = [loop.create_task(work) for work in (self._record_entries(), self._report(), self._watch_clock())]
            # Where it is `until` already, nothing is begun.
            await asyncio.sleep(0)
            try:
                async with Client(config.url, self.api_key, config.request_timeout, config.concurrency) as self._client:
                    await self._work()
            finally:
                for task in background:
                    task.cancel()
                await asyncio.gather(*background, return_exceptions=True)
                self._writer.close()
                dumps.remove(config.dump_dir, config.rid_stem)
                dumps.remove_spares(config.dump_dir)

    def _stop(self, why: str = "") -> None:
        say(f"stopping: {why}what is in flight is finished")
        self.stopping = True

    async def _watch_clock(self) -> None:
        """Stop at `until`, also while the server is away and nothing can be begun."""
        while (left := self.config.until_time - time.time()) > 0:
            await asyncio.sleep(min(STATUS_SECONDS, left))
        self._stop(f"it is {self.config.until}; ")

    def _give_up(self, reason: Refusal) -> None:
        if self.fatal is None:
            self.fatal = reason
            say(f"giving up: {reason}")
        self.stopping = True

    async def _work(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        # Twice as many records as requests, so that conversion never leaves the server idle.
        limit = 2 * self.config.concurrency
        while self.order and not self.stopping:
            if len(tasks) >= limit:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                continue
            record = self.order[0]
            if not await self._admit(record):
                continue
            self.order.popleft()
            task = asyncio.get_running_loop().create_task(self._process(record))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if tasks:
            await asyncio.wait(tasks)

    async def _admit(self, record: int) -> bool:
        """Take room for a record's dump and output; waits for it, and returns False where it was not had."""
        config, tokens = self.config, int(self.dataset.lengths[record])
        size = tokens * config.bytes_per_token
        try:
            self._need_space(tokens)
        except ConfigError as error:
            self._give_up(error)
            return False
        if self._in_flight_tokens and self._in_flight_tokens * config.bytes_per_token + size > self._capacity:
            async with self._changed:
                await self._changed.wait()
            return False
        free = free_bytes(config.dump_dir)
        if not self._in_flight_tokens and free < size:
            lack = f"record {record} needs {hs_progress.size(size)} in {config.dump_dir} and {hs_progress.size(free)} are free there"
            self._give_up(ConfigError(f"{lack}; make room, or set the dump directory to a larger file system"))
            return False
        self._in_flight_tokens += tokens
        return True

    async def _process(self, index: int) -> None:
        """Bring one record to its manifest line, or to the list of failures."""
        try:
            record = self.dataset.record(index)
            reason = await self._attempts(record)
            if reason:
                self.progress.failed(index, reason)
                say(f"record {index} ({record.source} line {record.line}) failed: {reason}")
        except ConfigError as error:
            self._give_up(error)
        except OSError as error:
            self._give_up(ConfigError(f"record {index} could not be stored: {error}; mend that and start again"))
        except Exception as error:
            self._give_up(Refusal(f"record {index}: unexpected {error!r}; this is a fault of the extractor"))
        finally:
            self._in_flight_tokens -= int(self.dataset.lengths[index])
            async with self._changed:
                self._changed.notify_all()

    async def _attempts(self, record: Any) -> str:
        """Try until the record is done (returns an empty text), is left for the next start (the same), or failed."""
        config = self.config
        request_failures = dump_failures = attempt = 0
        # A server that is away is no failure: only server_wait ends that.
        while True:
            rid = f"{config.rid_stem}{record.index}-{self.progress.generation}_{attempt}"
            clear = dumps.remove
            self._awaited.add(rid)
            try:
                await self._once(record, rid)
                clear = dumps.give_back
                self._failures_in_a_row = 0
                return ""
            except RecordRefused as error:
                self._away_since = None
                return str(error)
            except ServerAway as error:
                self._server_away(error)
                failures, tries, reason = 0, 1, str(error)
            except RequestFailed as error:
                request_failures += 1
                failures, tries, reason = request_failures, config.retries + 1, str(error)
            except dumps.DumpRejected as error:
                dump_failures += 1
                failures, tries, reason = dump_failures, DUMP_TRIES, str(error)
            finally:
                # Freeing the pages of a large dump takes its time.
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._pool, clear, config.dump_dir, f"{rid}.")
                self._awaited.discard(rid)
            if failures >= tries:
                self._failed_in_a_row(reason)
                return reason
            if self.stopping:
                return ""
            await asyncio.sleep(min(LONGEST_PAUSE, 0.25 * 2 ** min(attempt, 8)))
            if self.stopping:
                return ""
            attempt += 1

    async def _once(self, record: Any, rid: str) -> None:
        async with self._requests:
            await dumps.announce(self.config.dump_dir, rid, record.input_ids, self.config.request_timeout)
            await self._client.prefill(rid, record.input_ids)
            self._away_since = None
        pieces = await dumps.wait_for(self.config.dump_dir, rid, len(record.input_ids), self.config.dump_timeout)
        loop = asyncio.get_running_loop()
        entry = await loop.run_in_executor(self._pool, store.store, self.target, record, rid, pieces)
        durable = loop.create_future()
        self._entries.put_nowait((entry, durable))
        await durable

    def _server_away(self, error: ServerAway) -> None:
        since = self._away_since = self._away_since or time.monotonic()
        if time.monotonic() - since >= self.config.server_wait:
            self._give_up(
                Refusal(
                    f"no server at {self.config.url} for {self.config.server_wait:g} s: {error};"
                    " see the server's log, then run extract.yml again: it goes on where it stopped"
                )
            )

    def _waiting(self) -> str:
        """What the extractor waits for; empty while it works."""
        if self._away_since is None:
            return ""
        seconds = time.monotonic() - self._away_since
        return f"no server at {self.config.url} for {seconds:.0f} s, waiting up to {self.config.server_wait:g} s for it"

    def _failed_in_a_row(self, reason: str) -> None:
        self._failures_in_a_row += 1
        limit = max(LEAST_FAILURES_IN_A_ROW, self.config.concurrency)
        if self._failures_in_a_row >= limit:
            self._give_up(Refusal(f"{limit} records in a row failed, the last one so: {reason}"))

    async def _record_entries(self) -> None:
        """Append manifest lines of what is durable, as many at once as there are."""
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._entries.get()]
            while not self._entries.empty():
                batch.append(self._entries.get_nowait())
            if self._manifest_error is None:
                try:
                    await loop.run_in_executor(self._appender, self._writer.append, [entry for entry, _durable in batch])
                except OSError as error:
                    # Half a line may be there: nothing may be appended to it. The next start mends it.
                    manifest = os.path.join(self.config.output_dir, hs_manifest.MANIFEST)
                    self._manifest_error = OSError(error.errno, error.strerror, manifest)
            if self._manifest_error is not None:
                for _entry, durable in batch:
                    durable.set_exception(self._manifest_error)
                continue
            for entry, durable in batch:
                self.progress.finished(entry)
                durable.set_result(None)

    async def _report(self) -> None:
        """Status every second, a log line every ten."""
        logged = time.monotonic()
        while True:
            await asyncio.sleep(STATUS_SECONDS)
            try:
                self.progress.write(message=self._waiting())
            except OSError as error:
                say(f"status.json cannot be written: {error}")
            if time.monotonic() - logged >= LOG_SECONDS:
                logged = time.monotonic()
                say(self.progress.line)
                try:
                    await self._sweep()
                except OSError as error:
                    say(f"dumps that nobody awaits cannot be removed: {error}")

    async def _sweep(self) -> None:
        """Remove what came for requests that were given up, or for nobody: it would take the room of others."""
        config = self.config
        asked = (config.dump_dir, config.rid_prefix, config.rid_stem, self._awaited, config.request_timeout)
        removed = await asyncio.get_running_loop().run_in_executor(self._pool, dumps.sweep, *asked)
        if removed:
            say(f"removed {removed} dumps that came too late, or that nobody awaits")

    def end(self) -> int:
        """Write the last status and return the exit status."""
        status = self.progress.status
        left = status["records_total"] - status["records_done"] - status["failed_total"]
        for failure in status["failed"]:
            record = self.dataset.record(failure["record"])
            failure.update(source=record.source, line=record.line)
        if self.fatal is not None:
            self._last("failed", str(self.fatal))
            return self.fatal.exit_status
        if left:
            self._last("stopped", f"{left:,} records are left; start the extraction again and it goes on")
            return 0
        if status["failed_total"]:
            failed, first = status["failed_total"], status["failed"][0]
            which = f"record {first['record']} ({first['source']} line {first['line']}): {first['reason']}"
            text = f"{failed:,} of {status['records_total']:,} records failed, the first is {which}; the next run tries them again"
            self._last("incomplete", text)
            return 1
        self._last("done", "")
        return 0

    def close(self) -> None:
        """Give the directory back."""
        if self._lock is not None:
            self._lock.close()

    def _last(self, state: str, message: str) -> None:
        self.progress.write_last(state, message)
        say(f"{state}: {self.progress.line}{'; ' + message if message else ''}")


def run_service(config: ExtractConfig) -> int:
    """Extract this host's share; returns the exit status."""
    os.umask(0o077)
    extraction = Extraction(config)
    try:
        try:
            extraction.prepare()
            say(f"run {config.run}: {len(extraction.order):,} records to do; {extraction.progress.line}")
            asyncio.run(extraction.run())
        except OSError as error:
            raise ConfigError(f"{error}; mend that and start again") from error
        return extraction.end()
    except Refusal as error:
        if extraction.progress is not None:
            extraction.progress.write_last("failed", str(error))
        raise
    finally:
        extraction.close()
