"""``meshdsl inspect``: what a script's own ``jax.jit`` steps communicate, beside the best plan of the same steps."""

from pathlib import Path
from typing import Annotated, Any

import typer

from meshdsl.cli.options import AsJSON, TopologyName
from meshdsl.cli.output import check_writable, show, working
from meshdsl.cli.programs import load_topology_named, python_file
from meshdsl.errors import ArgumentError, CheckError
from meshdsl.util.exit_status import BAD_INPUT, CHANGED


def inspect(
    script: Annotated[
        str,
        typer.Argument(help="a Python script that calls steps of jax.jit; nothing in it changes", show_default=False),
    ],
    arguments: Annotated[list[str] | None, typer.Argument(help="arguments of the script, after --")] = None,
    step: Annotated[
        str | None, typer.Option(help="name of the jitted function; the script ends at its first call")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(help="virtual CPU devices for the script; default: those at hand")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="compile for absent devices, such as tpu-v5e:4x4; CPUs run the script"),
    ] = None,
    topology: TopologyName = None,
    check: Annotated[
        bool, typer.Option("--check", help="run the compiled steps on simulated devices, beside what they compute")
    ] = False,
    types: Annotated[
        bool, typer.Option("--types", help="show how every value lies after the partitioner: S, B or P per mesh axis")
    ] = False,
    compare: Annotated[bool, typer.Option(help="plan the same steps, and show what the plan sends instead")] = True,
    save: Annotated[
        Path | None, typer.Option(help="write what the step sends to this file, for diff, report and golden files")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="write what the step sends as an HTML page to this file")] = None,
    as_json: AsJSON = False,
) -> None:
    """Run a script, and show what its jitted steps communicate, line by line, beside the best plan.

    Without --step, the script runs to its end, and every jitted function over several devices is shown. With --check,
    the status is 1 if the compiler made a result wrong.
    """
    import jax

    from meshdsl.api.jitted_calls import inspect_script
    from meshdsl.lowering.aot_targets import parse_target

    check_writable(save, html)
    file = python_file(script)
    wanted = parse_target(target).size if target and devices is None else devices
    if wanted is not None:
        jax.config.update("jax_num_cpu_devices", wanted)
    costs = load_topology_named(topology) if topology else None
    with working(f"running {script}"):
        found = inspect_script(file, arguments or (), step, costs, target)
    if (save or html) and len(found) > 1:
        names = ", ".join(each.name for each in found)
        raise ArgumentError(f"--save and --html are of one step, and {script} has {len(found)}: give --step of {names}")
    if save is not None:
        found[0].save(save)
    if html is not None:
        found[0].report(html)
    texts: list[str] = []
    facts: list[dict[str, Any]] = []
    wrong = unknown = False
    for each in found:
        texts.append(str(each))
        facts.append(each.facts)
        try:
            if types:
                with working(f"running {each.name} on simulated devices"):
                    found_types = each.types()
                texts.append(str(found_types))
                facts[-1]["types"] = found_types.facts
            if check:
                with working(f"checking {each.name}"):
                    judged = each.check(raises=False)
                texts.append(str(judged))
                facts[-1]["checked"] = judged.facts
                wrong, unknown = wrong or not judged.equal, unknown or not judged.agreeing
        except CheckError as error:  # the program is too large
            texts.append(str(error))
            facts[-1]["not_checked"] = str(error)
            unknown = True
        if compare:
            with working(f"planning {each.name}"):
                try:
                    beside = each.compare()
                    texts.append(str(beside))
                    facts[-1]["compared"] = beside.facts
                except ArgumentError as error:
                    texts.append(str(error))
                    facts[-1]["not_compared"] = str(error)
    show("inspect", "\n\n".join(texts), {"steps": facts}, as_json)
    if wrong or unknown:
        raise typer.Exit(CHANGED if wrong else BAD_INPUT)
