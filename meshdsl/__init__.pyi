"""The public names, by purpose. ``__init__.py`` reads this file, so that there is one list of them."""

__version__: str

# ---- Plan and run
from meshdsl.api.explain import Explanation as Explanation
from meshdsl.api.frontier import Frontier as Frontier
from meshdsl.api.mesh_search import Search as Search
from meshdsl.api.mesh_search import search as search
from meshdsl.api.overlap_option import Overlap as Overlap
from meshdsl.api.program import Program as Program
from meshdsl.api.sharded import Sharded as Sharded
from meshdsl.api.sharded import parallelize as parallelize
from meshdsl.api.inspect import PlanComparison as PlanComparison
from meshdsl.api.inspect import Inspection as Inspection
from meshdsl.api.inspect import inspect as inspect
from meshdsl.api.watch import Watch as Watch
from meshdsl.api.watch import watch as watch
from meshdsl.calibrate import calibrate as calibrate
from meshdsl.custom_rules import rule as rule
from meshdsl.lowering.numerics import CheckReport as CheckReport
from meshdsl.lowering.verify import VerifyReport as VerifyReport
from meshdsl.nd.constrain import constrain as constrain
from meshdsl.primitives.alternatives import alternatives as alternatives
from meshdsl.primitives.iterations import expect_iterations as expect_iterations
from meshdsl.primitives.ragged_exchange import ragged_exchange as ragged_exchange
from meshdsl.pins.strategies import data_parallel as data_parallel
from meshdsl.pins.strategies import fsdp as fsdp
from meshdsl.pins.strategies import tensor_parallel as tensor_parallel
from meshdsl.plan import Plan as Plan
from meshdsl.plan import load_plan as load_plan

# ---- Layouts
from meshdsl.layouts import B as B
from meshdsl.layouts import Layout as Layout
from meshdsl.layouts import LowBits as LowBits
from meshdsl.layouts import Mesh as Mesh
from meshdsl.layouts import P as P
from meshdsl.layouts import Rules as Rules
from meshdsl.layouts import S as S
from meshdsl.layouts import Topology as Topology
from meshdsl.layouts import topology as topology

# ---- Pipelines
from meshdsl.primitives.stage import stage as stage
from meshdsl.schedules.schedule import Schedule as Schedule
from meshdsl.schedules.schedule import make_schedule as make_schedule
from meshdsl.schedules.spec import Pipeline as Pipeline

# ---- Errors
from meshdsl.errors import ArgumentError as ArgumentError
from meshdsl.errors import BudgetError as BudgetError
from meshdsl.errors import CheckError as CheckError
from meshdsl.errors import CheckpointError as CheckpointError
from meshdsl.errors import DeviceError as DeviceError
from meshdsl.errors import DimError as DimError
from meshdsl.errors import LayoutError as LayoutError
from meshdsl.errors import MemoryLimitError as MemoryLimitError
from meshdsl.errors import MeshDSLError as MeshDSLError
from meshdsl.errors import NonFiniteError as NonFiniteError
from meshdsl.errors import NotationError as NotationError
from meshdsl.errors import OverlapError as OverlapError
from meshdsl.errors import PinError as PinError
from meshdsl.errors import PipelineError as PipelineError
from meshdsl.errors import PlanFileError as PlanFileError
from meshdsl.errors import RuleError as RuleError
from meshdsl.errors import ScheduleError as ScheduleError
from meshdsl.errors import TraceError as TraceError
from meshdsl.errors import VerifyError as VerifyError

# ---- Tensors with named dims: ``md.nd.softmax``, or ``md.softmax`` for short
from meshdsl import nd as nd
from meshdsl.nd import *
