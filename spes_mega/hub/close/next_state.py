"""The next global state out of the last one and the pushes of a round, streamed so that memory stays bounded."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from spes_mega.hub.close.merge_layer import LayerMerge, Merge
from spes_mega.hub.close.round_average import RoundAverage
from spes_mega.hub.state.round_state import Publisher
from spes_mega.layout.names import expert_of
from spes_mega.layout.storage.rows import row_slices
from spes_mega.outer.merging import Similarity
from spes_mega.recipe import ModelSection

THREADS = 2
"""They work on tensors of their own: most of the time goes to the kernel and to torch, which need no GIL."""


def write_next_state(
    out: Publisher,
    average: RoundAverage,
    model: ModelSection,
    merge: Merge | None,
    check_running: Callable[[], None],
) -> dict[int, Similarity]:
    """Write every tensor of the next state; `check_running` is called between tensors and raises to abandon it.

    Return how alike the experts of each layer were before the merge; nothing without one.
    """

    def write(name: str) -> None:
        check_running()
        _write_tensor(out, average, name)

    mergers = SimpleQueue[LayerMerge]()  # one a thread
    if merge is not None:
        for _ in range(THREADS):
            mergers.put(LayerMerge(out, average, model, merge))

    def merged(layer: int) -> tuple[int, Similarity]:
        check_running()
        merger = mergers.get()
        try:
            return layer, merger.write(layer)
        finally:
            mergers.put(merger)

    layers = [] if merge is None else list(filter(model.is_moe_layer, range(model.num_layers)))
    # No two threads write to one tensor, and each is written as one thread alone would.
    pool = ThreadPoolExecutor(THREADS)
    try:
        list(pool.map(write, [name for name in average.names if merge is None or expert_of(name) is None]))
        return dict(pool.map(merged, layers))
    finally:
        pool.shutdown(cancel_futures=True)


def _write_tensor(out: Publisher, average: RoundAverage, name: str) -> None:
    lossless, changes = average.policy.down(name).lossless, bool(average.contributors(name))
    for start, stop in row_slices(average.shape(name)):
        if lossless:
            out.values(name, start, average.values(name, start, stop, out))
            continue
        before = average.previous.rows(name, start, stop)
        change = average.change(name, start, stop, before, out)
        if changes:
            out.change(name, start, before, change)
        else:
            out.unchanged(name, start, before, change)
