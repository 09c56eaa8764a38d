"""One row of a published table as a step that our planner plans."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import meshdsl as md
from meshdsl.layouts.topology import Topology
from meshdsl.models import gpt, llama
from meshdsl.plan import Plan

TABLES = Path(__file__).parent / "tables"
TENSOR = "heads:model hidden:model vocab:model"
UNLIMITED = "100TB"  # what was measured did fit, so planning need not look for what does
PIECES = 4  # in which Transformer Engine sends behind a product, if not told otherwise
WHOLE = {"params/**": "data=B", "opt_state/**": "data=B"}  # every data-parallel rank has all of the state


@dataclass(frozen=True)
class Case:
    """A row: what was run, as a model, a mesh, rules and microbatches, and what it took.

    Args:
      table: file in ``TABLES``, without its ending. number: of the row there, from 0.
      label: of the row, for people. model: whose configurations are compared with each other.
      hardware: preset of the topology.
      batch: sequences per step.
      memory_bandwidth: of the device, where it is not that of the preset.
      overlap: whether the system that was measured sends what nobody waits for beside the computation.
      pieces: in which that system sends what stands beside a product (``Topology.pieces``).
      chunks: of layers per stage, interleaved (Narayanan et al. 2021).
      measured: seconds per step.
    """

    table: str
    number: int
    label: str
    model: str
    hardware: str
    config: gpt.Config | llama.Config
    batch: int
    mesh: str
    measured: float
    rules: md.Rules | str = f"batch:data {TENSOR}"
    pipeline: md.Pipeline | None = None
    chunks: int = 1
    layouts: Mapping[str, str] = field(default_factory=dict)
    memory_bandwidth: float = 0.0
    overlap: bool = True
    pieces: int = 1

    @property
    def key(self) -> str:
        """Which row it is."""
        return f"{self.table} {self.number}"

    @property
    def fitted(self) -> bool:
        """Whether the efficiency of the hardware is fitted on the row: on every other, from the first on."""
        return self.number % 2 == 0

    @property
    def stages(self) -> int:
        """Of the pipeline."""
        return md.Mesh.parse(self.mesh).sizes_by_name.get("pipe", 1)

    @property
    def microbatches(self) -> int:
        """Per step."""
        return self.pipeline.microbatches if self.pipeline else 1

    @property
    def handed(self) -> float:
        """Bytes that a device hands to the next stage: its part of a microbatch's activations, in bfloat16."""
        devices = md.Mesh.parse(self.mesh).size / self.stages
        return 2.0 * self.batch / self.microbatches * self.config.seq * self.config.embed / devices

    def stage(self, microbatches: int) -> "Case":
        """One stage, the largest, as a step of its own for so many microbatches."""
        sizes = md.Mesh.parse(self.mesh).sizes_by_name
        mesh = ",".join(f"{name}={size}" for name, size in sizes.items() if name != "pipe")
        whole = self.pipeline is not None and self.pipeline.recompute == "stage"
        config = replace(
            self.config, layers=-(-self.config.layers // self.stages), remat="all" if whole else self.config.remat
        )
        rules = md.Rules(str(md.Rules.of(self.rules).table).replace("layers:pipe", ""))
        batch = self.batch // self.microbatches * microbatches
        pipeline = md.Pipeline(microbatches)
        return replace(self, config=config, mesh=mesh, rules=rules, batch=batch, pipeline=pipeline)

    def per_token(self, seconds: float) -> float:
        """Seconds of one device for one token."""
        return seconds * md.Mesh.parse(self.mesh).size / (self.batch * self.config.seq)

    @property
    def program(self) -> md.Program:
        """The training step."""
        family = llama if isinstance(self.config, llama.Config) else gpt
        return family.program(self.config, self.rules, batch=self.batch)

    def sharded(self, topology: Topology) -> tuple[md.Sharded, tuple[object, ...]]:
        """The step over its mesh, and the shapes of its arguments."""
        topology = replace(topology, pieces=self.pieces)
        if self.memory_bandwidth:
            topology = replace(topology, memory_bandwidth=self.memory_bandwidth)
        program, mesh = self.program, md.Mesh.parse(self.mesh, topology)
        made = md.parallelize(
            program.step,
            mesh,
            layouts=self.layouts,
            rules=program.rules,
            pipeline=self.pipeline,
            memory=UNLIMITED,
        )
        return made, program.args

    def plan(self, topology: Topology) -> Plan:
        """The planned step."""
        made, args = self.sharded(topology)
        return made.plan(*args)


def rows(table: str) -> list[dict[str, str]]:
    """The rows of a table."""
    with (TABLES / f"{table}.csv").open() as file:
        return list(csv.DictReader(file))


def stages(pp: int, microbatches: int, recompute: str = "none") -> md.Pipeline | None:
    """How a row takes its microbatches; None if there is one, and one stage.

    Args:
      recompute: ``stage``, or ``none``, as of :class:`md.Pipeline`.
    """
    if pp == 1:
        return md.Pipeline(microbatches) if microbatches > 1 else None
    return md.Pipeline(microbatches, recompute=recompute)
