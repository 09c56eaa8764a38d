"""NVIDIA's recipes on DGX H100 and GB200 (READMEs of NVIDIA/dgxc-benchmarking): dense models in bf16."""

from collections.abc import Iterator
from dataclasses import replace

import meshdsl as md
from bench.published.case import PIECES, TENSOR, Case, rows, stages
from meshdsl.models import gpt, llama

TABLE = "dgxc_benchmarking"
_LLAMA = llama.CONFIGS
MODELS: dict[str, gpt.Config | llama.Config] = {
    "Llama 3.1 8b": _LLAMA["llama3-8b"],
    "Llama 3.1 70b": _LLAMA["llama3-70b"],
    "Llama 3.1 405b": _LLAMA["llama3-405b"],
    "Llama3.1 405b": _LLAMA["llama3-405b"],
    "Llama3 8b Finetuning SFT": _LLAMA["llama3-8b"],
    "Llama3 70b Finetuning SFT": _LLAMA["llama3-70b"],
    "GPT3 175b (NeMo Megatron)": gpt.CONFIGS["gpt3-175b"],
    "Maxtext Llama3 70b": _LLAMA["llama3-70b"],
    "Maxtext LLama2 70b": replace(_LLAMA["llama3-70b"], vocab=32000),  # Touvron et al. 2023
    # Parmar et al. 2024, Nemotron-4 15B; Adler et al. 2024, Nemotron-4 340B: squared ReLU, no gate
    "Nemotron4 15b": llama.Config(32, 6144, 24576, 48, 8, vocab=256000, gated=False),
    "Nemotron4 340b": llama.Config(96, 18432, 73728, 96, 8, head=192, vocab=256000, gated=False),
}
HARDWARE = {"H100": "dgx-h100", "GB200": "gb200-nvl72"}
REASONS = {
    "FP8": "products in FP8, which no row is planned with yet",
    "experts": "mixtures without dropping tokens, whose experts' loads the tables do not give",
    "LORA": "adapters: most parameters are frozen, which no model of ours is",
    "chunks": "stages, and no word on whether their layers are interleaved (as 1f1b they are predicted 47% too long)",
    "sizes": "no sizes of the model are published with the row",
}


def reason(row: dict[str, str]) -> str:
    """Returns why a row cannot be scored; empty if it can."""
    if row["dtype"] != "BF16":
        return REASONS["FP8"]
    if any(name in row["model"].lower() for name in ("grok", "llama4", "deepseek")):
        return REASONS["experts"]
    if "LORA" in row["model"]:
        return REASONS["LORA"]
    if row["pp"] != "1" and not row["vp"]:
        return REASONS["chunks"]
    return "" if row["model"] in MODELS else REASONS["sizes"]


def cases() -> Iterator[Case]:
    """Yields every row that can be scored."""
    for i, row in enumerate(rows(TABLE)):
        if not reason(row):
            yield _case(i, row)


def _case(number: int, row: dict[str, str]) -> Case:
    tp, pp, cp, dp, mbs, gbs = (int(row[name]) for name in ("tp", "pp", "cp", "dp_derived", "mbs", "gbs"))
    maxtext, chunks = row["framework"].startswith("MaxText"), int(row["vp"] or 1) if pp > 1 else 1
    axes = f"pipe={pp},data={dp},context={cp},model={tp}"
    rules = f"batch:data seq:context {TENSOR}{' layers:pipe' if pp > 1 else ''}"
    sharded = {"params": "embed:data", "optimizer": "embed:data"} if maxtext else {}
    label = (
        f"{row['model']} {row['gpus']} x {row['gpu']} tp{tp} pp{pp} vp{chunks} cp{cp} mbs{mbs} gbs{gbs}, {row['tag']}"
    )
    config = replace(
        MODELS[row["model"]],
        layers=int(row["layers"]),
        seq=int(row["seq"]),
        remat="all" if maxtext else "none",
        dtype="bfloat16",
        attend="flash",
    )
    model = f"{row['model']} {row['layers']} layers {row['gpu']}"
    return Case(
        TABLE,
        number,
        label,
        model,
        HARDWARE[row["gpu"]],
        _padded(config),
        gbs,
        axes,
        float(row["step_s"]),
        md.Rules(rules, **sharded),
        stages(pp, gbs // (dp * mbs)),
        chunks,
        xla=maxtext,
        pieces=1 if maxtext else PIECES,  # ``tp_comm_overlap`` of NeMo's recipes
    )


def _padded(config: gpt.Config | llama.Config) -> gpt.Config | llama.Config:
    """Pads GPT's vocabulary as Megatron-LM does, to a multiple of 128 times the size of the tensor axis."""
    return replace(config, vocab=51200) if isinstance(config, gpt.Config) else config
