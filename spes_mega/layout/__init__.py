"""A checkpoint at rest: canonical names, families, config.json, and sharded safetensors read and written in parts."""

from spes_mega.layout.families.catalog import FAMILIES, MOE_OF, family_of
from spes_mega.layout.families.config_json import differences, make_config, parse_config
from spes_mega.layout.families.family import Family
from spes_mega.layout.initialize import generator, initial_tensor
from spes_mega.layout.names import (
    EMBEDDING,
    EXPERT_MATRICES,
    FINAL_NORM,
    OUTPUT_HEAD,
    ExpertKey,
    dense_name,
    expected_tensors,
    expert_name,
    expert_of,
    router_name,
    shared_expert_gate_name,
    shared_expert_name,
)
from spes_mega.layout.reader import Checkpoint, open_checkpoint
from spes_mega.layout.storage.safetensors_format import Header, TensorSpec, header_length, pack_header, parse_header
from spes_mega.layout.storage.tensor_bytes import bytes_of, read_tensor, write_tensor
from spes_mega.layout.writer import CheckpointWriter

__all__ = [
    "EMBEDDING",
    "EXPERT_MATRICES",
    "FAMILIES",
    "FINAL_NORM",
    "MOE_OF",
    "OUTPUT_HEAD",
    "Checkpoint",
    "CheckpointWriter",
    "ExpertKey",
    "Family",
    "Header",
    "TensorSpec",
    "bytes_of",
    "dense_name",
    "differences",
    "expected_tensors",
    "expert_name",
    "expert_of",
    "family_of",
    "generator",
    "header_length",
    "initial_tensor",
    "make_config",
    "open_checkpoint",
    "pack_header",
    "parse_config",
    "parse_header",
    "read_tensor",
    "router_name",
    "shared_expert_gate_name",
    "shared_expert_name",
    "write_tensor",
]
