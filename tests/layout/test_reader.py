import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from spes_mega.errors import CheckpointError
from spes_mega.layout import EMBEDDING, OUTPUT_HEAD, open_checkpoint

INDEX = "model.safetensors.index.json"


def assert_equal(path, tensors, config=None):
    with open_checkpoint(path, config) as checkpoint:
        assert checkpoint.names == tuple(tensors)
        for name, tensor in tensors.items():
            read = checkpoint.read(name)
            assert read.dtype == tensor.dtype == checkpoint.dtype(name)
            assert torch.equal(read, tensor), name


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_file_and_shards_read_the_same(section, make_checkpoint, family, dtype):
    model = section(family)
    one, tensors = make_checkpoint(model, "one", dtype)
    shards, _ = make_checkpoint(model, "shards", dtype, max_shard_bytes=9_000)
    assert len(list(shards.glob("*.safetensors"))) > 2
    assert_equal(one, tensors)
    assert_equal(shards, tensors)


def test_rows(section, make_checkpoint):
    path, tensors = make_checkpoint(section("llama"))
    with open_checkpoint(path) as checkpoint:
        assert torch.equal(checkpoint.read_rows(EMBEDDING, 5, 9), tensors[EMBEDDING][5:9])
        assert checkpoint.read_rows(EMBEDDING, 4, 4).shape == (0, 32)
        with pytest.raises(ValueError, match=r"has no rows 100..104"):
            checkpoint.read_rows(EMBEDDING, 100, 104)


def on_disk(path):
    return load_file(path / "model.safetensors")


def test_a_file_with_config_beside_it_or_given(section, make_checkpoint, tmp_path):
    path, tensors = make_checkpoint(section("llama"))
    assert_equal(path / "model.safetensors", tensors)
    other = tmp_path / "moved.safetensors"
    (path / "model.safetensors").rename(other)
    assert_equal(other, tensors, path / "config.json")
    with pytest.raises(CheckpointError, match=r"config.json: cannot read.*--config"):
        open_checkpoint(other)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("nested", [None, "state_dict", "model"])
def test_torch_files(section, make_checkpoint, tmp_path, legacy, nested):
    path, tensors = make_checkpoint(section("llama", tie_embeddings=True))
    state = on_disk(path)
    state[OUTPUT_HEAD] = state[EMBEDDING]  # tied weights share one storage in a torch file
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = state[name].t().contiguous().t()  # other strides than usual
    state["model.norm.weight"] = torch.cat([torch.zeros(3), state["model.norm.weight"]])[3:]
    torch.save(
        {nested: state, "step": 3} if nested else state, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy
    )
    assert_equal(tmp_path / "a.pt", tensors, path / "config.json")


