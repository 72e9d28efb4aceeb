"""Windows, their division between nodes and ranks, and their order."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from spes_mega.data.dataset_record import fingerprint
from spes_mega.data.permutation import Permutation
from spes_mega.data.samples import NodeData
from spes_mega.data.token_stream import TokenStream
from spes_mega.errors import DataError
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
            for row in NodeData(recipe, 0, rank, ranks).batch(8 * (step - 1), micro)
        ]
        assert rows == [alone.sample(8 * (step - 1) + i).tolist() for i in range(8)]


def test_a_token_outside_the_vocabulary_names_the_dataset(prefix):
    data = NodeData(recipe_for(prefix, vocab_size=20), 0)
    number = [data.window(i) for i in range(10)].index(5)
    # tokens 20 to 24; documents are tokens 0 to 6, none, 7, and the rest
    fault = r"token 12 of document 3 \(both counted from 0; token 20 of the file\) is 20, but model\.vocab_size 20"
    with pytest.raises(DataError, match=rf"data\.bin: {fault} allows 0 to 19"):
        data.sample(number)
    with pytest.raises(DataError, match=fault):
        data.check_tokens(lambda count: None)


@pytest.mark.parametrize("dtype", [np.int16, np.int32])
@pytest.mark.parametrize("position", [0, 6, 7, 8, 42])
def test_a_negative_token_is_found_and_named(tmp_path, dtype, position):
    tokens = list(range(43))
    tokens[position] = -3
    prefix = write_dataset(tmp_path / "negative", [tokens[:7], [], tokens[7:8], tokens[8:]], dtype)
    document, first = next((d, f) for d, f, end in ((0, 0, 7), (2, 7, 8), (3, 8, 43)) if position < end)
    fault = rf"token {position - first} of document {document} .*; token {position} of the file\) is -3"
    with pytest.raises(DataError, match=fault):
        NodeData(recipe_for(prefix), 0).check_tokens(lambda count: None)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lives=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)), max_size=6)
)
def test_however_often_batch_and_ranks_change_each_sample_comes_once_and_in_order(prefix, lives):
    """A life takes some steps with its own ranks, micro-batch and accumulation, from where the last one ended."""
    done, seen = 0, []
    for ranks, micro_batch, accumulation, steps in lives:
        recipe = recipe_for(prefix, micro_batch_size=micro_batch, grad_accumulation=accumulation)
        for _ in range(steps):
            for rank in range(ranks):
                data = NodeData(recipe, 0, rank, ranks)
                seen += [row.tolist() for micro in range(accumulation) for row in data.batch(done, micro)]
            done += data.samples_per_step
    alone = NodeData(recipe_for(prefix), 0)
    assert seen == [alone.sample(i).tolist() for i in range(done)]


def test_what_tokenize_recorded_is_believed_of_its_own_file_alone(tmp_path):
    prefix = write_dataset(tmp_path / "data", [list(range(43))])
    data = NodeData(recipe_for(prefix, vocab_size=43), 0)
    facts = {"fingerprint": fingerprint(tmp_path / "data.bin"), "smallest_token": 0, "largest_token": 42, "dtype": "x"}

    def tokens_read(text):
        (tmp_path / "data.json").write_text(text)
        counts = []
        data.check_tokens(counts.append)
        return sum(counts)

    assert tokens_read(json.dumps(facts)) == 0
    for change in ({"fingerprint": "0" * 32}, {"largest_token": 43}, {"smallest_token": -1}, {"largest_token": None}):
        assert tokens_read(json.dumps(facts | change)) == 43
    for damaged in ("", "[]", "{", "[" * 100_000):
        assert tokens_read(damaged) == 43


@pytest.mark.parametrize("size", [0, 1, 70_000, (64 << 20) + 1, 80 << 20])
def test_a_fingerprint_knows_size_ends_and_other_text(tmp_path, size):
    path = tmp_path / "x.bin"

    def fingerprint_of(content):
        content.tofile(path)
        return fingerprint(path)

    content, other = (np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8) for seed in (0, 1))
    found = [fingerprint_of(content), fingerprint_of(np.append(content, np.uint8(0)))]
    if size:
        found += [fingerprint_of(other), fingerprint_of(np.append(content[:-1], content[-1] ^ 1))]
    if size > 1:
        found.append(fingerprint_of(np.append(content[0] ^ 1, content[1:])))
    assert len(set(found)) == len(found)
    assert fingerprint_of(content) == found[0]


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


def test_a_file_that_shrinks_while_it_is_read_is_a_data_error(prefix):
    """Under a memory map it is SIGBUS, which leaves no time to save what was trained."""
    code = (
        "import os, sys; from pathlib import Path; from spes_mega.data.token_stream import TokenStream\n"
        "stream = TokenStream(Path(sys.argv[1])); os.truncate(sys.argv[1] + '.bin', 0); stream.read(0, 5)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(prefix)], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "DataError" in ended.stderr
    assert "data.bin: ends at byte 0: was it changed while it was in use?" in ended.stderr


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
    other_text = identity("e", [list(range(1, 10)), list(range(8))])
    assert other_text.index_sha256 == mine.index_sha256
    assert not other_text.is_as_in(mine)
    assert mine.is_as_in(replace(mine, contents=None))  # of an earlier version, which did not record it
    assert not identity("f", documents[::-1]).is_as_in(replace(mine, contents=None))
