"""Inputs reconstructed from a gradient: by algebra from a linear first layer, and by search; for `leakage.py`."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from sklearn.decomposition import FastICA
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

MOST_PARTS = 64
"""Into so many parts a mixture of inputs is taken apart at most."""

VARIATION = 1e-2
"""What a unit of variation between neighbouring pixels costs the search, beside a cosine."""


def by_algebra(weight: Tensor, bias: Tensor, n: int) -> Tensor:
    """Return candidates for the n inputs behind the gradient of a linear first layer, as rows.

    Every row of the weight's gradient is a mixture of the inputs. With one input it is that input
    times the bias's gradient. With several they are taken apart as independent components of all
    rows, as voices at a party are (Kariyappa et al. 2023); rows over the bias's gradient, and the
    rows' principal directions, are candidates too.
    """
    parts = min(n, *weight.shape, MOST_PARTS)
    loud = bias.abs().topk(min(len(bias), 4 * n)).indices
    rows = weight[loud] / bias[loud, None]
    _, _, directions = torch.linalg.svd(weight, full_matrices=False)
    sets = [rows, directions[:parts]]
    if parts > 1:
        with warnings.catch_warnings():
            # it may not converge, and is then one candidate among others
            warnings.simplefilter("ignore")
            mixed = weight.T.double().numpy()
            sources = FastICA(
                parts, whiten="unit-variance", max_iter=300, random_state=0
            ).fit_transform(mixed)
        sets.append(torch.from_numpy(np.ascontiguousarray(sources.T)).float())
    candidates = torch.cat(sets)
    return torch.cat([candidates, -candidates]).nan_to_num()


def by_search(
    model: nn.Module, seen: Tensor, targets: Tensor, shape: tuple[int, ...], iterations: int
) -> Tensor:
    """Return inputs whose gradients point where the gradients seen do, with little variation (Geiping et al. 2020).

    `seen` has a gradient a row, of as many attempts at a time; `targets` are known, a row for each.
    """
    values = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, values, (inputs,)), targets)

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))
    generator = torch.Generator(seen.device).manual_seed(0)
    inputs = torch.rand(
        *targets.shape, *shape, generator=generator, device=seen.device
    ).requires_grad_()
    optimizer = torch.optim.Adam([inputs], lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(
        optimizer, [iterations // 2, 3 * iterations // 4, 9 * iterations // 10], 0.3
    )
    for _ in range(iterations):
        by_name = gradients(values, inputs, targets)
        rows = torch.cat([by_name[name].flatten(1) for name in values], 1)
        apart = 1 - nn.functional.cosine_similarity(rows, seen)
        rough = inputs.diff(dim=-1).abs().mean((1, 2, 3, 4)) + inputs.diff(dim=-2).abs().mean(
            (1, 2, 3, 4)
        )
        (inputs.grad,) = torch.autograd.grad((apart + VARIATION * rough).sum(), [inputs])
        inputs.grad.sign_()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            inputs.clamp_(0, 1)
    return inputs.detach()


def alike(candidates: Tensor, images: Tensor) -> Tensor:
    """Return the correlation of each candidate with each image, pixel by pixel."""
    rows = [each.flatten(1).double() for each in (candidates, images)]
    centred = [each - each.mean(1, keepdim=True) for each in rows]
    first, second = (each / each.norm(dim=1, keepdim=True).clamp(min=1e-12) for each in centred)
    likeness: Tensor = first @ second.T
    return likeness
