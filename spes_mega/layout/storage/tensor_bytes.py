"""Tensors to and from bytes of open files, by pread and pwrite: no mapping, no copy of more than one tensor."""

import errno
import os

import torch

from spes_mega.errors import CheckpointError, NoSpaceError

# Linux moves at most 2 GiB - 4 KiB in one call.
_MAX_CALL_BYTES = 1 << 30
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""What the system says when there is no room for a file."""


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable and without a copy."""
    if tensor.dtype is torch.bfloat16:  # numpy does not know it
        tensor = tensor.view(torch.int16)
    assert tensor.is_contiguous(), "a copy would take what is written"
    view = tensor.detach().numpy().data
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def read_tensor(fd: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...], source: str) -> torch.Tensor:
    """Read a contiguous tensor at a byte offset. Raises CheckpointError naming `source` on a short read."""
    tensor = torch.empty(shape, dtype=dtype)
    view = bytes_of(tensor)
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done : done + _MAX_CALL_BYTES]], offset + done)
        except OSError as e:
            raise CheckpointError(f"{source}: cannot read: {e.strerror}") from e
        if not count:
            raise CheckpointError(f"{source}: truncated: ends {len(view) - done} bytes before a tensor does")
        done += count
    return tensor


def write_tensor(fd: int, offset: int, tensor: torch.Tensor, target: str) -> None:
    """Write a contiguous CPU tensor at a byte offset. Raises CheckpointError naming `target`; on a full disk, its
    subclass NoSpaceError."""
    view = bytes_of(tensor)
    done = 0
    while done < len(view):
        try:
            done += os.pwrite(fd, view[done : done + _MAX_CALL_BYTES], offset + done)
        except OSError as e:
            raise write_error(target, e) from e


def write_error(target: object, error: OSError) -> CheckpointError:
    """What to raise when `target` cannot be written."""
    kind = NoSpaceError if error.errno in NO_SPACE else CheckpointError
    return kind(f"{target}: cannot write: {error.strerror}")
