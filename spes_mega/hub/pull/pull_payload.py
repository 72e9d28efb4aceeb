"""The bytes of a pull, and the file that each of them comes from."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from spes_mega.hub.pull.contents import Part
from spes_mega.hub.state.round_state import Published
from spes_mega.layout.storage.rows import row_slices
from spes_mega.layout.storage.safetensors_format import byte_count
from spes_mega.layout.storage.tensor_bytes import bytes_of
from spes_mega.outer.codecs import FP32
from spes_mega.wire.frames import Piece
from spes_mega.wire.policy import WirePolicy, merge_name
from spes_mega.wire.tensor_specs import Form, data_bytes, payload_header

_CHANGES = (Part.DELTA, Part.MERGE)


class PullPayload:
    """One payload for a node, made from the files of a state while it is read."""

    def __init__(self, state: Published, parts: Mapping[str, Part], policy: WirePolicy) -> None:
        self._state = state
        self._parts = {name: parts[name] for name in state.names if name in parts}
        forms = {
            name: Form(state.shape(name), policy.down(name) if part in _CHANGES else FP32)
            for name, part in self._parts.items()
        }
        self.header = payload_header(forms)
        self.total_bytes = len(self.header) + data_bytes(forms)

    def pieces(self, at_once: int) -> Iterator[Piece]:
        """All bytes in order, in pieces of at most `at_once` bytes (or one row)."""
        yield Piece(len(self.header), lambda: self.header)
        for name, part in self._parts.items():
            if part in _CHANGES:
                yield from self._change(merge_name(name) if part is Part.MERGE else name, at_once)
                continue
            read = self._state.exact if part is Part.EXACT else self._state.rows
            shape = self._state.shape(name)
            for start, stop in row_slices(shape, budget=at_once * 2 // 3):  # at most half more
                size = byte_count(torch.float32, (stop - start, *shape[1:]))
                yield Piece(size, partial(_bytes, read, name, start, stop))

    def _change(self, name: str, at_once: int) -> Iterator[Piece]:
        delta = self._state.delta
        assert delta is not None, "a state that is published with loss has its delta beside it"
        for begin, length in delta.raw(name):
            for done in range(0, length, at_once):
                count = min(at_once, length - done)
                yield Piece(count, partial(delta.read_bytes, begin + done, count))


def _bytes(read: Callable[[str, int, int], Tensor], name: str, start: int, stop: int) -> memoryview:
    return bytes_of(read(name, start, stop))
