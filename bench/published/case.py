"""A row of a published table as a planning problem."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import meshdsl as md
from meshdsl.layouts.topology import KINDS, Topology
from meshdsl.models import gpt, llama
from meshdsl.plan import Plan

TABLES = Path(__file__).parent / "tables"
TENSOR = "heads:model hidden:model vocab:model"
UNLIMITED = "100TB"  # memory per device: measured configurations fit, so planning need not check
PIECES = 4  # chunks of a collective that Transformer Engine overlaps with a matmul, by default
# Systems without XLA are assumed to reach 0.9 of the data sheet's bandwidth, and to start a kernel in 3 us. The fitted
# rates have that in them, and the other model of fusion.
WITHOUT_XLA: dict[str, dict[str, Any]] = {
    "dgx-a100": {"fusion": "chains", "memory_bandwidth": 1.84e12, "overhead": 3.0e-6},
    "dgx-h100": {"fusion": "chains", "memory_bandwidth": 3.0e12, "overhead": 3.0e-6, "flops32": 4.0e14},
    "gb200-nvl72": {"fusion": "chains", "memory_bandwidth": 7.2e12, "overhead": 3.0e-6},
}
REPLICATED = {"params/**": "data=B", "opt_state/**": "data=B"}  # every data-parallel rank stores all of the state


@dataclass(frozen=True)
class Case:
    """A measured configuration.

    Args:
      table: name of a file in ``TABLES``, without suffix.
      number: row in the table, from 0.
      label: readable name of the row.
      model: configurations of the same model are ranked against each other.
      hardware: preset of the topology.
      config: sizes of the model.
      batch: sequences per step.
      mesh: mesh axes, as ``md.Mesh.parse`` takes them.
      measured: measured seconds per step.
      rules: layout rules.
      pipeline: microbatches and stages, if any.
      chunks: chunks of layers per stage, interleaved (Narayanan et al. 2021).
      layouts: pins of arguments.
      memory_bandwidth: bytes per second, where it differs from the preset's; 0 for the preset's.
      overlap: whether the measured system hides communication behind independent compute.
      xla: whether the system compiles with XLA, as the presets say.
      pieces: chunks in which that system overlaps a collective with a matmul (``Topology.pieces``).
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
    xla: bool = False
    pieces: int = 1

    @property
    def key(self) -> str:
        """Identifies the row among all tables."""
        return f"{self.table} {self.number}"

    @property
    def fitted(self) -> bool:
        """Whether the row is used to fit the hardware's efficiency: every other row, starting with the first."""
        return self.number % 2 == 0

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return md.Mesh.parse(self.mesh).sizes_by_name.get("pipe", 1)

    @property
    def microbatches(self) -> int:
        """Microbatches per step."""
        return self.pipeline.microbatches if self.pipeline else 1

    @property
    def stage_bytes(self) -> float:
        """Bytes that a device sends to the next stage: its shard of a microbatch's activations, in bfloat16."""
        devices = md.Mesh.parse(self.mesh).size / self.stages
        return 2.0 * self.batch / self.microbatches * self.config.seq * self.config.embed / devices

    def stage(self, microbatches: int) -> "Case":
        """Returns the largest stage as a step of its own, for ``microbatches`` microbatches."""
        sizes = md.Mesh.parse(self.mesh).sizes_by_name
        mesh = ",".join(f"{name}={size}" for name, size in sizes.items() if name != "pipe")
        recomputed = self.pipeline is not None and self.pipeline.recompute == "stage"
        config = replace(
            self.config, layers=-(-self.config.layers // self.stages), remat="all" if recomputed else self.config.remat
        )
        rules = md.Rules(str(md.Rules.of(self.rules).table).replace("layers:pipe", ""))
        batch = self.batch // self.microbatches * microbatches
        pipeline = md.Pipeline(microbatches)
        return replace(self, config=config, mesh=mesh, rules=rules, batch=batch, pipeline=pipeline)

    def per_token(self, seconds: float) -> float:
        """Converts seconds per step to device-seconds per token."""
        return seconds * md.Mesh.parse(self.mesh).size / (self.batch * self.config.seq)

    @property
    def program(self) -> md.Program:
        """The training step."""
        family = llama if isinstance(self.config, llama.Config) else gpt
        return family.program(self.config, self.rules, batch=self.batch)

    def sharded(self, topology: Topology) -> tuple[md.Sharded, tuple[object, ...]]:
        """Returns the step over its mesh, and the shapes of its arguments."""
        fitted = {"contention": 0.0, "merges": 0.0, "beside_products": False}  # the rates have all of them in them
        ours = {"asynchronous": KINDS, "across_loops": True, **fitted}
        theirs = {} if self.xla else WITHOUT_XLA[self.hardware]
        topology = replace(topology, pieces=self.pieces, **ours, **theirs)
        if self.memory_bandwidth:
            topology = replace(topology, memory_bandwidth=self.memory_bandwidth)
        program, mesh = self.program, md.Mesh.parse(self.mesh, topology)
        sharded = md.parallelize(
            program.step,
            mesh,
            layouts=self.layouts,
            rules=program.rules,
            pipeline=self.pipeline,
            memory=UNLIMITED,
        )
        return sharded, program.args

    def plan(self, topology: Topology) -> Plan:
        """Returns the planned step."""
        sharded, args = self.sharded(topology)
        return sharded.plan(*args)


def rows(table: str) -> list[dict[str, str]]:
    """Returns the rows of a table, by column."""
    with (TABLES / f"{table}.csv").open() as file:
        return list(csv.DictReader(file))


def stages(pp: int, microbatches: int, recompute: str = "none") -> md.Pipeline | None:
    """Returns the pipeline of a row; None for one stage and one microbatch.

    Args:
      pp: number of stages.
      microbatches: per step.
      recompute: ``stage`` or ``none``, as in :class:`md.Pipeline`.
    """
    if pp == 1:
        return md.Pipeline(microbatches) if microbatches > 1 else None
    return md.Pipeline(microbatches, recompute=recompute)
