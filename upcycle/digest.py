"""A fingerprint of a checkpoint's weights that does not depend on how its files are cut."""

from __future__ import annotations

import hashlib

import torch

from spes_mega.layout import bytes_of


class TensorDigest:
    """SHA-256 over one line for each tensor, in canonical order: name, dtype, shape, SHA-256 of its bytes.

    Tensors may come in any order, and each in parts, first rows first. Only tensors that have begun and not ended take
    more than their digest's memory.
    """

    def __init__(self) -> None:
        self._lines: dict[str, str] = {}
        self._begun: dict[str, tuple[int, hashlib._Hash]] = {}

    def add(self, name: str, shape: tuple[int, ...], rows: torch.Tensor) -> None:
        """The next rows of a tensor of this whole shape."""
        done, running = self._begun.pop(name, (0, hashlib.sha256()))
        running.update(bytes_of(rows.contiguous()))
        done += rows.shape[0]
        if done < shape[0]:
            self._begun[name] = done, running
        else:
            dtype = str(rows.dtype).removeprefix("torch.")
            self._lines[name] = f"{name} {dtype} {list(shape)} {running.hexdigest()}\n"

    def hexdigest(self, names: tuple[str, ...]) -> str:
        """Of the tensors `names`, which are all of the checkpoint, in canonical order."""
        return hashlib.sha256("".join(self._lines[name] for name in names).encode()).hexdigest()


PLACEHOLDER = "0" * hashlib.sha256().digest_size * 2
"""As long as a digest, for headers that are laid out before the digest is known."""
