"""What a step's calls go through, each stage kept for the next call like it.

    arguments --trace--> program --pad, solve--> solution --> plan --lower--> executable

Calls are alike if trees, shapes, dtypes, static arguments and settings of jax are.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax

from meshdsl.executable import Executable
from meshdsl.ir import Leaf, Program
from meshdsl.lowering.boundary import device_mesh
from meshdsl.making import Making
from meshdsl.options import Options, donated_leaves, settings
from meshdsl.pad import Chosen
from meshdsl.plan.value import Plan
from meshdsl.trace import Call, flatten_call

log = logging.getLogger("meshdsl")


class Kept:
    """The stages of one step under one set of options.

    Args:
      like: the same step under other options, planned from where that one's plans were found.
    """

    def __init__(self, step: Callable[..., Any], options: Options, like: "Kept | None" = None) -> None:
        self.options, self.making = options, Making(step, options)
        self.planned: dict[Any, tuple[Program, Plan]] = {}
        self._traced: dict[Any, Program] = like._traced if like else {}
        self._chosen: dict[Any, Chosen] = {}
        self._before: dict[Any, Chosen] = {**like._before, **like._chosen} if like else {}
        self._ready: dict[Any, Executable] = {}

    def call(self, args: Any, kwargs: Any) -> Call:
        """The arguments as flat arrays."""
        static = self.options.static_argnums, self.options.static_argnames
        return flatten_call(self.making.step, args, kwargs, *static)

    def trace(self, call: Call) -> Program:
        """The program as it is planned: in microbatches, if that was asked for."""
        key = _key(call)
        if key not in self._traced:
            self._traced[key] = self.making.trace(call)
        return self.making.take_turns(self._traced[key])

    def plan(self, call: Call) -> tuple[Program, Plan]:
        """The program that runs, and its plan."""
        key = _key(call)
        if key not in self.planned:
            program = self.trace(call)
            self._log_again(program)
            self.planned[key] = self._made(key, program)
        return self.planned[key]

    def executable(self, call: Call) -> Executable:
        """The plan on the devices at hand."""
        key = _key(call)
        if key not in self._ready:
            self._ready[key] = self.on(call, self.options.devices)
        return self._ready[key]

    def on(self, call: Call, devices: Sequence[jax.Device] | None) -> Executable:
        """The plan on other devices; not kept."""
        mesh = device_mesh(self.options.mesh, devices)
        program, plan = self.plan(call)
        return Executable(program, plan, mesh, donated_leaves(self.making.step, program.inputs, self.options))

    def _made(self, key: Any, program: Program) -> tuple[Program, Plan]:
        if self.options.plan is not None:
            return self.making.plan(program)
        chosen = self.making.choose(program, None if self.options.pipeline else self._before.get(key))
        self._chosen[key] = chosen
        return chosen.program, chosen.plan

    def _log_again(self, program: Program) -> None:
        """One line when a step that has been planned is planned for other shapes."""
        if not self.planned or self.options.plan is not None:
            return
        before, _ = next(reversed(self.planned.values()))
        known = {leaf.path: leaf for leaf in before.inputs}
        new = [leaf for leaf in program.inputs if known.get(leaf.path) != leaf]
        what = f"{new[0].path} is {_type(new[0])}" if new else _other_change(before, program)
        more = f" and {len(new) - 1} more changed" if len(new) > 1 else ""
        log.warning("planning %s again: %s%s", program.name, what, more)


def _key(call: Call) -> Any:
    """What of a call a plan depends on."""
    return call.tree, tuple(sorted(call.static.items(), key=str)), tuple(map(_typed, call.leaves)), settings()


def _type(leaf: Leaf) -> str:
    return f"{'weak ' if leaf.weak else ''}{leaf.dtype}{list(leaf.shape)}"


def _other_change(before: Program, after: Program) -> str:
    changed = before.in_tree != after.in_tree
    return "the tree of its arguments changed" if changed else "a static argument or a setting of jax changed"


def _typed(x: Any) -> tuple[Any, ...]:
    """What of an argument a plan depends on."""
    aval = x if hasattr(x, "dtype") else jax.typeof(x)
    return tuple(aval.shape), aval.dtype, bool(getattr(aval, "weak_type", False))
