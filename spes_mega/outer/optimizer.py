"""The outer optimizer: what the global weights do with the mean change of the nodes.

`change` is local weights - global weights, the negative of DiLoCo's pseudo-gradient (arXiv 2311.08105, algorithm 1),
so that SGD with lr 1 gives the mean of the nodes' weights. All functions work on rows, fp32.
"""

from torch import Tensor


def sgd_step(change: Tensor, lr: float) -> Tensor:
    """lr * change, in place."""
    return change if lr == 1 else change.mul_(lr)


def nesterov_step(change: Tensor, velocity: Tensor, *, lr: float, momentum: float) -> Tensor:
    """lr * (change + momentum * velocity), after velocity = momentum * velocity + change; both in place.

    As torch.optim.SGD(nesterov=True) without dampening, with a velocity of zeros at the start.
    """
    velocity.mul_(momentum).add_(change)
    # Not add_(…, alpha): that may or may not fuse product and sum, and then the result would depend on the slicing.
    return change.add_(velocity.mul(momentum)).mul_(lr)
