"""The train section: what every node does between two synchronizations."""

from typing import Literal, Self

from pydantic import Field, model_validator

from spes_mega.errors import RecipeError
from spes_mega.recipe.section import LOCAL, Beta, Positive, Section, Share


class TrainSection(Section):
    """What every node does between two synchronizations."""

    steps: Positive = Field(default=1000, description="optimizer steps in all")
    seq_len: Positive = Field(default=2048, description="tokens of one sample")
    batch_size: Positive | None = Field(
        default=None,
        json_schema_extra=LOCAL,
        description="samples of one optimizer step of a node, over all its ranks; default: ranks x micro_batch_size x "
        "grad_accumulation",
    )
    micro_batch_size: Positive = Field(default=1, json_schema_extra=LOCAL, description="samples a rank a forward pass")
    grad_accumulation: Positive | None = Field(
        default=None,
        json_schema_extra=LOCAL,
        description="forward passes a step; default: what batch_size needs, else 1",
    )
    lr: float = Field(default=5e-4, ge=0, description="peak learning rate")
    min_lr_ratio: Share = Field(default=0.1, description="final learning rate as a fraction of lr")
    warmup_steps: int = Field(default=0, ge=0)
    warmup_from: Share = Field(
        default=0.0, description="learning rate at step 0 as a fraction of lr, from which it rises linearly to lr"
    )
    adam_beta1: Beta = 0.9
    adam_beta2: Beta = 0.95
    adam_eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0, description="on matrices, embeddings among them")
    decay_norms: bool = Field(default=False, description="weight decay on norms and biases, too")
    clip_grad: float = Field(default=1.0, ge=0, description="largest norm of the gradient; 0: no clipping")
    aux_loss_coeff: float = Field(
        default=0.01,
        ge=0,
        description="weight of the load-balancing loss, which is the mean over MoE layers. It is computed for each "
        "micro-batch and rank, and is not linear in the batch: 2 ranks differ from 1 of twice the micro-batch, by 2e-4 "
        "where that was compared",
    )
    aux_loss_warmup: Share = Field(
        default=0.0,
        description="fraction of the steps over which the load-balancing loss's weight on the experts that a node owns "
        "rises linearly from 0.7 to 1, so that its router leans towards them early on (aux_loss in the metrics is what "
        "is weighed so); the reference's using_decayed_aux_loss is 0.2, and off in its published configs; 0: off",
    )
    router_z_loss_coeff: float = Field(
        default=1e-3, ge=0, description="weight of the router's z-loss, which is the sum over MoE layers"
    )
    logit_z_loss_coeff: float = Field(default=1e-5, ge=0, description="weight of the z-loss on the output logits")
    dtype: Literal["fp32", "bf16"] = Field(default="bf16", json_schema_extra=LOCAL)
    zero_stage: Literal[1, 2, 3] = Field(default=1, json_schema_extra=LOCAL, description="DeepSpeed ZeRO stage")
    recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        json_schema_extra=LOCAL,
        description="activations computed again in the backward pass instead of being kept; selective: those inside "
        "feed-forward networks and experts; full: all but the inputs of layers",
    )
    seed: int = Field(default=1234, ge=0, description="of weights drawn at the start and of the order of the data")
    log_every: Positive = Field(default=10, json_schema_extra=LOCAL, description="steps between two console lines")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} is more than steps {self.steps}")
        return self

    def accumulation(self, ranks: int) -> int:
        """Forward passes that each of a node's `ranks` makes in one optimizer step.

        Raises RecipeError: batch_size cannot be made of such passes, or is not what grad_accumulation makes.
        """
        if self.batch_size is None:
            return self.grad_accumulation or 1
        at_once = ranks * self.micro_batch_size
        passes, rest = divmod(self.batch_size, at_once)
        made_of = f"{ranks} rank{'s' * (ranks > 1)} x train.micro_batch_size {self.micro_batch_size}"
        if rest or not passes:
            nearest = " or ".join(str(size * at_once) for size in (passes, passes + 1) if size)
            raise RecipeError(
                f"train.batch_size {self.batch_size} is not a multiple of {made_of} = {at_once}: the nearest that "
                f"are: {nearest}; or change train.micro_batch_size"
            )
        if self.grad_accumulation not in (None, passes):
            raise RecipeError(
                f"train.batch_size {self.batch_size} is not {made_of} x train.grad_accumulation "
                f"{self.grad_accumulation} = {at_once * self.grad_accumulation}: remove grad_accumulation, which then "
                f"becomes {passes}, or change train.batch_size"
            )
        return passes
