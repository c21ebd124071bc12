"""Weights in slabs, in the order in which a GPU's products read them. Knows matrices, no models.

A product's programs go through k side by side: together they read some columns of the weight, and each of them those of
its own outputs. Of a matrix by rows these are short pieces, far from each other; of slabs, which hold SLAB columns of
all rows, they are one piece of memory. A weight in slabs is a tensor [out, in / SLAB, SLAB] whose second dimension has
the largest stride. It is a second copy of the weight.
"""

from torch import Tensor

SLAB = 256
"""Inputs of a slab: a tile's step over k has as many, or a part of them."""
LEAST_INPUTS = 2048
"""Of shorter rows, those of small models, there is little to gain: products take about as long as their launches."""


def fits_slabs(weight: Tensor) -> bool:
    """Return whether a weight [out, in] of 16 bits can be kept in slabs, and is large enough to gain by it."""
    return weight.itemsize == 2 and weight.shape[1] >= LEAST_INPUTS and weight.shape[1] % SLAB == 0


def to_slabs(weight: Tensor) -> Tensor:
    """Return a copy of a weight [out, in] in slabs: [out, in / SLAB, SLAB]."""
    return weight.detach().reshape(len(weight), -1, SLAB).transpose(0, 1).contiguous().transpose(0, 1)


def in_slabs(weight: Tensor) -> bool:
    """Return whether a weight is in slabs."""
    return weight.dim() == 3


def from_slabs(weight: Tensor) -> Tensor:
    """Return a copy of a weight in slabs by rows: [out, in]."""
    return weight.flatten(1)
