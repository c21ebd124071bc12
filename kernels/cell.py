"""One step of a recurrent draft head: from the states of some paths to those of the paths one token longer.

The torch reference, and the arithmetic that training shares with it.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

EPS = 2.0**-23
"""Added to the mean square, whatever the dtype and the device: the precision of float32."""


def next_state(
    state: Tensor, embedded: Tensor, up: Callable[[Tensor], Tensor], down: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return s + D SiLU(U [norm(s), norm(e)] + b) + c, norm being the division by the root mean square.

    Args:
        state: [R, H], s.
        embedded: [R, H], e: input embeddings of the tokens drafted last.
        up: [R, 2 H] to [R, I], U x + b.
        down: [R, I] to [R, H], D x + c.

    Returns:
        [R, H].
    """
    x = torch.cat([F.rms_norm(part, part.shape[-1:], eps=EPS) for part in (state, embedded)], -1)
    return state + down(F.silu(up(x)))


def cell(
    states: Tensor,
    above: Tensor,
    found: Tensor,
    last: Tensor,
    embedding: Tensor,
    up: Tensor,
    up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
) -> Tensor:
    """Return the next state of each of P paths in each of S trees of one shape; see `next_state`.

    Args:
        states: [S, A, H], those of the level before.
        above: [P] int64, for each path the state that it goes on from.
        found: [S, M] int64, token ids.
        last: [P] int64, for each path where its last token stands in a row of `found`.
        embedding: [V, H], the input embeddings.
        up: [I, 2 H], U.
        up_bias: [I], b.
        down: [H, I], D.
        down_bias: [H], c.

    Returns:
        [S, P, H].

    Raises:
        ValueError: the shapes don't fit each other.
    """
    check_shapes(states, above, found, last, embedding, up, up_bias, down, down_bias)
    before, tokens = states[:, above].flatten(0, 1), found[:, last].flatten()
    products = partial(F.linear, weight=up, bias=up_bias), partial(F.linear, weight=down, bias=down_bias)
    now = next_state(before, embedding[tokens], *products)
    return now.view(len(states), len(above), -1)


def check_shapes(
    states: Tensor,
    above: Tensor,
    found: Tensor,
    last: Tensor,
    embedding: Tensor,
    up: Tensor,
    up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
) -> None:
    """Refuse arguments of `cell` that don't fit each other.

    Raises:
        ValueError: with the shapes.
    """
    size, inner = states.shape[-1], len(up)
    if len(states) != len(found) or above.shape != last.shape:
        shapes = [list(t.shape) for t in (states, found, above, last)]
        raise ValueError(f"states [S, A, H], found [S, M], above [P] and last [P] don't fit each other: {shapes}")
    shapes = [list(t.shape) for t in (embedding, up, up_bias, down, down_bias)]
    if shapes[0][1:] != [size] or shapes[1:] != [[inner, 2 * size], [inner], [size, inner], [size]]:
        raise ValueError(f"embedding, up and down with their biases don't fit states of {size}: {shapes}")
