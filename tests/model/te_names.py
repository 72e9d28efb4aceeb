"""What Megatron-Core's Transformer Engine modules call the parameters of our models.

The normal suite holds the weight map to these names on a machine without Transformer Engine; `make te-check` holds the
names to the model that is really built of its modules.
"""

import re

from spes_mega.recipe import ModelSection

EXTRA_STATE = "._extra_state"
"""How keys of a state dict end that hold what Transformer Engine notes of its own (for FP8), not weights."""


def te_name(local: str, model: ModelSection) -> str:
    """The name of a parameter in the Transformer Engine model, from the one in the model of local modules.

    A linear layer has the norm of its input built in: attention's always, a feed-forward network's where it is dense
    (a router comes between norm and experts). Layers that normalize outputs have no such norm. Experts have one linear
    layer a group, which numbers its matrices.
    """
    name = local.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
    if (layer := re.match(r"decoder\.layers\.(\d+)\.pre_mlp_layernorm\.", name)) and not model.is_moe_layer(
        int(layer[1])
    ):
        name = name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
    return re.sub(r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight$", r".\2.weight\1", name)
