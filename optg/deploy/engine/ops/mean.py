"""Mean over height and width."""

from ctypes import Structure, c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from optg.deploy.engine.layout import Grid
from optg.deploy.engine.memory import Form, Place, Places
from optg.deploy.engine.ops.base import Op, Placed, Unsupported, arguments, lowers
from optg.deploy.engine.step import Step
from optg.deploy.engine.structs import vectors
from optg.deploy.graph import Node

if TYPE_CHECKING:
    from optg.deploy.engine.lower import Lowering


class MeanStruct(Structure):
    _fields_ = [("masks", c_void_p), ("images", c_int64), ("lanes", c_int64), ("scale", c_float)]


@dataclass
class Mean(Op):
    function: ClassVar[str] = "mean"

    def lay_out(self, places: Places, images: int) -> Placed:
        source = places.want(self.inputs[0], images, places.form(self.inputs[0], images))
        output = places.want(self.output, images, Form(Grid(images, 1, 1), 1, 1))
        return Placed([source], lambda: [self.mean_step(output, source, images)])

    def mean_step(self, output: Place, source: Place, images: int) -> Step:
        layout = source.layout
        rows, columns = layout.visible
        masks = vectors(-(layout.pixels[:rows, :columns] >= 0).astype(np.int32))
        lanes, scale = layout.grid.rows * layout.grid.columns, 1 / (layout.height * layout.width)
        own = MeanStruct(masks.ctypes.data, images, lanes, scale)
        return self.step(output, [source], over=layout, own=own, arrays=[masks])


@lowers("mean")
def mean(lowering: "Lowering", node: Node) -> None:
    x, dims, _, dtype = arguments(node, input=None, dim=None, keepdim=False, dtype=None)
    name = lowering.value(x)
    if dims is None or dtype is not None or len(lowering.forms[node.name]) not in (1, 3):
        raise Unsupported("it is not over height and width")
    if len(lowering.forms[x.name]) != 3 or isinstance(dims, int) or sorted(d % 4 for d in dims) != [2, 3]:
        raise Unsupported("it is not over height and width")
    lowering.emit(Mean(node.name, [name]))
