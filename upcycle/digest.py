"""A fingerprint of a checkpoint's weights that does not depend on how its files are cut."""

import hashlib

import torch

from spes_mega.layout import bytes_of


class TensorDigest:
    """SHA-256 over one line for each tensor, in canonical order: name, dtype, shape, SHA-256 of its bytes.

    Tensors may come in any order, and each in parts, first rows first.
    """

    def __init__(self) -> None:
        self._heads: dict[str, str] = {}
        self._hashes: dict[str, hashlib._Hash] = {}

    def add(self, name: str, shape: tuple[int, ...], rows: torch.Tensor) -> None:
        """The next rows of a tensor of this whole shape."""
        if name not in self._hashes:
            self._heads[name] = f"{name} {str(rows.dtype).removeprefix('torch.')} {list(shape)}"
            self._hashes[name] = hashlib.sha256()
        self._hashes[name].update(bytes_of(rows.contiguous()))

    def hexdigest(self, names: tuple[str, ...]) -> str:
        """Of the tensors `names`, which are all of the checkpoint, in canonical order."""
        total = hashlib.sha256()
        for name in names:
            total.update(f"{self._heads[name]} {self._hashes[name].hexdigest()}\n".encode())
        return total.hexdigest()


PLACEHOLDER = "0" * hashlib.sha256().digest_size * 2
"""As long as a digest, for headers that are laid out before the digest is known."""
