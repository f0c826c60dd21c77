# SPDX-License-Identifier: Apache-2.0
"""Takes states from the forward and puts them into the dump directory, in threads of its own."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from queue import SimpleQueue
from typing import Any, Callable

from .budget import MAX_BYTES, Budget, Layout, plan, prefill_tokens
from .copier import make_copier
from .counters import Counters
from .directory import DumpDirectory
from .dumpfile import COUNTERS_NAME, dump_name, encode_error, encode_header, error_name
from .fingerprints import RID_SUFFIX, FingerprintWriter
from .guards import CaptureRefused, NotCapturable
from .ring import Ring, RingFull
from .settings import Settings
from .sheet import Piece, Sheet
from .spool import Spool

logger = logging.getLogger(__name__)

_THREADS = 4
_REPORT_SECONDS = 1.0
_REMEMBERED_FAILURES = 65536
# Work that a hanging disk may leave behind; error markers beyond it are not written.
_MOST_PENDING = 100_000
# Of an error marker on a full file system: dumps under way there may be given up and make room.
_MARKER_TRIES = 50
_MARKER_PAUSE = 0.02
_FULL = (errno.ENOSPC, errno.EDQUOT)


def open_writer(settings: Settings, metadata: Mapping[str, str], width: int, read: Callable[[str], Any]) -> Writer:
    """Open the dump directory and take the memory of the capture; called while the model is built.

    width: of a state. `read` gives server arguments. The dtype is torch's
    default there, which is the model's. Raises CaptureRefused.
    """
    import torch

    layout = Layout(settings.tensor_names(), width, str(torch.get_default_dtype()).partition(".")[2])
    directory = DumpDirectory(settings.directory)
    tokens = prefill_tokens(read)
    budget = plan(os.environ, layout, tokens, directory.usable_bytes(), settings.directory)
    writer = Writer(directory, budget, layout, metadata, read("device"), settings.rid_prefix + RID_SUFFIX)
    logger.info(
        "capture holds %d MiB on the GPU and %d MiB on the host, and up to %d MiB wait in %s; a prefill batch of %d tokens is %d MiB",
        *(size >> 20 for size in (writer.device_bytes, budget.ring, budget.directory)),
        settings.directory,
        tokens,
        budget.batch >> 20,
    )
    return writer


class Writer:
    """From host memory to dump files. `reserve` and what follows on a sheet is called by the forward, in turn.

    Nothing here waits for a disk but the threads; a failure becomes an error marker and a log line.
    """

    def __init__(
        self,
        directory: DumpDirectory,
        budget: Budget,
        layout: Layout,
        metadata: Mapping[str, str],
        device: str | None,
        asked: str = "-",
    ) -> None:
        """`device`: the server argument. `asked`: how rids begin that ask for fingerprints; none begins with a dash."""
        self._directory = directory
        self._asked = asked
        self._fingerprints = FingerprintWriter(directory, rank=0)
        self._layout = layout
        self._metadata = metadata
        self._seconds = budget.wait_seconds
        self._ring = Ring(budget.ring)
        self._memory = memoryview(self._ring.memory)
        self._copier = make_copier(self._ring.memory, device, budget.staging)
        self.device_bytes = self._copier.device_bytes
        self.counters = Counters(
            device_bytes=self.device_bytes,
            ring_bytes=self._ring.size,
            directory_limit=budget.directory,
        )
        self._spool = Spool(directory, budget.directory, budget.wait_seconds, self.counters)
        self._open: Sheet | None = None
        self._failed: OrderedDict[str, None] = OrderedDict()
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._pending = 0
        self._done = threading.Condition()
        self._stop = threading.Event()
        self._report()
        self._threads = [threading.Thread(target=self._work, name=f"hs-capture-{i}", daemon=True) for i in range(_THREADS)]
        self._threads.append(threading.Thread(target=self._keep_house, name="hs-capture-report", daemon=True))
        for thread in self._threads:
            thread.start()

    def reserve(self, pieces: list[Piece]) -> Sheet:
        """Host memory for the pieces of a forward, waiting a bounded time. Raises NotCapturable where there is none."""
        self._drop_open()
        self.counters.add(forwards=1)
        rows = sum(piece.tokens for piece in pieces)
        try:
            block, waited = self._ring.take(self._layout.block_bytes(rows), self._seconds)
        except RingFull as error:
            self._count_wait(error.waited)
            raise NotCapturable(
                f"{rows} tokens found no room in the capture's host memory: {error}",
                "see that the extractor runs and its disk is fast enough" if error.ever else f"raise {MAX_BYTES}, or cut the record",
            ) from error
        self._count_wait(waited)
        with self._done:
            for piece in pieces:
                if piece.start == 0:
                    self._failed.pop(piece.rid, None)
        self._open = Sheet(block, self._copier, self._layout, pieces)
        asked = [piece for piece in pieces if piece.rid.startswith(self._asked)]
        if asked:
            self._open.fingerprints = self._fingerprints.reserve(asked)
        return self._open

    def _count_wait(self, seconds: float) -> None:
        if seconds:
            self.counters.add(ring_waits=1, ring_wait_seconds=seconds)

    def submit(self, sheet: Sheet) -> None:
        """Write the pieces of a sheet whose tensors are all there; never raises."""
        if self._seal(sheet):
            if sheet.fingerprints is not None:
                self._fingerprints.submit(sheet.fingerprints)
            for piece in sheet.pieces:
                self._put(partial(self._write, sheet, piece))

    def drop(self, sheet: Sheet, error: NotCapturable) -> None:
        """Give up all pieces of a sheet, unless it was handed over already; never raises."""
        if self._seal(sheet):
            for piece in sheet.pieces:
                self.fail(piece.rid, error)
                self._put(partial(self._give_up, sheet))

    def _seal(self, sheet: Sheet) -> bool:
        """Close a sheet; False where that was done before, or its block is lost to a broken GPU."""
        if sheet is not self._open:
            return False
        self._open = None
        try:
            sheet.seal()
        except Exception:
            logger.exception("the states of a forward could not be handed over")
            return False
        return True

    def fail(self, rid: str, error: NotCapturable | CaptureRefused) -> None:
        """Leave an error marker for `rid`; never raises."""
        logger.error("hidden states of %s are not dumped: %s", rid, error)
        with self._done:
            self._failed[rid] = None
            if len(self._failed) > _REMEMBERED_FAILURES:
                self._failed.popitem(last=False)
            lost = self._pending > _MOST_PENDING
        self.counters.add(drops=1, markers_lost=lost)
        if not lost:
            self._put(partial(self._mark, rid, error))

    def drain(self, seconds: float | None) -> bool:
        """Wait until nothing is left to write; False where that takes longer than `seconds`."""
        with self._done:
            return self._done.wait_for(lambda: self._pending == 0, seconds)

    def close(self) -> None:
        """Write what is left and end the threads."""
        self._drop_open()
        self.drain(None)
        self._stop.set()
        for _thread in self._threads[:-1]:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._report()
        self._copier.close()

    def _drop_open(self) -> None:
        if self._open is not None:
            self.drop(self._open, NotCapturable("the forward did not come to its end", "read the log of the server on this host"))

    def _put(self, job: Callable[[], None]) -> None:
        with self._done:
            self._pending += 1
        self._queue.put(job)

    def _work(self) -> None:
        self._copier.start_thread()
        while True:
            job = self._queue.get()
            if job is None:
                return
            try:
                job()
            except Exception:
                logger.exception("a dump could not be written")
            with self._done:
                self._pending -= 1
                if self._pending == 0:
                    self._done.notify_all()

    def _write(self, sheet: Sheet, piece: Piece) -> None:
        try:
            sheet.wait()
            with self._done:
                if piece.rid in self._failed:
                    return
            layout = self._layout
            header = encode_header(piece.rid, piece.start, piece.tokens, layout.names, layout.width, layout.dtype, self._metadata)
            size = self._spool.publish(dump_name(piece.rid, piece.start), [header, *sheet.parts(piece, self._memory)])
            self.counters.add(requests=piece.start == 0, pieces=1, tokens=piece.tokens, bytes=size)
        except (NotCapturable, CaptureRefused) as error:
            self.fail(piece.rid, error)
        except Exception as error:
            remedy = f"make room in {self._directory.path}" if _is_full(error) else "read the log of the server on this host"
            self.fail(piece.rid, NotCapturable(f"the dump could not be written: {error}", remedy))
        finally:
            self._release(sheet)

    def _give_up(self, sheet: Sheet) -> None:
        try:
            sheet.wait()
        finally:
            self._release(sheet)

    def _release(self, sheet: Sheet) -> None:
        if sheet.finished():
            self._ring.give(sheet.block)

    def _mark(self, rid: str, error: NotCapturable | CaptureRefused, tries: int = _MARKER_TRIES) -> None:
        content = encode_error(error.reason, error.remedy)
        try:
            try:
                self._directory.put(error_name(rid), content, self._directory.handle())
            except NotCapturable:
                # The directory was made anew just now.
                self._directory.put(error_name(rid), content, self._directory.handle())
        except Exception as failure:
            if _is_full(failure) and tries > 1:
                time.sleep(_MARKER_PAUSE)
                self._put(partial(self._mark, rid, error, tries - 1))
                return
            self.counters.add(markers_lost=1)
            logger.error("the error marker of %s could not be written: %s", rid, failure)

    def _keep_house(self) -> None:
        complained = False
        while not self._stop.wait(_REPORT_SECONDS):
            try:
                self._report()
                complained = False
            except Exception as error:
                if not complained:
                    logger.warning("%s could not be written: %s", COUNTERS_NAME, error)
                complained = True

    def _report(self) -> None:
        """Write the counters; whoever waits for a dump sees by `updated`, `queue` and `open` that none will come."""
        handle = self._directory.current()
        if handle is None:
            return
        waiting = self._spool.tidy(handle)
        # The time before the queue: what was submitted by then is in it, or was written.
        updated = round(time.time(), 3)
        # Of the forward under way, or of one that ended without passing the final norm: that shows in the next one only.
        sheet = self._open
        content = self.counters.report(
            updated=updated,
            queue=self._pending,
            open=[piece.rid for piece in sheet.pieces] if sheet is not None else [],
            ring_used=self._ring.used(),
            directory_bytes=waiting,
        )
        self._directory.put(COUNTERS_NAME, content, handle)


def _is_full(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in _FULL
