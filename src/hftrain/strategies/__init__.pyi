"""The public names of the package; see `hftrain/__init__.pyi`."""

from hftrain.strategies.base import Strategy as Strategy
from hftrain.strategies.data_parallel import DataParallelStrategy as DataParallelStrategy
from hftrain.strategies.ddp import DDPStrategy as DDPStrategy
from hftrain.strategies.deepspeed import DeepSpeedStrategy as DeepSpeedStrategy
from hftrain.strategies.fsdp import FSDPStrategy as FSDPStrategy
from hftrain.strategies.mesh import MeshStrategy as MeshStrategy
from hftrain.strategies.registry import strategies
from hftrain.strategies.single import MPSStrategy as MPSStrategy
from hftrain.strategies.single import SingleDeviceStrategy as SingleDeviceStrategy
from hftrain.strategies.xla import XLAStrategy as XLAStrategy

register = strategies.register
names = strategies.names
summary = strategies.summary
resolve = strategies.resolve
create = strategies.create
