"""How experts are made of a dense feed-forward part: one module for each method, under the recipe's names."""

from upcycle.methods.copy import Copy
from upcycle.methods.drop import Drop
from upcycle.methods.method import Method, Read, Shared
from upcycle.methods.mix import Mix
from upcycle.methods.noise import Noise
from upcycle.methods.partition import Partition
from upcycle.methods.split import Split

METHODS: dict[str, Method] = {
    "copy": Copy(),
    "noise": Noise(),
    "drop": Drop(),
    "split": Split(),
    "partition": Partition(),
    "mix": Mix(),
}

__all__ = ["METHODS", "Method", "Read", "Shared"]
