"""Tables of Megatron-LM: GPT on DGX A100 and H100, tensor and pipeline parallel.

Settings that a table omits are assumed per table, as listed in docs/evidence/predictions.md.
"""

from collections.abc import Iterator
from typing import Any

import meshdsl as md
from bench.published.case import PIECES, REPLICATED, TENSOR, Case, rows, stages
from meshdsl.models.gpt import Config

Row = dict[str, str]
_RULES = f"batch:data layers:pipe {TENSOR}"


def sc21() -> Iterator[Case]:
    """Narayanan et al. 2021, table 1: full recomputation, replicated optimizer state."""
    for i, row in enumerate(rows("megatron_sc21_table1")):
        yield _case("megatron_sc21_table1", i, row, float(row["derived_iter_s"]), row["recompute"])


def korthikanti() -> Iterator[Case]:
    """Korthikanti et al. 2022, table 5: with and without selective recomputation and sequence parallelism."""
    for i, row in enumerate(rows("korthikanti_table5")):
        yield _case("korthikanti_table5", i, row, float(row["iter_s"]), row["recompute"])


def h100_weak() -> Iterator[Case]:
    """The README of Megatron-LM, July 2024: weak scaling on H100, with flash attention and a sharded optimizer."""
    for i, row in enumerate(rows("megatron_h100_weak_2024")):
        chunks = {1: "1", 2: "6", 16: "7"}[int(row["pp"])]
        row = {**row, "mbs": str(_microbatch_size(row)), "vp": chunks, "sequence_parallel": "tp"}
        flops = _model_flops(row) / int(row["gpus"])
        seconds = flops / float(row["tflops_per_gpu_model"]) / 1e12
        yield _case("megatron_h100_weak_2024", i, row, seconds, "flash", "dgx-h100", {})


def _case(
    table: str,
    number: int,
    row: Row,
    seconds: float,
    recompute: str,
    hardware: str = "dgx-a100",
    layouts: dict[str, str] = REPLICATED,
) -> Case:
    n = _numbers(row)
    microbatches = n["gbs"] // (n["dp"] * n["mbs"])
    full = recompute == "full"
    pipeline = stages(n["pp"], microbatches, "stage" if full else "none")
    attend = "products" if full else "flash" if recompute == "flash" else "recomputed"
    remat = "all" if full and n["pp"] == 1 else "none"
    vocab = n.get("vocab", 51200)
    config = Config(
        n["layers"], n["hidden"], n["heads"], seq=n["seq"], vocab=vocab, remat=remat, dtype="bfloat16", attend=attend
    )
    state = " ".join(f"{key}{n[key]}" for key in ("tp", "pp", "vp", "dp", "mbs", "gbs"))
    mesh = f"pipe={n['pp']},data={n['dp']},model={n['tp']}"
    rules = _RULES if n["pp"] > 1 else f"batch:data {TENSOR}"
    label = f"{row['model']} {state} {row.get('recompute', '')}".strip()
    return Case(
        table,
        number,
        label,
        row["model"],
        hardware,
        config,
        n["gbs"],
        mesh,
        seconds,
        md.Rules(rules),
        pipeline,
        n["vp"],
        layouts,
        overlap=not layouts,  # 2021 and 2022: gradients are reduced after the backward pass
        pieces=1 if layouts else PIECES,  # the README names --tp-comm-overlap
    )


def _numbers(row: Row) -> dict[str, Any]:
    return {key: int(value) for key, value in row.items() if value.isdigit()}


def _model_flops(row: Row) -> float:
    """Returns FLOPs per step without recomputation (Narayanan et al. 2021, 5.1)."""
    n = _numbers(row)
    s, h, layers, vocab = n["seq"], n["hidden"], n["layers"], n["vocab"]
    return 72.0 * n["gbs"] * s * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))


def _microbatch_size(row: Row) -> int:
    """Returns sequences per microbatch: one with pipeline stages, else all of a rank."""
    return 1 if row["pp"] != "1" else int(row["gbs"]) // int(row["dp"])
