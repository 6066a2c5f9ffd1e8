"""How concatenation, split and flattening renumber channels.

Torch-Pruning infers these numbers from the sizes of the layers around, and fails where no layer is near. Here they are read
from the shapes that autograd has recorded.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple


class Channel(NamedTuple):
    """A channel's number at the present operation, and its number in the layer where the search began."""

    idx: int
    root_idx: int


class Shift:
    """Channels enter a longer list at `start`, or leave it."""

    def __init__(self, start: int, size: int) -> None:
        self.start, self.size = start, size

    def enter(self, channels: Sequence[Channel]) -> list[Channel]:
        return [Channel(i + self.start, root) for i, root in channels if i < self.size]

    def leave(self, channels: Sequence[Channel]) -> list[Channel]:
        return [Channel(i - self.start, root) for i, root in channels if 0 <= i - self.start < self.size]


class Flatten:
    """Each channel becomes `copies` features: neighbours, or `channels` apart if the channel dimension was the last."""

    def __init__(self, channels: int, copies: int, channel_last: bool) -> None:
        self.step, self.spacing = (1, channels) if channel_last else (copies, 1)
        self.channels, self.copies = channels, copies

    def enter(self, channels: Sequence[Channel]) -> list[Channel]:
        inside = [channel for channel in channels if channel.idx < self.channels]
        return [Channel(i * self.step + k * self.spacing, root) for i, root in inside for k in range(self.copies)]

    def leave(self, channels: Sequence[Channel]) -> list[Channel]:
        inside = [channel for channel in channels if channel.idx < self.channels * self.copies]
        return list({Channel(i // self.step % self.channels, root): None for i, root in inside})


class Unflatten(Flatten):
    enter, leave = Flatten.leave, Flatten.enter


def set_moves(graph: Any, sequences: bool) -> None:
    """Tell each dependency of Torch-Pruning's graph how channels are renumbered along it.

    Args:
        sequences: whether activations of three dimensions have channels in the second one, like those of 1-d convolutions,
            and not in the last.
    """
    bare = {p for p, _ in graph.unwrapped_parameters}
    for node in graph.module2node.values():
        for dependency in node.dependencies:
            dependency.index_mapping = [None, None]
    for node in graph.module2node.values():
        # The graph leaves out the inputs of the model, and the parameters of layers.
        edges = [
            (place, function, output)
            for place, (function, output) in enumerate(getattr(node.grad_fn, "next_functions", ()))
            if function is not None and (not hasattr(function, "variable") or function.variable in bare)
        ]
        if len(edges) != len(node.inputs):  # a layer that is called several times
            continue
        following = {source: dependencies_between(source, node) for source in node.inputs}
        for backward, source, (place, function, output) in zip(node.dependencies, node.inputs, edges):
            forward = next(following[source])
            leave = split_move(function, output, sequences) if type(source.module).__name__ == "_SplitOp" else None
            find_enter = {"_ConcatOp": concat_move, "_ReshapeOp": reshape_move}.get(type(node.module).__name__)
            enter = find_enter(node.grad_fn, place, sequences) if find_enter else None
            forward.index_mapping = [leave and leave.leave, enter and enter.enter]
            backward.index_mapping = [enter and enter.leave, leave and leave.enter]


def dependencies_between(source: Any, target: Any) -> Iterator[Any]:
    """Iterate over the dependencies that lead forward from one node to another: two for x + x."""
    return (found for found in source.dependencies[len(source.inputs) :] if found.target is target)


def output_shapes(function: Any) -> list[list[int]]:
    """Return the shapes of the tensors that a function of autograd has made."""
    return [list(metadata.shape) for metadata in function._input_metadata]


def channel_dim(ndim: int, sequences: bool) -> int:
    return 2 if ndim == 3 and not sequences else 1


def splits_channels(function: Any, sequences: bool) -> bool:
    """Return whether a split or concatenation works on channels. Autograd stores a negative dimension as an unsigned number."""
    ndim = len(output_shapes(function)[0])
    dim = function._saved_dim if function._saved_dim < ndim else function._saved_dim - 2**64 + ndim
    return dim == channel_dim(ndim, sequences)


def split_move(function: Any, output: int, sequences: bool) -> Shift | None:
    """Return how the channels of one output leave a split; None if it splits something else."""
    if not splits_channels(function, sequences):
        return None
    sizes = [shape[channel_dim(len(shape), sequences)] for shape in output_shapes(function)]
    return Shift(sum(sizes[:output]), sizes[output])


def concat_move(function: Any, place: int, sequences: bool) -> Shift | None:
    """Return how the channels of one input enter a concatenation; None if it joins something else."""
    if not splits_channels(function, sequences):
        return None
    (whole,) = output_shapes(function)
    dim = channel_dim(len(whole), sequences)
    sizes = [source and output_shapes(source)[output][dim] for source, output in function.next_functions]
    missing = whole[dim] - sum(filter(None, sizes))  # an input of the model has no function; there may be one
    sizes = [missing if size is None else size for size in sizes]
    return Shift(sum(sizes[:place]), sizes[place]) if sum(sizes) == whole[dim] else None


def reshape_move(function: Any, place: int, sequences: bool) -> Flatten | None:
    """Return how channels enter a reshape to or from a list of features for each example; None if it does something else."""
    source, output = function.next_functions[place]
    before, after = output_shapes(source)[output], output_shapes(function)[0]
    for kind, images, features in ((Flatten, before, after), (Unflatten, after, before)):
        if len(images) > 2 and features == [images[0], prod(images[1:])]:
            dim = channel_dim(len(images), sequences)
            return kind(images[dim], features[1] // images[dim], channel_last=dim == len(images) - 1)
    return None
