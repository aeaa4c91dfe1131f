"""A model in many copies at once.

The losses and gradients of all, on batches that groups of them share.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from coterie.engines.in_process.passes import MAX_MAPPED_SIZE, Passes
from coterie.engines.in_process.sampler import Batches
from coterie.evaluation.evaluate import evaluation_mode
from coterie.evaluation.losses import is_over_classes
from coterie.users.trees import Tree, as_arguments, called, leaves, mapped, n_rows, together

MAX_ACTIVATION_BYTES = {"cpu": 2**21, "cuda": 2**30}
"""About how many bytes of activations the copies that share a pass hold.

On a CPU, no more than a near cache.
"""

MAX_PARAMETERS = {"cpu": 2**20, "cuda": 2**28}
"""How many numbers the parameters of the copies that share a pass have, if it is not one copy's."""

_ELEMENTWISE = (
    *(
        nn.ReLU,
        nn.ReLU6,
        nn.LeakyReLU,
        nn.ELU,
        nn.SELU,
        nn.CELU,
        nn.GELU,
        nn.SiLU,
        nn.Mish,
        nn.Softplus,
    ),
    *(nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Identity),
)


class Copies:
    """Copies of one model, each at its own parameters, in G groups of M that share a batch of R examples.

    `torch.func.vmap` maps the model over groups and copies. Linear layers and activations in a row,
    the most of small models, go faster: the first layer of a group is one product of all its
    weights with the batch, and activations keep the examples last, where a softmax over few classes
    is an order of magnitude cheaper.

    Parameters x have the shape (G, M, d); inputs and targets (G, R, …).
    """

    def __init__(self, passes: Passes) -> None:
        self.passes, self.parameters = passes, passes.parameters
        self._layers = _layers(passes.model, set(self.parameters.named))
        # On a CPU copies of large models are faster one after the other than mapped.
        large = passes.parameters.size > MAX_MAPPED_SIZE and passes.parameters.device.type == "cpu"
        self.one_by_one = large and self._layers is None
        self._width: int | None = None
        if passes.per_example is None:
            raise AssertionError("`not_stacked` keeps losses that are no means over examples away")
        self._loss, self._classes = passes.per_example, is_over_classes(passes.loss)
        self.weighs = self._loss.weights is not None  # examples count differently

    def gradients(
        self, x: Tensor, shares: Tensor, inputs: Tree, targets: Tree, into: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of each copy's weighted sum of the examples' losses, and that sum.

        `shares`, of shape (G, M, R), is what each example weighs for each copy; where examples
        count differently, over what those of its user count in all, see `counts`. The gradients are
        written to `into`, where given.
        """
        into = torch.empty_like(x, memory_format=torch.contiguous_format) if into is None else into
        write = self._write_each if self.one_by_one else self._write_all
        return into, write(x, shares, inputs, targets, into)

    def _write_all(
        self, x: Tensor, shares: Tensor, inputs: Tree, targets: Tree, into: Tensor
    ) -> Tensor:
        """Write the gradients of all copies, and return their sums."""
        leaves = self._pieces(x)
        for leaf in leaves.values():
            leaf.requires_grad_()
        sums = (self._losses(leaves, inputs, targets) * shares).sum(2)
        with torch.autograd.set_multithreading_enabled(False):
            gradients = torch.autograd.grad(
                sums.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
            )
        torch.cat([g.flatten(2) for g in gradients], dim=2, out=into)
        return sums.detach()

    def _write_each(
        self, x: Tensor, shares: Tensor, inputs: Tree, targets: Tree, into: Tensor
    ) -> Tensor:
        """Write the gradients of one copy after the other, from the examples that weigh anything for it.

        Copies that begin together are at one point; then the gradient is that of the copy before.
        """
        sums = x.new_zeros(x.shape[:2])
        for group, copy in itertools.product(*map(range, x.shape[:2])):
            one, before = ((slice(group, group + 1), slice(at, at + 1)) for at in (copy, copy - 1))
            if copy and all(torch.equal(each[one], each[before]) for each in (shares, x)):
                into[one], sums[one] = into[before], sums[before]
                continue
            some = shares[group, copy].nonzero().flatten()
            if not len(some):
                into[one] = 0.0
                continue
            every = len(some) == shares.shape[2]
            pick = itemgetter(one[0] if every else (one[0], some))
            theirs = shares[one] if every else shares[one][..., some]
            sums[one] = self._write_all(
                x[one], theirs, mapped(pick, inputs), mapped(pick, targets), into[one]
            )
        return sums

    @property
    def in_layers(self) -> bool:
        """Whether the model is linear layers and activations in a row, which copies pass through together."""
        return self._layers is not None and not self.weighs

    def rows(self, x: Tensor, batches: Sequence[Batches]) -> tuple[Tensor, Tensor]:
        """Return every user's gradient and loss at its own row of x, where the batches' positions are."""
        most = max(1, self.passes.memory // (4 * self.parameters.size * x.element_size()))
        parts = [part for batch in batches for part in batch.cut(most)]
        if len(parts) == 1:
            return self._at_own_points(x, parts[0])
        rows, losses = torch.empty_like(x), x.new_empty(len(x))
        for part in parts:
            places = torch.tensor(part.positions, device=x.device)
            rows[places], losses[places] = self._at_own_points(x[places], part)
        return rows, losses

    def _at_own_points(self, x: Tensor, batch: Batches) -> tuple[Tensor, Tensor]:
        inputs, targets = (batch.by_user(tree) for tree in (batch.inputs, batch.targets))
        mean = x.new_tensor(1 / batch.size).expand(len(x), 1, batch.size)
        gradients, losses = self.gradients(x.unsqueeze(1), mean, inputs, targets)
        return gradients.squeeze(1), losses.squeeze(1)

    def losses(self, x: Tensor, inputs: Tree, targets: Tree) -> Tensor:
        """Return the loss of each example by itself under each copy, of shape (G, M, R), in evaluation mode."""
        with torch.no_grad(), evaluation_mode(self.passes.model):
            losses, counts = self._losses(self._pieces(x), inputs, targets), self.counts(targets)
        return losses if counts is None else losses / (counts + (counts == 0)).unsqueeze(1)

    def counts(self, targets: Tree) -> Tensor | None:
        """Return what each example counts in its user's loss, (G, R).

        None where all count the same.
        """
        if not self.weighs:
            return None
        groups, rows = leaves(targets)[0].shape[:2]
        each = self._loss.counts(mapped(lambda leaf: leaf.flatten(0, 1), targets))
        return None if each is None else each.view(groups, rows)

    def outputs(self, x: Tensor, inputs: Tree) -> Tree:
        """Return each copy's outputs, of shape (G, M, R, …), in evaluation mode."""
        with torch.no_grad(), evaluation_mode(self.passes.model):
            return self._outputs(self._pieces(x), inputs)

    def max_copies(self, inputs: Tree, rows: int) -> int:
        """Return how many copies may share a pass over batches of so many rows of such inputs."""
        if self._width is None:
            self._width = _width(self.passes, mapped(lambda leaf: leaf[:2], inputs))
        bytes_a_copy = 1 + self._width * rows * self.parameters.dtype.itemsize
        memory = MAX_ACTIVATION_BYTES.get(self.parameters.device.type, 2**28)
        # Few copies do not fill the time that a pass takes to begin, so that four may take more;
        # with attention, whose operations are many and small, much more.
        few, more = (8, 64) if self.passes.plain_attention else (4, 4)
        most = max(min(few, more * memory // bytes_a_copy), memory // bytes_a_copy)
        numbers = MAX_PARAMETERS.get(self.parameters.device.type, 2**26)
        return max(1, min(most, numbers // self.parameters.size))

    def _pieces(self, x: Tensor) -> dict[str, Tensor]:
        """Return the parameters by name, each of shape (G, M, …), in one piece where groups have several copies."""
        pieces = self.parameters.unflatten(x.detach()).items()
        if x.shape[1] == 1:
            return dict(pieces)
        return {name: piece.clone(memory_format=torch.contiguous_format) for name, piece in pieces}

    def _losses(self, values: Mapping[str, Tensor], inputs: Tree, targets: Tree) -> Tensor:
        if not self._loss.of_torch:
            return self._mapped(self._each_loss, values, inputs, targets)  # type: ignore[no-any-return]
        outputs = cast("Tensor", self._outputs(values, inputs))
        groups, copies, rows = outputs.shape[:3]
        # of torch's losses outputs and targets are tensors
        outputs = outputs.flatten(0, 1)
        targets = (
            cast("Tensor", targets)
            .unsqueeze(1)
            .expand(-1, copies, *targets.shape[1:])
            .flatten(0, 1)
        )
        if self._classes:
            probabilities = targets.is_floating_point()
            losses = self._loss.each(
                outputs.movedim(2, 1), targets.movedim(2, 1) if probabilities else targets
            )
        else:
            losses = self._loss.each(outputs, targets)
        if losses.ndim > 2:
            losses = (
                losses.flatten(2).mean(2)
                if self._loss.weights is None
                else losses.flatten(2).sum(2)
            )
        return losses.view(groups, copies, rows)

    def _outputs(self, values: Mapping[str, Tensor], inputs: Tree) -> Tree:
        plain = isinstance(inputs, Tensor)
        if (
            plain
            and self._layers is not None
            and (inputs.ndim == 3 or isinstance(self._layers[0], nn.Flatten))
        ):
            return self._through_layers(values, inputs.flatten(2))

        return self._mapped(self._output, values, inputs)

    def _output(self, values: dict[str, Tensor], inputs: Tree) -> Tree:
        values = self.parameters.with_tied(values)
        return functional_call(self.passes.model, values, *as_arguments(inputs), tie_weights=False)

    def _each_loss(self, values: dict[str, Tensor], inputs: Tree, targets: Tree) -> Tensor:
        return self._loss.parts(self._output(values, inputs), targets)[0]

    def _mapped(
        self, function: Callable[..., Tree], values: Mapping[str, Tensor], *batch: Tree
    ) -> Tree:
        """Return what a function makes of every copy and its group's batch, (G, M, …)."""
        groups, over_copies = n_rows(batch[0]), vmap(function, in_dims=(0, *(None,) * len(batch)))
        with self.passes.mappable():
            if groups > 1 and not self.passes.batches_apart:
                return vmap(over_copies)(dict(values), *batch)
            made = []
            for group in range(groups):
                alone = {name: value[group] for name, value in values.items()}
                only = [mapped(itemgetter(group), tree) for tree in batch]
                if self.one_by_one and len(next(iter(alone.values()))) == 1:
                    output = function(
                        {name: value.squeeze(0) for name, value in alone.items()}, *only
                    )
                    made.append(mapped(lambda leaf: leaf.unsqueeze(0), output))
                else:
                    made.append(over_copies(alone, *only))
        if groups > 1:
            return together(torch.stack, made)
        return mapped(lambda leaf: leaf.unsqueeze(0), made[0])

    def _through_layers(self, values: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Return the outputs of linear layers and activations, computed with the examples last."""
        groups, rows = inputs.shape[:2]
        copies = next(iter(values.values())).shape[1]
        names = {id(p): name for name, p in self.parameters.named.items()}
        # by all copies of a group; and of no use to the backward pass
        h, shared, fresh = inputs.mT, True, False
        for layer in self._layers or ():
            if isinstance(layer, nn.Linear):
                weight = values[names[id(layer.weight)]].flatten(*(1, 2) if shared else (0, 1))
                bias = values.get(names.get(id(layer.bias), ""))
                h = h if shared else h.view(groups * copies, -1, rows)
                if bias is None:
                    h = weight @ h
                else:
                    h = torch.baddbmm(
                        bias.flatten(*(1, 2) if shared else (0, 1)).unsqueeze(2), weight, h
                    )
                shared, fresh = False, True
            elif not isinstance(layer, nn.Flatten):
                # In place, but never on a view: for that autograd copies all there is.
                h = h.relu_() if fresh and type(layer) is nn.ReLU else layer(h)
                fresh = False
        return h.view(groups * copies, -1, rows).mT.reshape(groups, copies, rows, -1)


def _layers(model: nn.Module, trainable: set[str]) -> list[nn.Module] | None:
    """Return a model's layers where it is linear layers and activations in a row, all trainable.

    Else None.
    """
    if {name for name, _ in model.named_parameters()} != trainable:
        return None
    modules = (module for _, module in model.named_modules(remove_duplicate=False))
    layers = [module for module in modules if type(module) is not nn.Sequential]
    plain = all(type(layer) in (nn.Linear, *_ELEMENTWISE) for layer in layers[1:])
    first = layers[0]
    begins = type(first) is nn.Linear or (
        isinstance(first, nn.Flatten)
        and (first.start_dim, first.end_dim) == (1, -1)
        and len(layers) > 1
        and type(layers[1]) is nn.Linear
    )
    watched = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return layers if plain and begins and not watched else None


def _width(passes: Passes, inputs: Tree) -> int:
    """Return how many numbers a pass keeps for each example.

    The output, and what the backward pass needs.
    """
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    held = (*leaves(inputs), *passes.model.parameters(), *passes.model.buffers())
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        evaluation_mode(passes.model),
    ):
        output = called(passes.model, inputs)
    known = {tensor.data_ptr() for tensor in held}
    outputs = sum(leaf.numel() for leaf in leaves(output) if isinstance(leaf, Tensor))
    made = outputs + sum(n for place, n in kept.items() if place not in known)
    return int(made) // n_rows(inputs)
