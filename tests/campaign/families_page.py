"""Writes docs/transformers-families.md from the verdicts of families.py: at a glance, by reason, and every class.

Nothing on the page is kept by hand: families are patterns of model types, reasons are patterns of what was refused. A
reason that no pattern knows is shown as it was said.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Result = tuple[str, str, str, Mapping[str, Any]]
"""(model type, kind, name of the class, what was found)."""
ORDER = ("right", "refused", "wrong", "unclear", "not built")
BATCHES = ("plain", "odd", "padded right", "padded left", "packed")
TEXTS = tuple(f"generate{how}" for how in ("", " padded", " short", " beams", " chunks", " turns"))
WHOLE = "whole sequences"


@dataclass(frozen=True)
class Reason:
    """Why some classes are refused, or some of their batches: what is said of it, in plain words, and what to do."""

    name: str
    pattern: str
    words: str
    instead: str = WHOLE


REASONS = (
    Reason(
        "attention of its own",
        "does not use transformers' attention interface|does not call the attention function",
        "the model's own code computes attention, so nothing can be put in its place",
    ),
    Reason(
        "sparse or chunked attention",
        r"layer_types has '\w*(indexed|chunked|compressed|sparse)\w*'",
        "a query sees chosen or compressed keys, or those of its chunk; mesh attention knows bands inside documents",
    ),
    Reason(
        "recurrence or convolution",
        "mixes tokens outside of plain attention",
        "layers other than attention carry information from token to token, and would stop at the end of a shard",
    ),
    Reason(
        "two sequences",
        "is an encoder-decoder model",
        "an encoder and a decoder, with attention across them",
        "whole sequences, or a `MeshAttention` in your own layers, which supports cross attention",
    ),
    Reason(
        "positions of its own",
        "computes its own positions|counts padding as positions|position_ids of row",
        "the model counts positions itself, and would count a rank's own tokens (OPT, and Whisper when it "
        "generates, only if padded on the left)",
    ),
    Reason(
        "masks or biases of its own",
        "own code uses|does not know|custom 4D masks|an unknown mask",
        "the model makes or reads a mask or a bias for pairs of tokens, which no rank has as a whole",
    ),
    Reason(
        "pooled output",
        "a pooled output",
        "the model returns something computed from all tokens or from the first",
        "`add_pooling_layer=False`, and your own pooling over all ranks",
    ),
    Reason(
        "loss of its own",
        "computes its loss in its own way",
        "a mean over a rank's own tokens does not add up over the ranks; outputs are right",
        "no labels; the loss from its logits, with `reduce_loss`",
    ),
    Reason(
        "generation of its own",
        "that it did not put into the cache|the model returns .*, which each rank has",
        "a layer reads the cached keys of another, or the model returns more than logits; sharded batches are right",
        "generation in one process",
    ),
    Reason(
        "code of its own",
        "with mesh attention: it raised",
        "the model's own code raises an error with what a rank gives it",
    ),
)

FAMILIES = {
    "Llama": r"llama.*|mllama|diffllama",
    "Qwen": r"qwen.*",
    "Mistral, Mixtral": r"mistral.*|ministral.*|mixtral|pixtral",
    "Gemma": r".*gemma.*(?<!t5gemma)(?<!t5gemma2)",
    "DeepSeek": r"deepseek.*",
    "gpt-oss": r"gpt_oss",
    "Phi": r"phi.*",
    "OLMo": r"olmo.*|flex_olmo",
    "GLM": r"glm.*",
    "Kimi, MiniMax": r"kimi.*|minimax.*",
    "Granite": r"granite.*",
    "Command (Cohere), Aya": r"cohere.*|aya.*",
    "Nemotron": r"nemotron.*",
    "SmolLM, SmolVLM": r"smol.*",
    "Falcon": r"falcon(?!_mamba|_h1).*",
    "GPT-2, GPT-NeoX, GPT-J": r"gpt2|gpt_neo.*|gptj|gpt_bigcode|openai-gpt",
    "OPT, BLOOM, MPT": r"opt|bloom|mpt",
    "BERT, DistilBERT, ALBERT, ELECTRA": r"bert|distilbert|albert|electra",
    "ModernBERT, EuroBERT, NomicBERT": r"modernbert.*|eurobert|nomic_bert",
    "RoBERTa, XLM-R, CamemBERT": r"(xlm-)?roberta.*|camembert",
    "DeBERTa": r"deberta.*",
    "T5, BART, Pegasus, Marian": r".*t5(gemma2?)?|m?bart|plbart|.*pegasus.*|marian|m2m_100",
    "Mamba, RWKV, xLSTM and hybrids": r"mamba.*|falcon_(mamba|h1)|[jb]amba|zamba.*|rwkv|xlstm|(bailing|olmo)_hybrid|"
    r"granitemoehybrid|nemotron_h|qwen3_next|kimi_linear|minimax",
    "LLaVA, InternVL, Idefics, PaliGemma": r".*llava.*|internvl|idefics.*|paligemma",
    "Whisper, Qwen-Audio, Voxtral": r"whisper|qwen2_audio|voxtral.*",
}
"""What people call families, as patterns of model types. A type may be in several."""


def page(results: list[Result], *, version: str, command: str) -> str:
    counts = ", ".join(f"{sum(1 for *_, found in results if found['verdict'] == one)} {one}" for one in ORDER)
    lines = [
        "# Families of transformers",
        "",
        f"<!-- Written by `{command}`; do not edit. -->",
        "",
        *wrap(
            f"Every model class for tokens in the registries of transformers {version}: a tiny model of each runs on "
            "4 ranks and is compared with one process: outputs for five batches (plain, of odd length, padded on the "
            "right, padded on the left, packed), loss and gradients for the plain one; and what it generates, with the "
            "tokens and logits of one process without a cache (from plain prompts, prompts padded on the left, and "
            "prompts of two tokens, with beams, in chunks, and in two turns). A class is right if no batch or text is "
            "wrong and some are right; it is refused if an error of this library says why, on every rank and for every "
            "batch. [tests/campaign/families.py](../tests/campaign/families.py) writes this page."
        ),
        "",
        f"{len(results)} classes: {counts}.",
        *["", generation(results)],
        *["", "## At a glance", "", *glance(results)],
        *["", "## Why some are refused", "", *by_reason(results)],
        *every_class(results),
    ]
    return "\n".join(lines) + "\n"


def generation(results: list[Result]) -> str:
    """How many of the right classes generate, and from how many of the prompts."""
    right = [found["batches"] for *_, found in results if found["verdict"] == "right"]
    verdicts = [{judged[name][0] for name in TEXTS if name in judged} - {"not run"} for judged in right]
    able = [found for found in verdicts if found]
    every, some = sum(found == {"right"} for found in able), sum(found > {"right"} for found in able)
    how = f"{every} from every prompt, {some} from some, {len(able) - every - some} from none"
    return f"{len(able)} of the right classes can generate: {how}."


def glance(results: list[Result]) -> list[str]:
    lines = [
        *wrap(
            "By model type (`config.model_type`). A star marks types with an exception, such as their loss; an "
            "exception is listed with its class below. *Whole sequences* means: run the model without "
            "`parallelize`, on whole sequences. Configs are the defaults of transformers, made small; "
            "a checkpoint with layers of other kinds, such as LFM2 with convolutions, is judged when it first runs. "
            "Multimodal models are given text alone."
        ),
        "",
        "| family | right | refused | instead |",
        "| --- | --- | --- | --- |",
    ]
    for family, pattern in FAMILIES.items():
        chosen = [one for one in results if re.fullmatch(pattern, one[0])]
        if any(found["verdict"] in ("right", "refused") for *_, found in chosen):
            refused, instead = refused_types(chosen)
            untried = types_with("not built", chosen)
            cells = [family, right_types(chosen), refused + f" (not tried: {untried})" * bool(untried), instead]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def right_types(results: list[Result]) -> str:
    starred = {one[0] for one in results if one[3]["verdict"] == "right" and exceptions(one[2], one[3])}
    return ", ".join(one + r"\*" * (one in starred) for one in types_of("right", results)) or "–"


def types_with(verdict: str, results: list[Result]) -> str:
    """Model types of which no class has a better verdict."""
    better = {one for other in ORDER[: ORDER.index(verdict)] for one in types_of(other, results)}
    return ", ".join(one for one in types_of(verdict, results) if one not in better)


def types_of(verdict: str, results: list[Result]) -> list[str]:
    return sorted({one[0] for one in results if one[3]["verdict"] == verdict})


def refused_types(results: list[Result]) -> tuple[str, str]:
    """What is refused, by reason, and what to do instead; a class is named where others of its type are right."""
    right = types_of("right", results)
    reasons: dict[str, dict[str, Reason]] = {}
    for model_type, _, name, found in sorted(results, key=lambda one: one[:3]):
        for said in exceptions(name, found) if found["verdict"] == "refused" else ():
            label = f"{model_type} as {name}" if model_type in right else model_type
            reason = reason_of(said)
            reasons.setdefault(label, {})[reason.name] = reason
    labels: dict[str, list[str]] = {}
    for label, told in reasons.items():
        labels.setdefault(" and ".join(sorted(told, reverse=True)), []).append(label)
    texts = [f"{', '.join(ones)}: {why}" for why, ones in labels.items()]
    instead = {reason.instead for told in reasons.values() for reason in told.values()}
    longest = [one for one in sorted(instead) if not any(one != other and one in other for other in instead)]
    return "; ".join(texts) or "–", "; ".join(longest) or "–"


def by_reason(results: list[Result]) -> list[str]:
    """A table of plain reasons, with the number of classes that have them and what the errors say."""
    found: dict[str, tuple[Reason, dict[str, set[str]]]] = {}
    for model_type, _, name, judged in results:
        for said in exceptions(name, judged) if judged["verdict"] in ("right", "refused") else ():
            reason = reason_of(said)
            classes = found.setdefault(reason.name, (reason, {}))[1]
            classes.setdefault(judged["verdict"], set()).add(f"{name} ({model_type})")
    lines = ["| reason | refused | right but for it | in plain words | instead |", "| --- | --- | --- | --- | --- |"]
    for reason, classes in sorted(found.values(), key=lambda one: -len(one[1].get("refused", ()))):
        counts = [str(len(classes.get(verdict, ()))) for verdict in ("refused", "right")]
        lines.append(f"| {reason.name} | {counts[0]} | {counts[1]} | {escaped(reason.words)} | {reason.instead} |")
    return lines


def every_class(results: list[Result]) -> list[str]:
    groups: dict[str, dict[str, list[str]]] = {verdict: {} for verdict in ORDER}
    for model_type, _, name, found in results:
        for why in said_of(name, found):
            groups[found["verdict"]].setdefault(why, []).append(f"{name} ({model_type})")
    lines = []
    for verdict, told in groups.items():
        lines += ["", f"## {verdict.capitalize()}"] if told else []
        for why, names in sorted(told.items(), key=lambda item: (-len(item[1]), item[0])):
            lines += ["", *wrap(f"**{why}:** {', '.join(sorted(set(names), key=str.lower))}")]
    return lines


# What was said of a class


def reason_of(said: str) -> Reason:
    return next((one for one in REASONS if re.search(one.pattern, said)), Reason(said, "", said))


def said_of(name: str, found: Mapping[str, Any]) -> list[str]:
    """Why a class was not built, or which batches are refused and why; the name of a class is left out."""
    if found["verdict"] == "not built":
        return [found["why"].partition("\n")[0][:120].replace("`", "")]
    return exceptions(name, found) or ["without exception"]


def exceptions(name: str, found: Mapping[str, Any]) -> list[str]:
    told: dict[str, list[str]] = {}
    judged = found.get("batches", {})
    tried = {batch: judged[batch] for batch in (*BATCHES, *TEXTS) if judged.get(batch, ["not run"])[0] != "not run"}
    for batch, (verdict, why) in tried.items():
        if verdict != "right":
            text = why.replace(name, "…").replace(" when the batch has padding on the left", "").partition(";")[0]
            told.setdefault(re.sub(r"^\S+ (mixes|is an encoder|passed|does not use)", r"… \1", text), []).append(batch)
    return [f"{why} ({', '.join(names)})" if len(names) < len(tried) else why for why, names in told.items()]


def escaped(text: str) -> str:
    return text.replace("|", r"\|")


def wrap(text: str) -> Iterable[str]:
    return textwrap.wrap(text, 120, break_on_hyphens=False, break_long_words=False)