def test_a_directory_with_torch_shards(section, make_checkpoint):
    path, tensors = make_checkpoint(section("llama"))
    state = on_disk(path)
    (path / "model.safetensors").unlink()
    names = sorted(state)
    files = {"pytorch_model-1.bin": names[:7], "pytorch_model-2.bin": names[7:]}
    for file, part in files.items():
        torch.save({name: state[name].clone() for name in part}, path / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_equal(path, tensors)


class Malicious:
    def __reduce__(self):
        return (print, ("unpickled",))


@pytest.mark.parametrize("content", [Malicious(), {"a": Malicious()}, {"a": 3}, [torch.ones(2)], {}])
def test_torch_files_with_more_than_tensors_are_refused(section, make_checkpoint, capsys, content):
    path, _ = make_checkpoint(section("llama"))
    torch.save(content, path / "a.pt")
    with pytest.raises(CheckpointError, match=r"a\.pt: "):
        open_checkpoint(path / "a.pt")
    assert "unpickled" not in capsys.readouterr().out


@pytest.mark.parametrize("keys", [("state_dict", "model"), ("model", "module")])
def test_a_torch_file_with_two_models_is_refused(section, make_checkpoint, keys):
    path, _ = make_checkpoint(section("llama"))
    state = on_disk(path)
    torch.save({keys[0]: state, keys[1]: {name: 2 * tensor for name, tensor in state.items()}}, path / "a.pt")
    with pytest.raises(CheckpointError, match=rf"a\.pt: holds tensors under {keys[0]} and {keys[1]}: save"):
        open_checkpoint(path / "a.pt")


@pytest.mark.parametrize("keep", [0, 4, 100, 2_000, -1])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_truncated_files(section, make_checkpoint, keep, suffix):
    path, _ = make_checkpoint(section("llama"))
    file = path / ("a" + suffix)
    save_file(on_disk(path), file) if suffix == ".safetensors" else torch.save(on_disk(path), file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=rf"a\{suffix}: "):
        open_checkpoint(file)


def test_bytes_too_many(section, make_checkpoint):
    path, _ = make_checkpoint(section("llama"))
    with (path / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match=r"model.safetensors: damaged"):
        open_checkpoint(path)


def test_wrong_names_shapes_and_dtypes(section, make_checkpoint):
    path, _ = make_checkpoint(section("llama"))
    state, file = on_disk(path), path / "model.safetensors"
    norm, up = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
    without = {name: tensor for name, tensor in state.items() if name not in (norm, up)}
    cases = [
        (without | {norm: state[norm]}, f"missing tensor: {up}$"),
        (state | {"extra.weight": torch.ones(1)}, "unexpected tensor: extra.weight$"),
        (without | {"x": torch.ones(1)}, f"missing tensors: {up}, {norm}; unexpected tensor: x"),
        (state | {up: state[up].t().contiguous()}, rf"{up}: shape \[32, 48\], but config.json asks for \[48, 32\]"),
        (state | {up: state[up].double()}, f"{up}: dtype torch.float64"),
    ]
    for tensors, said in cases:
        save_file(tensors, file)
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint(path)


def test_stacked_experts_are_not_taken_for_single_ones(section, make_checkpoint):
    path, _ = make_checkpoint(section("qwen3_moe"))
    state = on_disk(path)
    stacked = torch.stack([state.pop(f"model.layers.0.mlp.experts.{e}.down_proj.weight") for e in range(4)])
    save_file(state | {"model.layers.0.mlp.experts.down_proj": stacked}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing .*experts.0.down_proj.* unexpected .*mlp.experts.down_proj"):
        open_checkpoint(path)


def test_a_mixtral_directory_with_canonical_names_is_refused(section, make_checkpoint):
    path, tensors = make_checkpoint(section("mixtral"))
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected tensors: .*mlp.experts"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["inv_freq", "cos_cached", "sin_cached", "original_inv_freq"])
@pytest.mark.parametrize("module", ["model.layers.0.self_attn.rotary_emb", "model.rotary_emb"])
def test_old_rotary_buffers_are_no_weights_and_it_is_said(section, make_checkpoint, name, module):
    path, tensors = make_checkpoint(section("llama"))
    save_file(on_disk(path) | {f"{module}.{name}": torch.ones(8)}, path / "model.safetensors")
    assert_equal(path, tensors)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.left_out == (f"{module}.{name}",)
        assert checkpoint.left_out_line() == (
            f"left out 1 buffers that follow from config.json, such as {module}.{name}"
        )


def test_a_buffer_that_nobody_knows_is_refused(section, make_checkpoint):
    path, _ = make_checkpoint(section("llama"))
    save_file(on_disk(path) | {"model.layers.0.self_attn.rotary_emb.scale": torch.ones(8)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected tensor: .*rotary_emb\.scale"):
        open_checkpoint(path)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 1234\n"


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", INDEX, "pytorch_model.bin"])
def test_a_git_lfs_pointer_is_named(section, make_checkpoint, file):
    path, _ = make_checkpoint(section("llama"))
    if file != "config.json":
        (path / "model.safetensors").unlink()
    (path / file).write_text(POINTER)
    with pytest.raises(CheckpointError, match=rf"{file}: is a Git LFS pointer, .*git lfs pull"):
        open_checkpoint(path)


def test_a_git_lfs_pointer_among_companions_is_named(section, make_checkpoint, tmp_path):
    path, _ = make_checkpoint(section("llama"))
    (path / "tokenizer.json").write_text(POINTER)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is a Git LFS pointer"):
        make_checkpoint(section("llama"), "other", copy_from=path)
    assert not (tmp_path / "other").exists()


def test_tied_embeddings(section, make_checkpoint):
    path, tensors = make_checkpoint(section("qwen3", tie_embeddings=True))
    assert OUTPUT_HEAD not in tensors
    assert_equal(path, tensors)
    state = on_disk(path)
    save_file(state | {OUTPUT_HEAD: state[EMBEDDING].clone()}, path / "model.safetensors")
    assert_equal(path, tensors)
    save_file(state | {OUTPUT_HEAD: state[EMBEDDING] + 1}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        open_checkpoint(path)


def test_an_untied_model_needs_its_output_head(section, make_checkpoint):
    path, _ = make_checkpoint(section("qwen3"))
    state = on_disk(path)
    del state[OUTPUT_HEAD]
    save_file(state, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing tensor: lm_head.weight"):
        open_checkpoint(path)


def test_a_shard_that_is_missing(section, make_checkpoint):
    path, _ = make_checkpoint(section("llama"), max_shard_bytes=9_000)
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name}: this shard is missing"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda raw: raw.pop("weight_map"), "weight_map was expected"),
        (lambda raw: raw["weight_map"].update({EMBEDDING: "../model.safetensors"}), "is not a plain file name"),
        (lambda raw: raw["weight_map"].update({"ghost": raw["weight_map"][EMBEDDING]}), "ghost is not in model-00001"),
    ],
)
def test_an_index_that_lies(section, make_checkpoint, edit, said):
    path, _ = make_checkpoint(section("llama"), max_shard_bytes=9_000)
    raw = json.loads((path / INDEX).read_text())
    edit(raw)
    (path / INDEX).write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(path)


def test_places_without_a_checkpoint(section, make_checkpoint, tmp_path):
    path, _ = make_checkpoint(section("llama"))
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "empty").mkdir()
    cases = [
        (tmp_path / "nowhere", "no such file or directory"),
        (tmp_path / "a.gguf", "not a checkpoint"),
        (tmp_path / "empty", "no weights"),
    ]
    for src, said in cases:
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint(src)
    (path / "model.safetensors").rename(path / "a.safetensors")
    (path / "b.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    with pytest.raises(CheckpointError, match=r"several safetensors files .* but no index"):
        open_checkpoint(path)
    (path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json:1: not valid JSON"):
        open_checkpoint(path / "a.safetensors")
