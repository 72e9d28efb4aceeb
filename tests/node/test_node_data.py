"""Windows, their division between nodes and ranks, and their order."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from spes_mega.errors import DataError
from spes_mega.layout.token_stream import TokenStream
from spes_mega.node.data import NodeData
from spes_mega.node.permutation import Permutation
from spes_mega.recipe import Recipe

SEQ_LEN = 4


def write_dataset(prefix, documents, dtype=np.uint16):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def recipe_for(prefix, *, nodes=1, sharding="shared", vocab_size=1000, **train):
    model = {"family": "llama", "num_layers": 1, "hidden_size": 8, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8}
    return Recipe.model_validate(
        {
            "model": model | {"ffn_hidden_size": 8, "vocab_size": vocab_size},
            "spes": {"num_nodes": nodes},
            "train": {"seq_len": SEQ_LEN} | train,
            "data": {"train": prefix, "sharding": sharding},
        }
    )


@pytest.fixture
def prefix(tmp_path):
    """10 windows of 4 + 1 tokens and two tokens over, in documents of uneven length."""
    tokens = list(range(43))
    return write_dataset(tmp_path / "data", [tokens[:7], [], tokens[7:8], tokens[8:]])


@given(st.integers(1, 700), st.text())
def test_a_permutation_takes_everything_once(size, key):
    order = Permutation(size, key)
    assert sorted(order[i] for i in range(size)) == list(range(size))


def test_a_permutation_depends_on_its_key_and_looks_shuffled():
    first, second = ([Permutation(1000, key)[i] for i in range(1000)] for key in ("a", "b"))
    assert first != second
    # the correlation of two random orders of 1000 has standard deviation 1/sqrt(1000)
    assert abs(np.corrcoef(first, range(1000))[0, 1]) < 4 / np.sqrt(1000)
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / np.sqrt(1000)
    with pytest.raises(IndexError):
        Permutation(1000, "a")[1000]


def test_an_epoch_takes_every_window_once_across_documents(prefix):
    data = NodeData(recipe_for(prefix), 0)
    samples = sorted(data.sample(i).tolist() for i in range(10))
    assert samples == [list(range(4 * w, 4 * w + 5)) for w in range(10)]
    assert data.sample(0).dtype == np.int64


def test_the_second_epoch_has_another_order_and_can_be_entered_anywhere(prefix):
    data = NodeData(recipe_for(prefix), 0)
    order = [data.window(i) for i in range(20)]
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10] != order[10:]
    resumed = NodeData(recipe_for(prefix), 0)
    assert [resumed.window(i) for i in range(13, 20)] == order[13:]


def test_another_seed_is_another_order(prefix):
    orders = [[NodeData(recipe_for(prefix, seed=seed), 0).window(i) for i in range(10)] for seed in (1, 2)]
    assert orders[0] != orders[1]


def test_nodes_share_a_file_without_overlap(prefix):
    nodes = [NodeData(recipe_for(prefix, nodes=3), node) for node in range(3)]
    assert [data.num_windows for data in nodes] == [4, 3, 3]
    parts = [{data.window(i) for i in range(data.num_windows)} for data in nodes]
    assert parts == [{0, 3, 6, 9}, {1, 4, 7}, {2, 5, 8}]


def test_own_data_is_the_same_for_every_node(prefix):
    nodes = [NodeData(recipe_for(prefix, nodes=2, sharding="own"), node) for node in range(2)]
    alone = NodeData(recipe_for(prefix), 0)
    for data in nodes:
        assert [data.window(i) for i in range(20)] == [alone.window(i) for i in range(20)]


@pytest.mark.parametrize(("ranks", "micro_batch", "accumulation"), [(1, 8, 1), (1, 1, 8), (2, 2, 2), (4, 1, 2)])
def test_a_step_takes_the_same_samples_however_it_is_divided(prefix, ranks, micro_batch, accumulation):
    recipe = recipe_for(prefix, micro_batch_size=micro_batch, grad_accumulation=accumulation)
    alone = NodeData(recipe_for(prefix), 0)
    for step in (1, 2, 3):
        rows = [
            row.tolist()
            for rank in range(ranks)
            for micro in range(accumulation)
            for row in NodeData(recipe, 0, rank, ranks).batch(step, micro)
        ]
        assert rows == [alone.sample(8 * (step - 1) + i).tolist() for i in range(8)]


def test_a_token_outside_the_vocabulary_names_the_dataset(prefix):
    data = NodeData(recipe_for(prefix, vocab_size=20), 0)
    number = [data.window(i) for i in range(10)].index(5)
    with pytest.raises(DataError, match=r"data: token id 24 is outside model\.vocab_size 20"):
        data.sample(number)


def test_too_little_data_for_a_node_is_an_error(tmp_path):
    write_dataset(tmp_path / "small", [[1, 2, 3], [4, 5]])
    NodeData(recipe_for(tmp_path / "small", nodes=2), 0)
    with pytest.raises(DataError, match=r"5 tokens make 1 windows .* none of them for node 1"):
        NodeData(recipe_for(tmp_path / "small", nodes=2), 1)


def test_a_dataset_that_is_missing_damaged_or_unnamed(tmp_path, prefix):
    with pytest.raises(DataError, match=r"none\.idx: no such file"):
        TokenStream(tmp_path / "none")
    with pytest.raises(DataError, match="no training data: give --data PREFIX"):
        NodeData(recipe_for(None), 0)
    with (tmp_path / "data.bin").open("ab") as stream:
        stream.write(b"xx")
    with pytest.raises(DataError, match="88 bytes, but its index speaks of 43 tokens of 2 bytes"):
        TokenStream(prefix)
    (tmp_path / "data.idx").write_bytes(json.dumps({}).encode())
    with pytest.raises(DataError, match=r"data\.idx: not the index"):
        TokenStream(prefix)


def test_a_dataset_is_known_wherever_it_lies_and_others_are_not(tmp_path):
    documents = [list(range(9)), list(range(8))]

    def identity(folder, documents, **options):
        (tmp_path / folder).mkdir()
        return NodeData(recipe_for(write_dataset(tmp_path / folder / "d", documents), **options), 0).identity()

    mine = identity("a", documents)
    assert mine.num_tokens == 17
    assert identity("b", documents) == mine
    assert identity("c", documents[::-1]) != mine
    assert identity("d", documents, sharding="own") != mine
