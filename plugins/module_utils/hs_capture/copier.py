# SPDX-License-Identifier: Apache-2.0
"""Copies states to host memory: at once on the CPU, beside the computation on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .guards import CaptureRefused

if TYPE_CHECKING:
    import torch

# Large enough for the copy engine's full rate, small enough to be in use again soon.
_SLOT_BYTES = 64 << 20


class DirectCopier:
    """For devices without streams: a copy has ended when `copy` returns."""

    device_bytes = 0

    def __init__(self, memory: Any) -> None:
        import torch

        self.host = torch.frombuffer(memory, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` into `target`, of the same shape, in host memory."""
        target.copy_(source)

    def mark(self) -> Any:
        """What :meth:`wait` takes: all copies so far."""
        return None

    def wait(self, mark: Any) -> None:
        """Return when the copies before `mark` have ended."""

    def start_thread(self) -> None:
        """Called once by each thread that waits."""

    def close(self) -> None:
        """Let go of the host memory."""
        self.host = None


class _Slot:
    """GPU memory of one copy under way."""

    def __init__(self, device: torch.device, size: int) -> None:
        import torch

        self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self.filled = torch.cuda.Event()
        self.emptied = torch.cuda.Event()


class StagedCopier:
    """For CUDA: a clone on the GPU in the model's stream, and from there to pinned memory in a stream of its own.

    SGLang may overwrite the source as soon as the clone is made, which takes a
    hundredth of the copy over the bus. Clones live in slots of fixed size made
    here; the model's stream waits, on the GPU, for a slot that is not yet copied.
    """

    def __init__(self, memory: Any, device: torch.device, staging: int) -> None:
        """Pin `memory` and take `staging` bytes, rounded up to slots, on `device`. Raises CaptureRefused."""
        import torch

        self._device = device
        self.host = torch.frombuffer(memory, dtype=torch.uint8)
        # torch's own pinned memory is rounded up to a power of two.
        result = torch.cuda.cudart().cudaHostRegister(self.host.data_ptr(), self.host.numel(), 0)
        if int(result) != 0:
            raise CaptureRefused(
                f"{self.host.numel()} bytes of host memory cannot be pinned ({result})",
                "lower SGLANG_HS_DUMP_MAX_BYTES, or raise the limit of locked memory",
            )
        size = min(staging, _SLOT_BYTES)
        try:
            self._slots = [_Slot(device, size) for _number in range(-(-staging // size))]
        except RuntimeError as error:
            raise CaptureRefused(f"{staging} bytes are not to be had on the GPU ({error})", "lower --max-prefill-tokens") from error
        self.device_bytes = size * len(self._slots)
        self._turn = 0
        self._stream = torch.cuda.Stream(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` into `target`, of the same shape, in host memory; the source may be overwritten after this in its stream."""
        import torch

        main = torch.cuda.current_stream(self._device)
        rows_at_once = self._slots[0].bytes.numel() * len(target) // max(1, target.numel() * target.element_size())
        for first in range(0, len(target), rows_at_once):
            into = target[first : first + rows_at_once]
            slot = self._slots[self._turn]
            self._turn = (self._turn + 1) % len(self._slots)
            staged = slot.bytes[: into.numel() * into.element_size()].view(into.dtype).view(into.shape)
            main.wait_event(slot.emptied)
            staged.copy_(source[first : first + rows_at_once])
            slot.filled.record(main)
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(slot.filled)
                into.copy_(staged, non_blocking=True)
                slot.emptied.record(self._stream)

    def mark(self) -> Any:
        """What :meth:`wait` takes: all copies so far."""
        import torch

        # Blocking: a thread that waits sleeps, and does not hold the GIL.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def wait(self, mark: Any) -> None:
        """Return when the copies before `mark` have ended."""
        mark.synchronize()

    def start_thread(self) -> None:
        """Called once by each thread that waits; without it, CUDA would open a context on the first GPU too."""
        import torch

        torch.cuda.set_device(self._device)

    def close(self) -> None:
        """Let go of the host memory."""
        import torch

        self._stream.synchronize()
        torch.cuda.cudart().cudaHostUnregister(self.host.data_ptr())
        self.host = None


def make_copier(memory: Any, device: str | None, staging: int) -> DirectCopier | StagedCopier:
    """The copier for a server whose argument ``device`` is `device`, into the buffer `memory`."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return DirectCopier(memory)
    return StagedCopier(memory, torch.device("cuda", torch.cuda.current_device()), staging)
