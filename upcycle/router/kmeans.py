"""Spherical k-means in torch, of which the result does not depend on threads, order of sums, or the BLAS at hand.

Directions are rounded to whole multiples of 2^-14; dot products and sums of those are whole numbers below 2^53, which
fp64 holds exactly, so any order of adding them gives the same bits.
"""

from typing import NamedTuple

import torch

_UNIT = 1 << 14
_CHUNK_ROWS = 2048
_ITERATIONS = 25


class Clusters(NamedTuple):
    """`assignment`: int64 [N]. `centers`: fp64 [k, H], unit vectors. `cosines`: fp64 [N, k]."""

    assignment: torch.Tensor
    centers: torch.Tensor
    cosines: torch.Tensor


def spherical_kmeans(points: torch.Tensor, k: int, rng: torch.Generator, *, balanced: bool = False) -> Clusters:
    """Cluster the directions of `points` [N, H] into k groups, by cosine similarity (Dhillon and Modha, 2001).

    Starts as k-means++ does (Arthur and Vassilvitskii, 2007).

    Args:
        balanced: all clusters get N / k points (k must divide N).
    """
    directions = _directions(points)
    centers = _first_centers(directions, k, rng)
    assignment = torch.full((len(points),), -1)
    for _ in range(_ITERATIONS):
        dots = _dots(directions, centers)
        new = _balanced(dots) if balanced else _nearest(dots)
        if torch.equal(new, assignment):
            break
        assignment = new
        centers = _centers(directions, assignment, dots, k)
    dots = _dots(directions, centers)
    return Clusters(assignment, centers.double() / _UNIT, dots / _UNIT**2)


def _directions(points: torch.Tensor) -> torch.Tensor:
    """int16 [N, H]: multiples of 2^-14. A row of zeros stays one."""
    out = torch.empty(points.shape, dtype=torch.int16)
    for start in range(0, len(points), _CHUNK_ROWS):
        out[start : start + _CHUNK_ROWS] = _rounded(points[start : start + _CHUNK_ROWS].double())
    return out


def _rounded(rows: torch.Tensor) -> torch.Tensor:
    norms = rows.square().sum(dim=1, keepdim=True).sqrt_()
    return (rows / norms.clamp_min(torch.finfo(torch.float64).tiny) * _UNIT).round().to(torch.int16)


def _dots(directions: torch.Tensor, centers: torch.Tensor) -> torch.Tensor:
    """fp64 [N, k], exact whole numbers."""
    chunks = [chunk.double() @ centers.double().T for chunk in directions.split(_CHUNK_ROWS)]
    return torch.cat(chunks)


def _first_centers(directions: torch.Tensor, k: int, rng: torch.Generator) -> torch.Tensor:
    """k of the points: each with a probability that grows with its distance from those chosen before."""
    chosen = [int(torch.randint(len(directions), (1,), generator=rng))]
    distance = torch.full((len(directions),), float("inf"), dtype=torch.float64)
    for _ in range(k - 1):
        to_last = (_UNIT**2 - _dots(directions, directions[chosen[-1:]])[:, 0]).clamp_min_(0)
        distance = torch.minimum(distance, to_last)
        distance[chosen] = 0
        edges = distance.cumsum(0)
        at = float(torch.rand((), generator=rng, dtype=torch.float64)) * float(edges[-1])
        chosen.append(min(int(torch.searchsorted(edges, at, right=True)), len(directions) - 1))
    return directions[chosen]


def _nearest(dots: torch.Tensor) -> torch.Tensor:
    """The cluster of the largest dot product; of equal ones the first."""
    k = dots.shape[1]
    return (dots * k - torch.arange(k)).argmax(dim=1)


def _balanced(dots: torch.Tensor) -> torch.Tensor:
    """Clusters of N / k points: each takes the best of those who want it most; who found no room asks again."""
    count, k = dots.shape
    room = [count // k] * k
    assignment = torch.full((count,), -1)
    while (waiting := (assignment < 0).nonzero()[:, 0]).numel():
        full = torch.tensor([not left for left in room])
        wanted = _nearest(dots[waiting].masked_fill(full, -float(_UNIT**2) * 2))
        for cluster in range(k):
            askers = waiting[wanted == cluster]
            best = askers[dots[askers, cluster].sort(descending=True, stable=True).indices[: room[cluster]]]
            assignment[best] = cluster
            room[cluster] -= len(best)
    return assignment


def _centers(directions: torch.Tensor, assignment: torch.Tensor, dots: torch.Tensor, k: int) -> torch.Tensor:
    """Directions of the clusters' sums; an empty cluster starts again at the point that fits worst where it is."""
    sums = torch.zeros(k, directions.shape[1], dtype=torch.float64)
    for rows, clusters in zip(directions.split(_CHUNK_ROWS), assignment.split(_CHUNK_ROWS), strict=True):
        sums += torch.nn.functional.one_hot(clusters, k).double().T @ rows.double()
    centers = _rounded(sums)
    empty = (torch.bincount(assignment, minlength=k) == 0).nonzero()[:, 0]
    if len(empty):
        fit = dots.gather(1, assignment[:, None])[:, 0]
        centers[empty] = directions[fit.sort(stable=True).indices[: len(empty)]]
    return centers
