"""MaxText on TPU v5e and v5p (README of AI-Hypercomputer/maxtext)."""

from collections.abc import Iterator
from math import log2

import meshdsl as md
from bench.published.case import Case, rows
from meshdsl.models.llama import Config

TABLE = "maxtext_tpu_readme"
REASON = "sizes, batch or mesh of the model are not published with the row"
VOCABULARY = 32000


def reason(row: dict[str, str]) -> str:
    """Returns why a row cannot be scored; empty if it can."""
    return "" if row["seq"] and _scale(row["model"]) else REASON


def cases() -> Iterator[Case]:
    """Yields every row that can be scored."""
    for i, row in enumerate(rows(TABLE)):
        if not reason(row):
            yield _case(i, row)


def _case(number: int, row: dict[str, str]) -> Case:
    remat = "all" if row["remat"].startswith("full") else "weights"  # "minimal" stores the matmuls with weights
    config = _config(_scale(row["model"]), int(row["seq"]), remat)
    chips, dcn, tp = int(row["chips"]), int(row["dcn_dp"]), int(row["ici_tp"])
    batch = round(float(row["per_device_batch"]) * chips)
    measured = _model_flops(config, batch) / chips / float(row["tflops_per_chip"]) / 1e12
    mesh = f"slice={dcn},data={row['ici_fsdp']},model={tp}"
    rules = md.Rules(
        "batch:(slice,data) heads:model hidden:model vocab:model", params="embed:data", optimizer="embed:data"
    )
    label = f"{row['model']} {row['accelerator']} batch {row['per_device_batch']} per chip"
    return Case(
        *(
            TABLE,
            number,
            label,
            f"{row['model']} {row['tpu']}",
            f"tpu-{row['tpu']}",
            config,
            batch,
            mesh,
            measured,
            rules,
        ),
        xla=True,
    )


def _scale(model: str) -> int:
    """Returns how often MaxText's smallest model is doubled; 0 if the size is not a power of two."""
    size = int(model.removesuffix("B"))
    return int(log2(size)) if size & (size - 1) == 0 else 0


def _config(doublings: int, seq: int, remat: str) -> Config:
    """Doubles heads and hidden, embed, and layers in turn, as MaxText's ``global_parameter_scale`` (pyconfig.py)."""
    each, rest = divmod(doublings, 3)
    wide, embed = 2 ** (each + (rest > 0)), 2 ** (each + (rest > 1))
    heads = 16 * wide
    return Config(
        16 * 2**each,
        2048 * embed,
        7168 * wide,
        heads,
        heads,
        seq=seq,
        vocab=VOCABULARY,
        remat=remat,
        dtype="bfloat16",
        attend="flash",
    )


def _model_flops(c: Config, batch: int) -> float:
    """Returns FLOPs per step without recomputation, as MaxText counts them: full attention, no embedding lookup."""
    tokens, width = batch * c.seq, c.heads * c.head
    weights = c.layers * (4 * c.embed * width + 3 * c.embed * c.hidden) + c.embed * c.vocab
    return 3.0 * (2 * tokens * weights + 4 * tokens * c.seq * width * c.layers)
